"""Aggregation of all Stats of a process: buffers are drained, windows closed by the clock, readings returned.

Runs on the recording thread, or on a thread that flushes, under the recorder's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import monotonic, time

from exporter.recording.stat_table import StatTable
from exporter.recording.state import CHUNK_SAMPLES, StatState
from exporter.recording.values import StatReading
from exporter.recording.windows import WindowClock


class StatCycle:
    """Aggregation of the Stats of a table.

    Args:
        stats: The table.
        yield_gil: Called between pieces of work.
    """

    def __init__(self, stats: StatTable, yield_gil: Callable[[], None]) -> None:
        self._stats = stats
        self._yield_gil = yield_gil
        self.after_fork()

    def after_fork(self) -> None:
        """Start with new clocks of windows."""
        self._clocks: dict[float, WindowClock] = {}
        self._timed = 0  # Stats that were looked at for a window
        self._first = 0  # the Stat whose buffer is drained first

    def due(self) -> list[float]:
        """Return the monotonic times at which windows end."""
        return [clock.due for clock in self._clocks.values()]

    def has_due_window(self) -> bool:
        """Return True if a window may have ended, or if a Stat was made since the last look."""
        wall, now = time(), monotonic()
        return len(self._stats) != self._timed or any(
            clock.late(wall=wall, monotonic=now) is not None for clock in self._clocks.values()
        )

    def close_windows(self) -> None:
        """Close the windows whose time is over, after draining their Stats."""
        wall, now = time(), monotonic()
        by_length: dict[float, list[StatState]] = {}
        states = self._stats.states()
        self._timed = len(states)
        for state in states:
            if (seconds := state.effective.window_seconds) is not None:
                by_length.setdefault(seconds, []).append(state)
        self._clocks = {
            seconds: self._clocks.get(seconds) or WindowClock(seconds, wall=wall, monotonic=now)
            for seconds in by_length
        }
        for seconds, clock in self._clocks.items():
            late = clock.late(wall=wall, monotonic=now)
            if late is None:
                continue
            for state in by_length[seconds]:
                self._drain_state(state)
            started, ended = clock.advance(wall=wall, monotonic=now)
            for state in by_length[seconds]:
                self._yield_gil()
                state.close_window(started, ended, late_windows=late >= seconds, wall=wall)

    def drain(self, wanted: Callable[[StatState], object], within_seconds: float = inf) -> None:
        """Drain the wanted buffers; after the time the next call continues with the rest, as threads may add faster."""
        states, until = self._stats.states(), monotonic() + within_seconds
        first, self._first = min(self._first, len(states)), 0
        for position in (*range(first, len(states)), *range(first)):
            if wanted(states[position]):
                if monotonic() > until:
                    self._first = position
                    break
                self._drain_state(states[position])

    def _drain_state(self, state: StatState) -> None:
        """Drain a buffer; at most as many samples as it held at the start, however many are added meanwhile."""
        for _ in range(len(state.buffer) // CHUNK_SAMPLES + 1):
            self._yield_gil()
            if not state.drain(wall=time()):
                return

    def readings(self) -> list[StatReading]:
        """Return the readings of the enabled Stats."""
        found = []
        for state in self._stats.states():
            if state.enabled:
                self._yield_gil()
                found.append(state.reading())
        return found
