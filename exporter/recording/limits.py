"""Limits of recorded texts and collections. The recording refuses or cuts what exceeds them; the reader of a feed file refuses it."""

from __future__ import annotations

MAX_NAME_CHARACTERS = 200
"""Maximum length of the name of a Stat or a label. The reader also applies the limit to units and to reasons of losses."""
MAX_LABEL_VALUE_CHARACTERS = 256
MAX_HELP_CHARACTERS = 500
MAX_IDENTITY_CHARACTERS = 256
"""Maximum length of the texts of an identity, such as the run and the node."""
MAX_LABELS = 16
"""Maximum number of labels of a Stat."""
MAX_BUCKETS = 200
"""Maximum number of upper bounds of a histogram, without +Inf."""
