"""Limits of recorded texts and collections, which the recording checks, and the reader of a feed file checks again."""

from __future__ import annotations

MAX_NAME_CHARACTERS = 200
"""Maximum length of the name of a Stat or a label."""
MAX_LABEL_VALUE_CHARACTERS = 256
MAX_HELP_CHARACTERS = 500
MAX_IDENTITY_CHARACTERS = 256
"""Maximum length of the texts of an identity, such as the run and the node."""
MAX_LABELS = 16
MAX_BUCKETS = 200
