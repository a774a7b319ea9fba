"""What the page left out: counted by family and by reason, and said in the log when it first happens.

Used in the sidecar; any thread may count and read.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections import Counter
from collections.abc import Sequence

from exporter.collectors.family import Family, FamilySpec, Sample

SERIES_DROPPED = FamilySpec(
    "exporter_series_dropped_total",
    "counter",
    "Series that were offered and left out of the page. One that stays out counts again each time its block "
    "is written, which is at most once for each time it was collected. Absent while nothing was left out.",
    labels=("family",),
    source="exposition: the cap on series, and the checks of names, labels and values",
)
SERIES_DROPPED_BY_REASON = FamilySpec(
    "exporter_series_dropped_by_reason_total",
    "counter",
    "The same as exporter_series_dropped_total, by reason: cap (too many series), duplicate (a label set or a "
    "family name that was there already), labels (wrong number, not UTF-8, or too long), name (a family that "
    "cannot be written), value (not a number, NaN, a counter below zero, buckets that fall).",
    labels=("reason",),
    source="exposition",
)

_FAMILIES = 200
"""Families with a count of their own; the rest is counted together, as names may come from the job."""

_OTHER = "<other>"

_LOG_LINES = 20
"""Kinds of losses that are logged, each once; a job that makes names must not fill the log either."""

_LOG = logging.getLogger(__name__)


class Reason(enum.Enum):
    """Why a series was left out; the values of the label `reason`."""

    CAP = "cap"
    DUPLICATE = "duplicate"
    LABELS = "labels"
    NAME = "name"
    VALUE = "value"


class Drops:
    """Counts that only grow."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: Counter[str] = Counter()
        self._reasons: Counter[Reason] = Counter()
        self._told: set[tuple[str, Reason]] = set()

    def add(self, family: str, reason: Reason, series: int) -> None:
        """Count series that were left out, and log the first of their kind.

        Args:
            family: Its name, which must be valid UTF-8.
            reason: Why.
            series: How many; nothing happens for 0.
        """
        if series <= 0:
            return
        with self._lock:
            if family not in self._families and len(self._families) >= _FAMILIES:
                family = _OTHER
            self._families[family] += series
            self._reasons[reason] += series
            first = (family, reason) not in self._told and len(self._told) < _LOG_LINES
            if first:
                self._told.add((family, reason))
        if first:
            _LOG.warning("%d series of %s are left out of the page, reason: %s", series, family, reason.value)

    def families(self) -> Sequence[Family]:
        """The counts as families."""
        with self._lock:
            families = [Sample((family,), series) for family, series in sorted(self._families.items())]
            reasons = [Sample((reason.value,), self._reasons[reason]) for reason in Reason]
        return (
            Family(SERIES_DROPPED, tuple(families)),
            Family(SERIES_DROPPED_BY_REASON, tuple(reasons)),
        )
