"""Families that Stats of the job fill: specification, lifetime and the sentence about absence."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from exporter.families import FamilySpec


class Lifetime(enum.Enum):
    """Time during which the ledger shows the value of a family."""

    TOTAL = "total"  # shown with the totals of the rank; restarts continue the total
    CURRENT = "current"  # shown for a running process with a current feed
    LAST_VALUE = "last value"  # as CURRENT, unless a step is overdue
    POSITION = "position"  # as CURRENT, and after the end of the run until the totals go


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFamily(FamilySpec):
    """Specification of a family that a Stat of the job fills."""

    lifetime: Lifetime = Lifetime.CURRENT


TOTAL_ABSENT = (
    " Absent if the job does not report the value, after the retention time of an ended run, and while the"
    " ledger's state cannot be written."
)
GAUGE_ABSENT = (
    " Absent if the job does not report the value, after the process ended, and while the feed is stale."
)
LAST_VALUE_ABSENT = GAUGE_ABSENT[:-1] + ", and while the run hangs (goodput.hang_after)."
POSITION_ABSENT = (
    " The value of an ended run is shown until the run's totals go. Absent if the job does not report the value,"
    " and while the feed of a living process is stale."
)
