"""Aggregation cycle of all Stats of a process: drains buffers, closes windows by the clock and returns readings.

Runs on the recording thread or on a thread that flushes, within `RecordingThread.run_exclusively`. `window_ends` needs no lock.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import monotonic, time

from exporter.recording.stat_state import CHUNK_SAMPLES, StatState
from exporter.recording.stat_table import StatTable
from exporter.recording.values import StatReading
from exporter.recording.windows import WindowClock


class StatCycle:
    """Aggregation cycle of the Stats of a table.

    Args:
        stats: The table.
        yield_gil: Called between pieces of work, to release the interpreter lock.
    """

    def __init__(self, stats: StatTable, yield_gil: Callable[[], None]) -> None:
        self._stats = stats
        self._yield_gil = yield_gil
        self.after_fork()

    def after_fork(self) -> None:
        """Discard the window clocks. Called by the constructor and in a forked child."""
        self._clocks: dict[float, WindowClock] = {}
        self._scheduled_stats = 0  # number of Stats at the latest `close_windows`
        self._next_position = 0  # position of the first Stat of the next drain

    def window_ends(self) -> list[float]:
        """Return the monotonic times at which windows end."""
        return [clock.due_monotonic for clock in self._clocks.values()]

    def needs_close(self) -> bool:
        """Return True if `close_windows` is due: a window has ended, or a Stat was constructed since the latest call."""
        wall, now = time(), monotonic()
        return len(self._stats) != self._scheduled_stats or any(
            clock.overdue_seconds(wall=wall, monotonic=now) is not None for clock in self._clocks.values()
        )

    def close_windows(self) -> None:
        """Close the windows that have ended, after draining their Stats."""
        wall, now = time(), monotonic()
        states_by_window: dict[float, list[StatState]] = {}  # by length of the window in seconds
        states = self._stats.states()
        self._scheduled_stats = len(states)
        for state in states:
            if (seconds := state.effective.window_seconds) is not None:
                states_by_window.setdefault(seconds, []).append(state)
        self._clocks = {
            seconds: self._clocks.get(seconds) or WindowClock(seconds, wall=wall, monotonic=now)
            for seconds in states_by_window
        }
        for seconds, clock in self._clocks.items():
            overdue_seconds = clock.overdue_seconds(wall=wall, monotonic=now)
            if overdue_seconds is None:
                continue
            for state in states_by_window[seconds]:
                self._drain_state(state)
            start, end = clock.advance(wall=wall, monotonic=now)
            for state in states_by_window[seconds]:
                self._yield_gil()
                state.close_window(start, end, is_late=overdue_seconds >= seconds, wall=wall)

    def drain(self, selects: Callable[[StatState], object], within_seconds: float = inf) -> None:
        """Drain the buffers of the Stats for which the result of *selects* is true.

        After the timeout, the next call starts with the first buffer that was not drained, also if its *selects* is different.
        """
        states, deadline = self._stats.states(), monotonic() + within_seconds
        first_position, self._next_position = min(self._next_position, len(states)), 0
        for position in (*range(first_position, len(states)), *range(first_position)):
            if selects(states[position]):
                if monotonic() > deadline:
                    self._next_position = position
                    break
                self._drain_state(states[position])

    def _drain_state(self, state: StatState) -> None:
        """Drain about as many samples as the buffer contains now. Samples that are added meanwhile do not prolong the call."""
        for _ in range(len(state.buffer) // CHUNK_SAMPLES + 1):
            self._yield_gil()
            if not state.drain(wall=time()):
                return

    def readings(self) -> list[StatReading]:
        """Return the readings of the enabled Stats."""
        readings = []
        for state in self._stats.states():
            if state.enabled:
                self._yield_gil()
                readings.append(state.reading())
        return readings
