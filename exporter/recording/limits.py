"""Limits of what one process records: checked where values are recorded, and again where a feed file is read."""

from __future__ import annotations

MAX_NAME_CHARACTERS = 200
"""Characters of a Stat's or a label's name."""
MAX_LABEL_VALUE_CHARACTERS = 256
MAX_HELP_CHARACTERS = 500
MAX_IDENTITY_CHARACTERS = 256
"""Characters of a run, a node and the other texts of an identity."""
MAX_LABELS = 16
MAX_BUCKETS = 200
