"""Rows of the tables of GPU families: a family, the readings that fill it, and the rules of counters."""

from __future__ import annotations

from dataclasses import dataclass

from exporter.collectors.gpu.counters import CounterRule
from exporter.families import FamilySpec

GPU = ("gpu", "uuid")
"""Labels that identify the GPU. They are the first labels of each family of a GPU."""

CHILD_COUNTER = CounterRule(restarts_with_child=True)
"""Rule of totals that start at 0 in each NVML child."""
DRIVER_COUNTER = CounterRule()
"""Rule of counters that started at 0 when the driver was loaded and have no maximum rate."""
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
    """GPU family with alternative sources. A GPU has at most one of the sources at a time.

    Attributes:
        spec: Specification. The labels are `gpu` and `uuid`, then the labels of the reading without the link.
        sources: Alternative sources.
        by_link: True if the value is a sum over the NVLinks. The first label of the reading is then the link; "" if the reading is the sum.
        omitted_at_zero: Values of the last label whose series are absent while the value is 0.
    """

    spec: FamilySpec
    sources: tuple[ReadingSource, ...]
    by_link: bool = False
    omitted_at_zero: frozenset[str] = frozenset()
