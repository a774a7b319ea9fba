"""Rows: which reading of the NVML child becomes which family.

Used in the sidecar. Each `gpu_<subject>` module has a table of rows beside its specifications; `gpu_state` keeps the
counters that rows ask for, `gpu_families` makes samples of them. Values only.

A reading is a number, or a mapping from the values of further labels (joined by a slash) to numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from exporter.collectors.family import FamilySpec
from exporter.collectors.gpu_counters import CounterRule

GPU_LABELS = ("gpu", "uuid")

PLAIN = CounterRule()
"""A number of things, as the driver counts them."""


@dataclass(frozen=True, slots=True)
class Gauge:
    """A reading that is shown as it is.

    Attributes:
        spec: The family; its labels are `gpu`, `uuid`, the fixed ones, those of the reading.
        reading: The child's name of it.
        windowed: Whether the label `window` follows, with the time over which it was taken.
    """

    spec: FamilySpec
    reading: str
    windowed: bool = False


@dataclass(frozen=True, slots=True)
class Count:
    """A reading that is a counter.

    Attributes:
        spec: The family.
        reading: The child's name of it.
        rule: How to add it up.
        by_link: Whether the first label of the reading is a link, told apart only when asked for.
        rare: Labels that are left out while they never counted.
    """

    spec: FamilySpec
    reading: str
    rule: CounterRule = PLAIN
    by_link: bool = False
    rare: frozenset[str] = frozenset()


Row = Gauge | Count
