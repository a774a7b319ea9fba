"""Specification of a family that Stats of the job fill: lifetime, and the sentences about absence."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from exporter.families import FamilySpec


class Lifetime(enum.Enum):
    """Time during which the ledger publishes a gauge. Other types are published with the totals of the rank."""

    CURRENT = "current"  # while the process is running and its feed is current
    LAST_VALUE = "last value"  # as CURRENT, unless a step is overdue
    POSITION = "position"  # as CURRENT, and after the exit for the retention time of the totals


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFamily(FamilySpec):
    """Specification of a family that a Stat of the job fills."""

    lifetime: Lifetime = Lifetime.CURRENT


TOTAL_ABSENT = (
    " Absent if the job does not report the value, after the retention time of the run (feed.linger), or if the"
    " ledger's state is not writable."
)
GAUGE_ABSENT = (
    " Absent if the job does not report the value, after the exit of the process, or if the feed is stale."
)
LAST_VALUE_ABSENT = (
    " Absent if the job does not report the value, after the exit of the process, if the feed is stale, or if the run"
    " hangs (goodput.hang_after)."
)
POSITION_ABSENT = (
    " After the exit, the last value is shown for the retention time of the run (feed.linger). Absent if the job does"
    " not report the value, or if the feed of a running process is stale."
)
