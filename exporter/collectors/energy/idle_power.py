"""Idle power of a device, estimated by several methods."""

from __future__ import annotations

from collections import deque

IDLE_METHODS = ("config", "before_start", "min_seen")
"""Methods of the idle power, the most reliable first; see `IdlePower`."""
MAX_JOBLESS_SAMPLES = 720
"""Maximum number of stored samples without a job: an hour at the default interval."""
MIN_JOBLESS_SAMPLES = 10
"""Minimum number of samples without a job for the method `before_start`."""
IDLE_QUANTILE = 0.1
"""Quantile of the power without a job that counts as the idle power by the method `before_start`."""
IDLE_RATIO = 2.0
"""Minimum ratio of the highest to the lowest power: below it, the device may never have been idle."""


class IdlePower:
    """Idle power by method.

    - `config`: configured by the user.
    - `before_start`: tenth percentile of the power while no process of a run was alive.
    - `min_seen`: lowest power, published once the highest power is at least twice as high. The lowest and the highest power are
      medians of three intervals, so that a single invalid reading has no effect.
    """

    def __init__(self, configured_watts: float | None = None) -> None:
        self._configured_watts = configured_watts
        self._before_start_watts: float | None = None
        self._min_watts: float | None = None
        self._max_watts = 0.0
        self._latest: deque[float] = deque(maxlen=3)
        self._jobless_watts: deque[float] = deque(maxlen=MAX_JOBLESS_SAMPLES)

    def record(self, watts: float, *, is_working: bool | None) -> None:
        """Record the mean power of an interval, and whether a job was running (None if unknown)."""
        if watts <= 0:  # invalid: an idle device uses power, too
            return
        self._latest.append(watts)
        if len(self._latest) == self._latest.maxlen:
            median = sorted(self._latest)[1]
            self._min_watts = median if self._min_watts is None else min(self._min_watts, median)
            self._max_watts = max(self._max_watts, median)
        if is_working is False:
            self._jobless_watts.append(watts)
            if len(self._jobless_watts) >= MIN_JOBLESS_SAMPLES:
                rank = int(IDLE_QUANTILE * len(self._jobless_watts))
                self._before_start_watts = sorted(self._jobless_watts)[rank]

    def by_method(self) -> dict[str, float]:
        """Return the idle power by method, the most reliable method first. Methods without a value are omitted."""
        was_idle = self._min_watts is not None and self._max_watts >= IDLE_RATIO * self._min_watts
        values = (self._configured_watts, self._before_start_watts, self._min_watts if was_idle else None)
        return {
            method: watts for method, watts in zip(IDLE_METHODS, values, strict=True) if watts is not None
        }

    def best(self) -> float | None:
        """Return the idle power by the most reliable method that has a value, or None without such a method."""
        return next(iter(self.by_method().values()), None)
