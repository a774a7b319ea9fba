"""Idle power of a device, estimated by several methods."""

from __future__ import annotations

from collections import deque

IDLE_METHODS = ("config", "before_start", "min_seen")
"""Methods of the idle power, the most reliable first."""
IDLE_SAMPLES = 720
"""Maximum number of stored passes without a job: an hour at the default interval."""
MIN_IDLE_SAMPLES = 10
IDLE_PERCENTILE = 0.1
IDLE_RATIO = 2.0
"""Ratio of the highest to the lowest power from which the lowest power counts as idle power."""


class IdlePower:
    """Idle power by method.

    `config`: configured by the user. `before_start`: tenth percentile while no process of a run was alive. `min_seen`:
    lowest power, after the highest power was twice as high; before that, the device may never have been idle. Powers are
    medians of three intervals, so that a single invalid reading has no effect.
    """

    def __init__(self, configured_watts: float | None = None) -> None:
        self._configured = configured_watts
        self._before: float | None = None
        self._min_watts: float | None = None
        self._max_watts = 0.0
        self._latest: deque[float] = deque(maxlen=3)
        self._samples: deque[float] = deque(maxlen=IDLE_SAMPLES)

    def note(self, watts: float, *, working: bool | None) -> None:
        """Record the mean power of an interval, and whether a job was running (None if unknown)."""
        if watts <= 0:  # a reading without power is invalid
            return
        self._latest.append(watts)
        if len(self._latest) == self._latest.maxlen:
            median = sorted(self._latest)[1]
            self._min_watts = median if self._min_watts is None else min(self._min_watts, median)
            self._max_watts = max(self._max_watts, median)
        if working is False:
            self._samples.append(watts)
            if len(self._samples) >= MIN_IDLE_SAMPLES:
                self._before = sorted(self._samples)[int(IDLE_PERCENTILE * len(self._samples))]

    def by_method(self) -> dict[str, float]:
        """Return the known idle power by method, the best first."""
        rested = self._min_watts is not None and self._max_watts >= IDLE_RATIO * self._min_watts
        values = (self._configured, self._before, self._min_watts if rested else None)
        return {
            method: value for method, value in zip(IDLE_METHODS, values, strict=True) if value is not None
        }

    def best(self) -> float | None:
        """Return the idle power by the best known method, or None."""
        return next(iter(self.by_method().values()), None)
