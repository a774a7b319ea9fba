"""IdlePower: what a device draws without work, by the ways in which that can be known.

Used in the sidecar by energy collectors; pure values, one thread. Power comes in pass by pass, with whether a job
was running; what is known of idle power goes out by method, the best first:

- `config`: somebody measured it and said so;
- `before_start`: the tenth percentile while no process of any run was alive;
- `min_seen`: the least that was ever seen; too high for a device that was never idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

METHODS = ("config", "before_start", "min_seen")

SAMPLES = 720
"""Passes without a job that are remembered: an hour at the usual interval."""
ENOUGH_SAMPLES = 10
PERCENTILE = 0.1


class IdlePower:
    """One device.

    Args:
        configured_watts: None when nobody knows.
    """

    def __init__(self, configured_watts: float | None = None) -> None:
        self._configured = configured_watts
        self._before: float | None = None
        self._least: float | None = None
        self._samples: deque[float] = deque(maxlen=SAMPLES)

    def note(self, watts: float, *, working: bool | None) -> None:
        """Take the power of one interval.

        Args:
            watts: Its mean.
            working: Whether a job was running; None when that is not known.
        """
        self._least = watts if self._least is None else min(self._least, watts)
        if working is False:
            self._samples.append(watts)
            if len(self._samples) >= ENOUGH_SAMPLES:
                self._before = sorted(self._samples)[int(PERCENTILE * len(self._samples))]

    def by_method(self) -> dict[str, float]:
        """Give what is known, the best first."""
        values = (self._configured, self._before, self._least)
        return {method: value for method, value in zip(METHODS, values, strict=True) if value is not None}

    def best(self) -> float | None:
        """Give the value of the best method there is."""
        return next(iter(self.by_method().values()), None)

    def row(self) -> tuple[float | None, ...]:
        """Write what was seen, for a page."""
        return self._before, self._least

    def resume(self, row: Sequence[float | None]) -> None:
        """Go on from what `row` has written, where nothing was seen yet."""
        before, least = (*row, None, None)[:2]
        self._before = before if self._before is None else self._before
        self._least = least if self._least is None else self._least
