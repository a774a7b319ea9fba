"""Intervals in which no known process held a GPU."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FreeInterval:
    """Interval in which no known process held the GPU, between two monotonic times."""

    start: float
    end: float

    def without(self, start: float, end: float) -> list[FreeInterval]:
        """Return the parts of the interval before *start* and after *end*, two times in the interval."""
        parts = (FreeInterval(self.start, start), FreeInterval(end, self.end))
        return [part for part in parts if part.start < part.end]


class FreeIntervals:
    """Stored intervals without a known holder of a GPU.

    A process that the feed names later may have held the GPU in an interval. The process then takes the interval with its energy.
    """

    def __init__(self) -> None:
        self._intervals: deque[FreeInterval] = deque()

    def add(self, start: float, end: float) -> None:
        """Add an interval that is later than all stored intervals."""
        self._intervals.append(FreeInterval(start, end))

    def take(self, start: float, end: float) -> list[FreeInterval]:
        """Remove and return the parts of the intervals between two times."""
        taken_parts: list[FreeInterval] = []
        remaining_parts: deque[FreeInterval] = deque()
        for interval in self._intervals:
            part = FreeInterval(max(start, interval.start), min(end, interval.end))
            if part.start < part.end:
                taken_parts.append(part)
                remaining_parts.extend(interval.without(part.start, part.end))
            else:
                remaining_parts.append(interval)
        self._intervals = remaining_parts
        return taken_parts

    def discard_before(self, time: float) -> None:
        """Discard the intervals that ended before a time."""
        while self._intervals and self._intervals[0].end < time:
            self._intervals.popleft()
