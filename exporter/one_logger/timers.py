"""Timers and summaries of one-logger. The classes are not thread-safe."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

from exporter.training.attributes import TracingTimestamp
from exporter.training.misuse import report

__all__ = ["MetricSummarizer", "MultiWindowTimer", "Timer"]

Number = TypeVar("Number", int, float)


class Timer:
    """Stopwatch that sums the times between start and stop."""

    def __init__(self) -> None:
        self._start_seconds: float | None = None
        self._seconds = 0.0

    @property
    def running(self) -> bool:
        """True if the timer is started."""
        return self._start_seconds is not None

    def start(self, start_time: TracingTimestamp | None = None) -> None:
        """Start the timer, now or at an explicit time."""
        if self._start_seconds is not None:
            report("Timer.start", "running", "to be stopped before another start")
            return
        self._start_seconds = time.perf_counter() if start_time is None else start_time.perf_counter_seconds

    def stop(self, reset: bool = False) -> float:
        """Stop the timer and return the running time in seconds since the last reset. With *reset*, reset it afterwards."""
        if self._start_seconds is None:
            report("Timer.stop", "not_running", "to be started before a stop")
            return self._seconds
        self._seconds += max(time.perf_counter() - self._start_seconds, 0.0)
        self._start_seconds = None
        seconds = self._seconds
        if reset:
            self.reset()
        return seconds

    def reset(self, start: bool = False) -> None:
        """Set the running time to 0. With *start*, also start the timer."""
        self._start_seconds = None
        self._seconds = 0.0
        if start:
            self.start()


@dataclass(unsafe_hash=True)  # hashed by value, as in one-logger
class MetricSummarizer(Generic[Number]):
    """Latest value, minimum, maximum, mean and total of the added numbers; None before the first number."""

    latest_value: Number | None = None
    min_value: Number | None = None
    max_value: Number | None = None
    avg_value: float | None = None
    total_value: Number | None = None
    count: int = 0

    def add_value(self, value: Number) -> None:
        """Add a number."""
        self.count += 1
        self.latest_value = value
        self.min_value = value if self.min_value is None else min(self.min_value, value)
        self.max_value = value if self.max_value is None else max(self.max_value, value)
        self.total_value = value if self.total_value is None else self.total_value + value
        self.avg_value = self.total_value / self.count


@dataclass(unsafe_hash=True)  # hashed by value, as in one-logger
class MultiWindowTimer:
    """Statistics of the durations of consecutive windows. The minimum is infinite before the first window has ended."""

    current_window_start: TracingTimestamp | None = None
    first_window_start: TracingTimestamp | None = None
    latest_window_end: TracingTimestamp | None = None
    total_window_count: int = 0  # number of started windows
    total_time_sec: float = 0.0
    min_window_duration_sec: float = inf
    max_window_duration_sec: float = 0.0
    avg_window_duration_sec: float = 0.0
    latest_window_duration_sec: float = 0.0

    @property
    def is_active(self) -> bool:
        """True if a window is open."""
        return self.current_window_start is not None

    def reset(self) -> None:
        """Clear all statistics."""
        vars(self).update(vars(MultiWindowTimer()))

    def start(self, start_time: TracingTimestamp | None = None) -> None:
        """Start a window, now or at an explicit time."""
        if self.current_window_start is not None:
            report("MultiWindowTimer.start", "running", "to be stopped before another start")
            return
        self.current_window_start = start_time or TracingTimestamp.now()
        self.first_window_start = self.first_window_start or self.current_window_start
        self.total_window_count += 1

    def stop(self, stop_time: TracingTimestamp | None = None) -> None:
        """End the window, now or at an explicit time."""
        if self.current_window_start is None:
            report("MultiWindowTimer.stop", "not_running", "to be started before a stop")
            return
        window_start, window_end = self.current_window_start, stop_time or TracingTimestamp.now()
        seconds = max(window_end.perf_counter_seconds - window_start.perf_counter_seconds, 0.0)
        self.latest_window_end = window_end
        self.current_window_start = None
        self.latest_window_duration_sec = seconds
        self.total_time_sec += seconds
        self.avg_window_duration_sec = self.total_time_sec / self.total_window_count
        self.min_window_duration_sec = min(seconds, self.min_window_duration_sec)
        self.max_window_duration_sec = max(seconds, self.max_window_duration_sec)
