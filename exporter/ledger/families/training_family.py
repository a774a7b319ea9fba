"""Metric families that Stats of the job fill: the lifetime of gauges, and texts that tell when a family is absent."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from exporter.families import FamilySpec


class Lifetime(enum.Enum):
    """Time during which the ledger publishes a gauge. Other types are published with the totals of the rank."""

    CURRENT = "current"  # while the process is running and its feed is not stale, see `feed.stale_after`
    LAST_VALUE = "last value"  # as CURRENT, but not while a step is overdue
    POSITION = "position"  # as CURRENT, and after the exit as long as the totals, at most `feed.linger`


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFamily(FamilySpec):
    """Specification of a family that a Stat of the job fills."""

    lifetime: Lifetime = Lifetime.CURRENT


# Texts for `absent` of families with a series for each rank. docs/METRICS.md explains the words in italics.
TOTAL_ABSENT = "*not reported*, *expired*, or *not saved*"
GAUGE_ABSENT = "*not reported*, *exited*, or *stale*"
LAST_VALUE_ABSENT = "*not reported*, *exited*, *stale*, or *hang*"
POSITION_ABSENT = "*not reported*, *stale*, or *expired*"

# Texts for `absent` of families that only the node of rank 0 publishes.
RUN_TOTAL_ABSENT = "*not reported*, *other node*, *expired*, or *not saved*"
RUN_GAUGE_ABSENT = "*not reported*, *other node*, *exited*, or *stale*"
RUN_LAST_VALUE_ABSENT = "*not reported*, *other node*, *exited*, *stale*, or *hang*"
RUN_POSITION_ABSENT = "*not reported*, *other node*, *stale*, or *expired*"
