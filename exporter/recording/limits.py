"""Limits of recorded texts and collections.

The recording refuses what exceeds a limit. Texts from the environment and from other libraries are cut instead. The reader refuses a
feed file with a text or collection that exceeds its limit.
"""

from __future__ import annotations

MAX_STAT_NAME_CHARACTERS = 200
"""Maximum length of the name of a Stat or of a label. The reader also applies the limit to units and to reasons of losses."""
MAX_LABEL_VALUE_CHARACTERS = 256
"""Maximum length of the value of a Stat's label."""
MAX_HELP_CHARACTERS = 500
"""Maximum length of the help text of a Stat."""
MAX_IDENTITY_CHARACTERS = 256
"""Maximum length of the texts of an identity, such as the run and the node."""
MAX_STAT_LABELS = 16
"""Maximum number of labels of a Stat."""
MAX_BUCKETS = 200
"""Maximum number of upper bounds of a histogram, without +Inf."""
