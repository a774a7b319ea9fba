"""Phase history: the phases of the main thread in the last seconds, for the attribution of energy.

The time is divided into bins of 20 ms, the interval of NVML's power samples. Within a bin, a phase has at most one interval.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import floor
from typing import Protocol

from exporter.recording.value_class import Value, value_class
from exporter.training.phases import PHASES

BINS_PER_SECOND = 50
"""Number of bins per second: a bin lasts 20 ms."""
BIN_SECONDS = 1 / BINS_PER_SECOND
HISTORY_SECONDS = 7.0
"""Length of the history. The sidecar reads the feed every 5 s by default."""
GROUP_BINS = 50
"""Number of bins of a group of intervals. A complete group no longer changes, so it is encoded once."""
NAMES = tuple(PHASES)
_INDEXES = {name: index for index, name in enumerate(NAMES)}


@value_class
class HistoryReading(Value):
    """Copy of the history."""

    until: float  # end of the history, monotonic seconds
    phases: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]  # alternating phase indexes and microseconds, oldest first


class PhaseSeconds(Protocol):
    """Seconds of a phase up to the latest edge, and up to the start of the current bin."""

    name: str
    seconds: float
    bin_seconds: float


class PhaseHistory:
    """Phase intervals up to the start of the current bin, which ends at `bin_end`."""

    __slots__ = ("bin_end", "_bin_number", "_first_phase", "_intervals", "_groups", "_group_end")

    def __init__(self, began: float) -> None:
        self._bin_number = floor(began * BINS_PER_SECOND)
        self.bin_end = (self._bin_number + 1) / BINS_PER_SECOND
        self._first_phase = ""  # phase at the start of the current bin
        self._intervals: list[int] = []  # of the open group: index of the phase, and microseconds
        self._groups: tuple[tuple[int, ...], ...] = ()
        self._group_end = self._bin_number + GROUP_BINS

    def close_bin(
        self, phases: Iterable[PhaseSeconds], active: PhaseSeconds, last: float, now: float
    ) -> None:
        """Append the intervals of the bins up to *now*. *active* is the phase since the latest edge, at *last*.

        The order of the intervals in a bin is not recorded: the phase at the start of the bin is first, *active* is last, and the other
        phases keep the order of *phases*.
        """
        closed_intervals = []
        active_seconds = 0.0
        for phase in phases:
            seconds = phase.seconds - phase.bin_seconds
            phase.bin_seconds = phase.seconds
            if phase is active:
                active_seconds = seconds
            elif seconds > 0:
                closed_intervals.append((phase.name, seconds))
        closed_intervals.sort(key=lambda interval: interval[0] != self._first_phase)
        for name, seconds in closed_intervals:
            self._append(name, seconds)
        self._bin_number = max(floor(now * BINS_PER_SECOND), self._bin_number + 1)
        bin_start = self._bin_number / BINS_PER_SECOND
        self._append(active.name, active_seconds + bin_start - last)
        active.bin_seconds = active.seconds + bin_start - last
        self._first_phase = active.name
        self.bin_end = (self._bin_number + 1) / BINS_PER_SECOND
        if self._bin_number >= self._group_end:
            self._close_group()

    def _append(self, name: str, seconds: float) -> None:
        intervals, index, microseconds = self._intervals, _INDEXES[name], round(seconds * 1e6)
        if microseconds <= 0:
            return
        if intervals and intervals[-2] == index:
            intervals[-1] += microseconds
        else:
            intervals += (index, microseconds)

    def _close_group(self) -> None:
        """Complete the open group, and drop groups that are not needed for the last `HISTORY_SECONDS`."""
        groups = [*self._groups, tuple(self._intervals)]
        kept_microseconds = sum([sum(group[1::2]) for group in groups])
        while kept_microseconds - (oldest := sum(groups[0][1::2])) >= HISTORY_SECONDS * 1e6:
            del groups[0]
            kept_microseconds -= oldest
        complete_groups = tuple(groups)
        # A single statement without a call, so that the recording thread sees either the old groups or the new groups.
        self._groups, self._intervals, self._group_end = complete_groups, [], self._bin_number + GROUP_BINS

    def read(self, active: str, now: float) -> HistoryReading:
        """Return the history up to the last bin that ended before *now*.

        *active* is the current phase, which fills the bins that are not closed yet.
        """
        groups, latest = self._groups, self._intervals
        intervals = tuple(latest)
        end_bin = max(floor(now * BINS_PER_SECOND), self._bin_number)
        if end_bin > self._bin_number:
            intervals += (_INDEXES[active], (end_bin - self._bin_number) * 1_000_000 // BINS_PER_SECOND)
        return HistoryReading(end_bin / BINS_PER_SECOND, NAMES, (*groups, intervals))
