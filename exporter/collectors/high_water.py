"""HighWater: what a counter has reached, for kernel numbers that may step back a little.

Used in the sidecar by collectors whose source is not quite a counter: idle and iowait times are corrected by
the kernel, and a difference of two counters that are read one after the other may dip. A step back would
read as a restart in Prometheus and add the whole value to an increase. No threads of its own.
"""

from __future__ import annotations

from collections.abc import Hashable


class HighWater:
    """The largest value seen per key."""

    def __init__(self) -> None:
        self._marks: dict[Hashable, float] = {}

    def hold(self, key: Hashable, value: float) -> float:
        """Give the value, or the larger one that has been seen before."""
        mark = self._marks[key] = max(value, self._marks.get(key, value))
        return mark

    def forget(self, key: Hashable) -> None:
        """Begin anew with the next value."""
        self._marks.pop(key, None)
