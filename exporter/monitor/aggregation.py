"""Aggregation: what a Stat of this face computes over a window.

Used in the training process. Values only.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from exporter.recording.values import Aggregation as RecordedAggregation


class Aggregation(enum.Enum):
    """These are types of aggregations that can be used to accumulate stats.

    Differs from torch 2.13: VALUE is the last sample, while torch binds it to its NONE, so that such a Stat has no
    values at all; it is 1, not 0. `Aggregation(99)` is a ValueError and no nameless member.
    """

    VALUE = 1
    MEAN = 2
    COUNT = 3
    SUM = 4
    MAX = 5
    MIN = 6

    def __int__(self) -> int:
        return self.value

    def __index__(self) -> int:
        return self.value


RECORDED = {each: RecordedAggregation[each.name] for each in Aggregation}
"""The same in the rest of the package."""


def check_aggregations(aggregations: Iterable[object]) -> tuple[Aggregation, ...]:
    """Take members of Aggregation, or of torch's own; each once, in their own order.

    Raises:
        TypeError: It is no collection of them.
    """
    allowed = ", ".join(f"Aggregation.{each.name}" for each in Aggregation)
    if isinstance(aggregations, Aggregation | str) or not isinstance(aggregations, Iterable):
        raise TypeError(f"aggregations must be a collection of {allowed}, not {aggregations!r}")
    found: set[Aggregation] = set()
    for each in aggregations:
        if isinstance(each, Aggregation):
            found.add(each)
        elif type(each).__name__ == "Aggregation" and getattr(each, "name", "") in Aggregation.__members__:
            found.add(Aggregation[str(getattr(each, "name", ""))])
        else:
            raise TypeError(f"unknown aggregation {each!r}; allowed: {allowed}")
    return tuple(each for each in Aggregation if each in found)
