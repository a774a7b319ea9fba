"""Timers: one-logger's three small classes for figures of one's own.

Used in the training process, each by one thread at a time; the recording of training does not use them. Durations come
from the performance counter, so a step of the wall clock changes none. A start of what runs and a stop of what does not
are misuse: counted, and without effect.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from exporter.training.attributes import TracingTimestamp
from exporter.training.metrics import report


class Timer:
    """Adds up the time between starts and stops.

    Args:
        clock: Of the performance counter, seconds.
    """

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
        """Stop it.

        Args:
            reset: Whether the next start begins from 0.

        Returns:
            Seconds since the last reset.
        """
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


class MultiWindowTimer:
    """Statistics of stretches of time that do not overlap."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._current: TracingTimestamp | None = None
        self._first: TracingTimestamp | None = None
        self._end: TracingTimestamp | None = None
        self._started = 0
        self._durations = MetricSummarizer()

    def start(self, start_time: TracingTimestamp | None = None) -> None:
        """Begin a window, now or at the time that is given."""
        if self._current is not None:
            report("MultiWindowTimer.start", "running", "to be stopped before it is started again")
            return
        self._current = start_time or TracingTimestamp.now()
        self._first = self._first or self._current
        self._started += 1

    def stop(self, stop_time: TracingTimestamp | None = None) -> None:
        """End the window, now or at the time that is given."""
        if self._current is None:
            report("MultiWindowTimer.stop", "not_running", "to be started before it is stopped")
            return
        self._end = stop_time or TracingTimestamp.now()
        seconds = self._end.perf_counter_seconds - self._current.perf_counter_seconds
        self._durations.add_value(max(seconds, 0.0))
        self._current = None

    @property
    def is_active(self) -> bool:
        """Whether a window is open."""
        return self._current is not None

    @property
    def current_window_start(self) -> TracingTimestamp | None:
        """When the open window began; None where none is open."""
        return self._current

    @property
    def first_window_start(self) -> TracingTimestamp | None:
        """When the first one began."""
        return self._first

    @property
    def latest_window_end(self) -> TracingTimestamp | None:
        """When the latest that has ended did."""
        return self._end

    @property
    def total_window_count(self) -> int:
        """Windows that have begun."""
        return self._started

    @property
    def total_time_sec(self) -> float:
        """Seconds of the windows that have ended."""
        return self._durations.total_value or 0.0

    @property
    def min_window_duration_sec(self) -> float | None:
        """The shortest that has ended; None where none has."""
        return self._durations.min_value

    @property
    def max_window_duration_sec(self) -> float | None:
        """The longest that has ended; None where none has."""
        return self._durations.max_value

    @property
    def avg_window_duration_sec(self) -> float | None:
        """The mean of those that have ended; None where none has."""
        return self._durations.avg_value

    @property
    def latest_window_duration_sec(self) -> float | None:
        """The latest that has ended; None where none has."""
        return self._durations.latest_value


class MetricSummarizer:
    """The latest, the extremes, the mean and the total of numbers; each is None before the first.

    Attributes:
        latest_value: The last that was added.
        min_value: The least.
        max_value: The greatest.
        avg_value: The mean.
        total_value: The sum.
        count: How many.
    """

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
