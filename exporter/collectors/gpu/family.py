"""Notation of GPU families: the family, the readings of the NVML child, and the rules of counters."""

from __future__ import annotations

from dataclasses import dataclass

from exporter.collectors.gpu.counters import CounterRule
from exporter.families import FamilySpec

GPU = ("gpu", "uuid")
"""Labels that identify the GPU, the first labels of its families."""

CHILD_COUNTER = CounterRule(restarts_with_child=True)
"""Rule of totals that start at 0 in each NVML child."""
DRIVER_COUNTER = CounterRule()
# A counter of time cannot run faster than the clock. A faster counter is a different metric under the same field id.
NANOSECONDS = CounterRule(scale=1e-9, max_per_second=1.0)
# Above the highest possible rate: all links of NVLink 5 together transfer 1.8e12 bytes per second.
NVLINK_BYTES = CounterRule(max_per_second=2e13)
NVLINK_KIBIBYTES = CounterRule(scale=1024, max_per_second=2e13)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingSource:
    """Reading that provides the values of a family."""

    reading: str  # name in the messages of the NVML child
    rule: CounterRule | None = None  # rule of a counter; None for a gauge


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFamily:
    """GPU family with alternative sources, of which each GPU has one.

    Attributes:
        spec: Specification. Its labels are `gpu` and `uuid`, then those of the reading.
        sources: Alternative sources.
        by_link: True if the value is a sum over the NVLinks. The first label of the reading is then the link.
        rare: Values of the last label whose series are omitted while they are 0.
    """

    spec: FamilySpec
    sources: tuple[ReadingSource, ...]
    by_link: bool = False
    rare: frozenset[str] = frozenset()
