"""Phase clock: exclusive seconds, entries and durations of the phases of the main thread.

Blocks update the clock when they are entered and left. The updates of an edge contain no call, so neither a signal handler
nor an exception can interrupt an update: the seconds of all phases always sum to the wall time.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable
from math import inf
from threading import get_ident
from time import monotonic
from typing import Any
from weakref import ref

from exporter.recording.value_class import Value, value_class
from exporter.training.durations import CELLS
from exporter.training.history import HistoryReading, PhaseHistory
from exporter.training.phases import PHASES, Phase

INIT, OTHER = "init", "other"
MAX_OPEN_BLOCKS = 1024
"""Limit of open blocks on the main thread. Above the limit the oldest is ended."""


class PhaseTotals:
    """Exclusive seconds, entries and durations of a phase.

    Attributes:
        bin_seconds: The seconds at the start of the current bin of the history.
        cells: Durations by cell; None for a phase without a histogram.
        cell: The cell of the latest duration, which is above `lower_bound` and up to `upper_bound`.
        is_entered: True after the first entry of the phase in this process.
    """

    __slots__ = (
        "row",
        "name",
        "seconds",
        "bin_seconds",
        "entries",
        "cells",
        "cell",
        "lower_bound",
        "upper_bound",
        "duration_seconds",
        "is_entered",
    )

    def __init__(self, row: Phase) -> None:
        self.row = row
        self.name = row.name
        self.is_entered = False
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self.seconds = self.bin_seconds = self.duration_seconds = 0.0
        self.entries = 0
        self.cells = [0] * (len(CELLS) + 1) if self.row.recurring else None
        self.cell = 0
        self.lower_bound = self.upper_bound = 0.0

    def count(self, seconds: float) -> None:
        """Count a duration in its cell, and remember the cell, because the next duration is probably in the same cell."""
        if self.cells is not None:
            cell = self.cell = bisect_left(CELLS, seconds)
            self.lower_bound = CELLS[cell - 1] if cell else -inf
            self.upper_bound = CELLS[cell] if cell < len(CELLS) else inf
            self.cells[cell] += 1


class StackEntry:
    """Block on the clock's stack.

    Attributes:
        totals: The block's phase, or the phase of the surrounding block.
        has_phase: True for a block with a phase; otherwise the surrounding phase continues.
        is_nested: True inside a block of the same phase, or without a phase.
        mark: Seconds of the phase at the entry.
        task: The asyncio task that entered the block, or None.
        lexical: True for a block entered by a context manager.
    """

    __slots__ = ("totals", "has_phase", "is_nested", "mark", "task", "lexical", "is_open")

    totals: PhaseTotals
    has_phase: bool
    is_nested: bool
    mark: float
    task: ref[Any] | None
    lexical: bool
    is_open: bool

    def __init__(self) -> None:
        self.is_open = False
        self.task = None
        self.lexical = True
        self.mark = 0.0

    def abandon(self, now: float) -> None:
        """End a block that was left open, after the clock has removed the entry."""


@value_class
class ClockReading(Value):
    """Consistent copy of the clock."""

    time: float  # monotonic seconds
    active: str
    active_since: float
    seconds: dict[str, float]
    work: float
    open_work: float  # work of the open iteration
    history: HistoryReading


class PhaseClock:
    """Clock of the main thread: all time counts for the phase of the innermost block.

    Before the first step the phase is `init` where no block is open, afterwards `other`.

    Attributes:
        work: The entered phases that are work; `waits` are the phases in which a rank waits.
        thread: The main thread, which is the first thread that enters a block; None before.
        limit: Time from which an edge takes the slow path: the end of the history bin, or -inf if watched.
        iteration: The open training iteration; `iteration_work` is the work in seconds at the start of the iteration.
        accepts_iteration: True if the next iteration may begin on the fast path.
        last: The time of the latest edge; also the version that the reader compares.
    """

    __slots__ = (
        *("phases", "thread", "stack", "active", "last", "since", "limit", "began", "is_watched"),
        *("base", "is_training", "running_loop", "iteration", "iteration_work", "accepts_iteration"),
        *("work", "waits", "history"),
    )

    def __init__(self, began: float) -> None:
        self.phases = {row.name: PhaseTotals(row) for row in PHASES.values()}
        self.work: tuple[PhaseTotals, ...] = ()
        self.waits: tuple[PhaseTotals, ...] = ()
        self.running_loop: Callable[[], object] | None = None  # None until asyncio is loaded
        self.is_watched = False
        self.restart(began)

    def restart(self, began: float) -> None:
        """Restart without open blocks, as in a forked child."""
        for totals in self.phases.values():
            totals.reset()
            totals.is_entered = False
        self.work = self.waits = ()
        self.thread: int | None = None
        self.base = StackEntry()
        self.base.totals = self.active = self.phases[INIT]
        self.stack: list[StackEntry] = [self.base]
        self.is_training = False
        self.iteration: StackEntry | None = None
        self.accepts_iteration = False
        self.iteration_work = 0.0
        self.active.entries = 1
        self.began = self.last = self.since = began
        self.history = PhaseHistory(began)
        self.watch(on=False)

    def reset(self, now: float) -> None:
        """Count from zero. Open blocks stay open."""
        for totals in self.phases.values():
            totals.reset()
        for entry in self.stack:
            entry.mark = 0.0
        self.began = self.last = self.since = now
        self.iteration_work = 0.0
        self.history = PhaseHistory(now)
        self.watch(on=self.is_watched)

    def watch(self, *, on: bool) -> None:
        """Send every edge through the slow path, as observers and the GPU timer need."""
        self.is_watched = on
        self.limit = -inf if on else self.history.bin_end

    # On the main thread ----------------------------------------------------------------------------------

    def switch_to(self, totals: PhaseTotals, now: float) -> None:
        """Count the time up to now and switch to a phase."""
        if now >= self.history.bin_end:
            self._close_bin(now)
        last = self.last
        self.last = now
        active = self.active
        active.seconds += now - last
        if active is not totals:
            self.active = totals
            self.since = now

    def enter(self, entry: StackEntry, phase: str | None, now: float) -> None:
        """Push a block onto the stack. For the phase None, the surrounding phase continues."""
        if now >= self.history.bin_end:
            self.remove_ended(now)
        entry.task = self.present_task()
        totals = self.active if phase is None else self.phases[phase]
        entry.totals = totals
        entry.has_phase = phase is not None
        entry.is_nested = phase is None or (totals is self.active and len(self.stack) > 1)
        entry.mark = 0.0
        self.switch_to(totals, now)
        if not totals.is_entered:
            self._add(totals)
        if not entry.is_nested:
            totals.entries += 1
            entry.mark = totals.seconds
        entry.is_open = True
        self.stack.append(entry)
        if len(self.stack) > MAX_OPEN_BLOCKS:
            self._abandon([self.stack[1]], now)

    def _add(self, totals: PhaseTotals) -> None:
        """Include a phase in the sums of work and waiting from its first entry."""
        totals.is_entered = True
        if totals.row.work:
            self.work = (*self.work, totals)
        if totals.row.waiting:
            self.waits = (*self.waits, totals)

    def leave(self, entry: StackEntry, now: float, *, ends_all: bool = False) -> None:
        """Remove a block, which need not be the innermost, and end the open blocks inside.

        A context manager ends the inner context managers of the same task; *ends_all* also ends the inner blocks of callbacks
        and of other tasks.
        """
        if now >= self.history.bin_end:
            self.remove_ended(now)
        stack = self.stack
        if entry not in stack:
            entry.is_open = False
            return
        inner = stack[stack.index(entry) + 1 :]
        if not ends_all:
            lexical = entry.lexical
            inner = [other for other in inner if lexical and other.lexical and other.task == entry.task]
        if inner:
            self._abandon(inner[::-1], now)
        self.remove([entry], now)

    def remove(self, entries: list[StackEntry], now: float) -> None:
        """Remove blocks from the stack and count their durations."""
        self.switch_to(self.active, now)
        for entry in entries:
            if entry not in self.stack:
                continue  # removed by a signal handler
            self.stack.remove(entry)
            entry.is_open = False
            self._count_duration(entry)
        outer = self.base.totals
        for entry in self.stack[1:]:
            if not entry.has_phase:
                entry.totals = outer
            outer = entry.totals
        self.switch_to(outer, now)

    def _count_duration(self, entry: StackEntry) -> None:
        totals = entry.totals
        if totals.cells is not None and not entry.is_nested:
            seconds = totals.seconds - entry.mark
            totals.duration_seconds += seconds
            totals.count(seconds)

    def continue_in(self, entry: StackEntry, totals: PhaseTotals, now: float) -> None:
        """Continue an open block in a different phase."""
        if now >= self.history.bin_end:
            self.remove_ended(now)
        self.switch_to(self.active, now)
        if entry not in self.stack:
            return  # ended with its task
        if not totals.is_entered:
            self._add(totals)
        self._count_duration(entry)
        entry.totals = totals
        entry.mark = totals.seconds
        self.remove([], now)

    def _abandon(self, entries: list[StackEntry], now: float) -> None:
        self.remove(entries, now)
        for entry in entries:
            entry.abandon(now)

    def begin_training(self, now: float) -> None:
        """Switch the time outside blocks from `init` to `other`, at the end of the initialization."""
        if not self.is_training:
            self.is_training = True
            self.base.totals = self.phases[OTHER]
            self.remove([], now)

    def present_task(self) -> ref[Any] | None:
        """Return a reference to the running asyncio task; None outside of a task."""
        if self.running_loop is None:
            self.running_loop = getattr(sys.modules.get("asyncio"), "_get_running_loop", None)
        if self.running_loop is None or self.running_loop() is None:
            return None
        task = sys.modules["asyncio"].current_task()
        self.remove_ended(monotonic())
        return None if task is None else ref(task)

    def remove_ended(self, now: float) -> None:
        """Remove blocks ended by other threads, and blocks of finished tasks."""
        if all(entry.task is None and entry.is_open for entry in self.stack[1:]):
            return
        closed_entries = [entry for entry in self.stack[1:] if not entry.is_open]  # by other threads
        if closed_entries:
            self.remove(closed_entries, now)
        orphaned_entries = [
            entry for entry in self.stack[1:] if entry.task is not None and is_over(entry.task())
        ]
        if orphaned_entries:
            self._abandon(orphaned_entries[::-1], now)

    def _close_bin(self, now: float) -> None:
        """Close the history bin and start the bin of *now*."""
        self.history.close_bin(self.phases.values(), self.active, self.last, now)
        if not self.is_watched:
            self.limit = self.history.bin_end

    # Work ------------------------------------------------------------------------------------------------

    def work_seconds(self) -> float:
        """Return the seconds of all phases that are work, up to the latest edge."""
        seconds = 0.0
        for totals in self.work:
            seconds += totals.seconds
        return seconds

    def wait_seconds(self) -> float:
        """Return the seconds of all phases in which a rank waits, up to the latest edge."""
        seconds = 0.0
        for totals in self.waits:
            seconds += totals.seconds
        return seconds

    def has_entries(self) -> bool:
        """Return True if a block of a phase was entered."""
        return any(totals.entries for name, totals in self.phases.items() if name != INIT)

    def possible_work(self, now: float) -> float:
        """Return the seconds that may have been work in a job that reports no iterations."""
        if self.thread in {None, get_ident()}:
            self.switch_to(self.active, now)
        return self.work_seconds() + self.phases[OTHER].seconds

    # On the recording thread -----------------------------------------------------------------------------

    def read(self, end_time: float | None = None) -> ClockReading:
        """Return a copy whose seconds sum to the wall time; a torn copy misses at most an edge.

        *end_time* replaces the current time in simulations.
        """
        for attempt in range(100):
            version = self.last
            seconds = {name: totals.seconds for name, totals in self.phases.items()}
            active, active_since, start_work = self.active, self.since, self.iteration_work
            has_iteration = self.iteration is not None
            work, history = self.work_seconds(), self.history
            now = monotonic() if end_time is None else end_time
            history_reading = history.read(active.name, now)
            if self.last == version or attempt == 99:
                break
        elapsed = max(now - version, 0.0)
        seconds[active.name] += elapsed
        work += elapsed if active.row.work else 0.0
        open_work = max(work - start_work, 0.0) if has_iteration else 0.0
        positive_seconds = {name: value for name, value in seconds.items() if value > 0}
        return ClockReading(
            now, active.name, active_since, positive_seconds, work, open_work, history_reading
        )


def is_over(task: Any) -> bool:
    """Return True for a finished or deleted task."""
    return task is None or bool(task.done())
