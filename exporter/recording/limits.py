"""Limits of what one process records: checked where values are recorded, and again where a feed file is read."""

from __future__ import annotations

LONGEST_NAME = 200
"""Characters of a Stat's or a label's name."""
LONGEST_LABEL_VALUE = 256
LONGEST_HELP = 500
LONGEST_IDENTITY = 256
"""Characters of a run, a node and the other texts of an identity."""
MOST_LABELS = 16
MOST_BUCKETS = 200
