"""Timers: one-logger's three small classes for figures of one's own.

Used in the training process, each by one thread at a time. Durations come from the performance counter, so a step of the
wall clock changes none. A start of what runs and a stop of what does not are misuse: counted, and without effect.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from exporter.training.attributes import TracingTimestamp
from exporter.training.metrics import report


class Timer:
    """Adds up the time between starts and stops, seconds of a performance counter."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started: float | None = None
        self._elapsed_seconds = 0.0

    @property
    def running(self) -> bool:
        """Whether it was started and not stopped."""
        return self._started is not None

    def start(self, start_time: TracingTimestamp | None = None) -> None:
        """Start it, now or as of the time that is given."""
        if self._started is not None:
            report("Timer.start", "running", "to be stopped before it is started again")
            return
        self._started = self._clock() if start_time is None else start_time.perf_counter_seconds

    def stop(self, reset: bool = False) -> float:
        """Stop it, and give the seconds since the last reset; with `reset` the next start begins from 0."""
        if self._started is None:
            report("Timer.stop", "not_running", "to be started before it is stopped")
            return self._elapsed_seconds
        self._elapsed_seconds += max(self._clock() - self._started, 0.0)
        self._started = None
        elapsed = self._elapsed_seconds
        if reset:
            self.reset()
        return elapsed

    def reset(self, start: bool = False) -> None:
        """Set it to 0, and start it if that is asked."""
        self._started = None
        self._elapsed_seconds = 0.0
        if start:
            self.start()


class MetricSummarizer:
    """The latest, the extremes, the mean and the total of numbers; each is None before the first."""

    def __init__(self) -> None:
        self.latest_value: float | None = None
        self.min_value: float | None = None
        self.max_value: float | None = None
        self.avg_value: float | None = None
        self.total_value: float | None = None
        self.count = 0

    def add_value(self, value: float) -> None:
        """Add a number."""
        self.count += 1
        self.latest_value = value
        self.min_value = value if self.min_value is None else min(self.min_value, value)
        self.max_value = value if self.max_value is None else max(self.max_value, value)
        self.total_value = value if self.total_value is None else self.total_value + value
        self.avg_value = self.total_value / self.count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MetricSummarizer) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # it changes


class MultiWindowTimer:
    """Statistics of stretches of time that do not overlap.

    Attributes:
        current_window_start: When the open window began; None where none is open.
        first_window_start: When the first one began.
        latest_window_end: When the latest that has ended did.
        total_window_count: Windows that have begun; the other figures are of those that have ended, None before.
    """

    current_window_start: TracingTimestamp | None = None
    first_window_start: TracingTimestamp | None = None
    latest_window_end: TracingTimestamp | None = None
    total_window_count = 0

    def __init__(self) -> None:
        self._durations = MetricSummarizer()

    def reset(self) -> None:
        """Forget everything."""
        self.current_window_start = self.first_window_start = self.latest_window_end = None
        self.total_window_count = 0
        self._durations = MetricSummarizer()

    def start(self, start_time: TracingTimestamp | None = None) -> None:
        """Begin a window, now or at the time that is given."""
        if self.current_window_start is not None:
            report("MultiWindowTimer.start", "running", "to be stopped before it is started again")
            return
        self.current_window_start = start_time or TracingTimestamp.now()
        self.first_window_start = self.first_window_start or self.current_window_start
        self.total_window_count += 1

    def stop(self, stop_time: TracingTimestamp | None = None) -> None:
        """End the window, now or at the time that is given."""
        if self.current_window_start is None:
            report("MultiWindowTimer.stop", "not_running", "to be started before it is stopped")
            return
        self.latest_window_end = end = stop_time or TracingTimestamp.now()
        seconds = end.perf_counter_seconds - self.current_window_start.perf_counter_seconds
        self._durations.add_value(max(seconds, 0.0))
        self.current_window_start = None

    is_active = property(lambda self: self.current_window_start is not None)
    total_time_sec = property(lambda self: self._durations.total_value or 0.0)
    min_window_duration_sec = property(lambda self: self._durations.min_value)
    max_window_duration_sec = property(lambda self: self._durations.max_value)
    avg_window_duration_sec = property(lambda self: self._durations.avg_value)
    latest_window_duration_sec = property(lambda self: self._durations.latest_value)
