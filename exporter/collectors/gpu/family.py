"""Notation of GPU families: the family, the readings of the NVML child, and the rules of counters."""

from __future__ import annotations

from dataclasses import dataclass

from exporter.collectors.gpu.counters import CounterRule
from exporter.families import FamilySpec

GPU = ("gpu", "uuid")
"""Labels of every family of a GPU."""

CHILD_COUNTER = CounterRule(of_process=True)
"""Rule of sums since the start of the NVML child."""
DRIVER_COUNTER = CounterRule()
# A counter of seconds cannot run faster than the clock; a faster counter is a different metric under the same id.
NANOSECONDS = CounterRule(scale=1e-9, most_per_second=1.0)
# Bytes a second that no link reaches: NVLink 5 carries 1.8e12 in all.
NVLINK_BYTES = CounterRule(most_per_second=2e13)
NVLINK_KIBIBYTES = CounterRule(scale=1024, most_per_second=2e13)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingSource:
    """Reading that sets a family's values."""

    reading: str  # name in the messages of the NVML child
    rule: CounterRule | None = None  # how a counter is read; None for a gauge


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFamily:
    """GPU family with the alternative sources of the values; a GPU has a single source."""

    spec: FamilySpec  # labels: `gpu`, `uuid`, then the reading's labels
    sources: tuple[ReadingSource, ...]
    by_link: bool = False  # True if the first label of a reading is an NVLink, over which the family sums
    rare: frozenset[str] = frozenset()  # values of the last label that are omitted if 0
