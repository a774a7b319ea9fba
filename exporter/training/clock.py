"""Phase clock: exclusive seconds, entries and durations of the phases of the main thread.

The entry and the exit of a block are *edges*: times at which the phase may change. At an edge, the clock adds the time since the
previous edge to the current phase. This addition contains no call, so neither a signal handler nor an exception can interrupt it:
the seconds of all phases sum to the wall time up to the latest edge.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import inf
from threading import get_ident
from time import monotonic
from typing import Any
from weakref import ref

from exporter.recording.value_class import Value, value_class
from exporter.training.history import BIN_SECONDS, HistoryReading, PhaseHistory
from exporter.training.phases import PHASES
from exporter.training.step_edges import StepEdges
from exporter.training.totals import PhaseTotals

INIT, ITERATION, OTHER = "init", "iteration", "other"
MAX_STACK_ENTRIES = 1024
"""Maximum size of the main thread's stack, including the base entry. Beyond the limit, the oldest block is ended."""


class StackEntry:
    """Block on the clock's stack.

    Attributes:
        totals: The block's phase, or the phase of the surrounding block.
        has_phase: True for a block with a phase; otherwise the surrounding phase continues.
        is_nested: True directly inside a block of the same phase, or without a phase.
        entry_seconds: Seconds of the phase when the block was entered, or when it continued in the phase; 0 if nested.
        task: The asyncio task that entered the block, or None.
        is_lexical: True for a block entered by a context manager, False for the block of a callback.
        is_open: False before the entry, and after the block was left. If another thread leaves the block, the entry stays on the
            stack until the main thread removes it.
    """

    __slots__ = ("totals", "has_phase", "is_nested", "entry_seconds", "task", "is_lexical", "is_open")

    totals: PhaseTotals
    has_phase: bool
    is_nested: bool
    entry_seconds: float
    task: ref[Any] | None
    is_lexical: bool
    is_open: bool

    def __init__(self) -> None:
        self.is_open = False
        self.task = None
        self.is_lexical = True
        self.entry_seconds = 0.0

    def abandon(self, now: float) -> None:
        """End a block that was left open, after the clock has removed the entry."""


@value_class
class ClockReading(Value):
    """Consistent copy of the clock."""

    time: float  # monotonic seconds
    active: str  # current phase
    active_since: float  # monotonic seconds
    seconds: dict[str, float]  # by phase, without the phases of 0 s
    work_seconds: float  # of all phases that are work
    open_work_seconds: float  # part of the work in the open iteration
    history: HistoryReading


class PhaseClock:
    """Clock of the main thread: all time counts for the phase of the innermost block.

    Where no block is open, the phase is `init` until the first training loop, iteration or reported step, and `other` afterwards.
    All times are in monotonic seconds.

    Attributes:
        phases: Totals of all phases by name.
        entered_phases: `init`, `other` and the phases that were entered. The other phases have no time.
        work_phases: The entered phases that are work.
        wait_phases: The entered phases in which a rank waits.
        thread: The main thread, which is the first thread that enters a block; None before.
        began: Time from which the phases are counted.
        is_initialized: True after the first training loop, iteration or reported step has started.
        stack: The open blocks, innermost last, above the entry `base`, which stands for the time outside blocks.
        active: Totals of the current phase, which started at `active_since`.
        last_edge: Time of the latest edge; also the version that `read` compares.
        limit: Time from which an edge takes the slow path: the end of the history bin; -inf while the clock is watched or defers.
        is_watched: True if observers or the GPU timer need the slow path for all edges.
        iteration: The open training iteration, or None.
        iteration_start_work_seconds: Seconds of work at the start of the open iteration.
        iteration_phase: Totals of the phase `iteration`.
        accepts_iteration: True if the next iteration may begin on the fast path.
        deferring: The innermost block, if the clock defers the block's edges; otherwise None.
        step_edges: The edges that are deferred.
        history: Phases of the last `HISTORY_SECONDS`.
        running_loop: `asyncio._get_running_loop`; None until asyncio is loaded.
    """

    __slots__ = (
        *("phases", "thread", "stack", "active", "last_edge", "active_since", "limit", "began", "is_watched"),
        *("base", "is_initialized", "running_loop", "iteration", "accepts_iteration", "deferring"),
        *("work_phases", "wait_phases", "history", "step_edges", "iteration_phase", "entered_phases"),
        "iteration_start_work_seconds",
    )

    def __init__(self, began: float) -> None:
        self.phases = {row.name: PhaseTotals(row) for row in PHASES.values()}
        self.work_phases: tuple[PhaseTotals, ...] = ()
        self.wait_phases: tuple[PhaseTotals, ...] = ()
        self.entered_phases: tuple[PhaseTotals, ...] = ()
        self.running_loop: Callable[[], object] | None = None
        self.iteration_phase = self.phases[ITERATION]
        self.step_edges = StepEdges()
        self.deferring: StackEntry | None = None
        self.restart(began)

    def restart(self, began: float) -> None:
        """Restart without open blocks, as in a forked child."""
        for totals in self.phases.values():
            totals.reset()
            totals.is_entered = False
        self.work_phases = self.wait_phases = ()
        self.entered_phases = (self.phases[INIT], self.phases[OTHER])
        self.deferring = None
        self.step_edges.clear()
        self.thread: int | None = None
        self.base = StackEntry()
        self.base.totals = self.active = self.phases[INIT]
        self.stack: list[StackEntry] = [self.base]
        self.is_initialized = False
        self.iteration: StackEntry | None = None
        self.accepts_iteration = False
        self.iteration_start_work_seconds = 0.0
        self.active.entries = 1
        self.began = self.last_edge = self.active_since = began
        self.history = PhaseHistory(began)
        self.is_watched = False
        self.limit = self.history.bin_end

    def reset(self, began: float) -> None:
        """Count from zero, from *began* or the latest edge after it. Open blocks stay open."""
        self.count_pending_edges()
        began = max(began, self.last_edge)
        for totals in self.phases.values():
            totals.reset()
        for entry in self.stack:
            entry.entry_seconds = 0.0
        self.began = self.last_edge = self.active_since = began
        self.iteration_start_work_seconds = 0.0
        self.history = PhaseHistory(began)
        self._restore_limit()

    def watch(self, *, on: bool) -> None:
        """Turn the slow path for all edges on, as observers and the GPU timer need, or off.

        Turning it off takes effect at the end of the current history bin. May be called on any thread.
        """
        self.is_watched = on
        if on:
            self.limit = self.step_edges.limit = -inf

    def _restore_limit(self) -> None:
        self.limit = -inf if self.is_watched or self.deferring is not None else self.history.bin_end

    # On the main thread ----------------------------------------------------------------------------------

    def switch_to(self, totals: PhaseTotals, now: float) -> None:
        """Count the time up to now and switch to a phase."""
        if now >= self.history.bin_end:
            self._close_bin(now)
        last = self.last_edge
        if now < last:  # noqa: PLR1730  # a signal handler has counted later edges, and could run again during a call of `max`
            now = last
        self.last_edge = now
        active = self.active
        active.seconds += now - last
        if active is not totals:
            self.active = totals
            self.active_since = now

    def enter(self, entry: StackEntry, phase: str | None, now: float) -> None:
        """Push a block onto the stack. For the phase None, the surrounding phase continues. If the stack is full, end the oldest block."""
        self.count_pending_edges()
        if now >= self.history.bin_end:
            self.remove_ended(now)
        entry.task = self.current_task()
        totals = self.active if phase is None else self.phases[phase]
        entry.totals = totals
        entry.has_phase = phase is not None
        entry.is_nested = phase is None or (totals is self.active and len(self.stack) > 1)
        entry.entry_seconds = 0.0
        self.switch_to(totals, now)
        if not totals.is_entered:
            self._include_phase(totals)
        if not entry.is_nested:
            totals.entries += 1
            entry.entry_seconds = totals.seconds
        entry.is_open = True
        self.stack.append(entry)
        if len(self.stack) > MAX_STACK_ENTRIES:
            self._abandon([self.stack[1]], now)

    def _include_phase(self, totals: PhaseTotals) -> None:
        """Include a phase in the history and in the sums of work and waiting from its first entry."""
        totals.is_entered = True
        if totals not in self.entered_phases:
            self.entered_phases = (*self.entered_phases, totals)
        if totals.row.work:
            self.work_phases = (*self.work_phases, totals)
        if totals.row.waiting:
            self.wait_phases = (*self.wait_phases, totals)

    def leave(self, entry: StackEntry, now: float, *, ends_all: bool = False) -> None:
        """Remove a block, which need not be the innermost.

        A context manager ends the open context managers of the same task inside it, and the block of a callback ends no inner block.
        With *ends_all*, all inner blocks are ended. A block that was removed before is only marked as closed.
        """
        if now >= self.history.bin_end:
            self.remove_ended(now)
        stack = self.stack
        if entry not in stack:
            entry.is_open = False
            return
        inner = stack[stack.index(entry) + 1 :]
        if not ends_all:
            is_lexical = entry.is_lexical
            inner = [other for other in inner if is_lexical and other.is_lexical and other.task == entry.task]
        if inner:
            self._abandon(inner[::-1], now)
        self.remove([entry], now)

    def remove(self, entries: list[StackEntry], now: float) -> None:
        """Remove blocks from the stack, count their durations, and switch to the phase of the innermost remaining block."""
        self.count_pending_edges()
        self.switch_to(self.active, now)
        for entry in entries:
            if entry not in self.stack:
                continue  # removed by a signal handler
            self.stack.remove(entry)
            entry.is_open = False
            self._count_duration(entry)
        outer = self.base.totals  # blocks without a phase continue in the phase of the next outer block
        for entry in self.stack[1:]:
            if not entry.has_phase:
                entry.totals = outer
            outer = entry.totals
        self.switch_to(outer, now)

    def _count_duration(self, entry: StackEntry) -> None:
        """Count the exclusive seconds of a block in its phase, unless the block is part of an outer block of the same phase."""
        if not entry.is_nested:
            entry.totals.count_duration(entry.totals.seconds - entry.entry_seconds)

    def continue_in(self, entry: StackEntry, totals: PhaseTotals, now: float) -> None:
        """Continue an open block in a different phase, and count its duration in the previous phase. The caller counts the entry."""
        self.count_pending_edges()
        if now >= self.history.bin_end:
            self.remove_ended(now)
        self.switch_to(self.active, now)
        if entry not in self.stack:
            return  # `remove_ended` has ended the block with its task
        if not totals.is_entered:
            self._include_phase(totals)
        self._count_duration(entry)
        entry.totals = totals
        entry.entry_seconds = totals.seconds
        self.remove([], now)

    def _abandon(self, entries: list[StackEntry], now: float) -> None:
        """Remove blocks that were left open, and end them as incomplete."""
        self.remove(entries, now)
        for entry in entries:
            entry.abandon(now)

    def begin_training(self, now: float) -> None:
        """Switch the time outside blocks from `init` to `other`, at the end of the initialization."""
        if not self.is_initialized:
            self.is_initialized = True
            self.base.totals = self.phases[OTHER]
            self.remove([], now)

    def current_task(self) -> ref[Any] | None:
        """Return a reference to the running asyncio task, or None outside of a task.

        While an event loop is running, the call also removes ended blocks.
        """
        if self.running_loop is None:
            self.running_loop = getattr(sys.modules.get("asyncio"), "_get_running_loop", None)
        if self.running_loop is None or self.running_loop() is None:
            return None
        task = sys.modules["asyncio"].current_task()
        self.remove_ended(monotonic())
        return None if task is None else ref(task)

    def remove_ended(self, now: float) -> None:
        """Remove the blocks that other threads have closed, and end the open blocks of finished tasks."""
        if all(entry.task is None and entry.is_open for entry in self.stack[1:]):
            return
        closed_entries = [entry for entry in self.stack[1:] if not entry.is_open]  # by other threads
        if closed_entries:
            self.remove(closed_entries, now)
        orphaned_entries = [
            entry for entry in self.stack[1:] if entry.task is not None and is_done(entry.task())
        ]
        if orphaned_entries:
            self._abandon(orphaned_entries[::-1], now)

    def _close_bin(self, now: float) -> None:
        """Close the bins of the history up to the bin of *now*."""
        self.history.close_bin(self.entered_phases, self.active, self.last_edge, now)
        self._restore_limit()

    # Edges of a block that continues in a different phase --------------------------------------------------

    def advance(self, entry: StackEntry, totals: PhaseTotals, now: float) -> None:
        """Continue the innermost block in a phase that was entered before.

        Count the duration in the previous phase, and an entry of the new phase. Entries of the phase `iteration` are counted by the
        caller, because an iteration may return to this phase several times.
        """
        if now >= self.history.bin_end:
            self._close_bin(now)
        last = self.last_edge
        if now < last:  # noqa: PLR1730  # as in `switch_to`
            now = last
        ended = self.active
        seconds = ended.seconds + (now - last)
        self.last_edge = self.active_since = now
        ended.seconds = seconds
        self.active = entry.totals = totals
        duration = seconds - entry.entry_seconds
        entry.entry_seconds = totals.seconds
        if totals is not self.iteration_phase:
            totals.entries += 1
        ended.count_duration(duration)

    def defer(self, entry: StackEntry) -> None:
        """Defer the edges of the innermost block until `count_pending_edges`. All other edges take the slow path.

        Has no effect if *entry* is not the innermost block, or while the clock is watched.

        `count_pending_edges` closes a bin of the history that ends meanwhile. Edges are deferred until the end of the next bin at most.
        """
        if self.stack[-1] is entry and self.deferring is None and not self.is_watched:
            self.step_edges.limit = self.history.bin_end + BIN_SECONDS
            self.deferring = entry
            self.limit = -inf

    def count_pending_edges(self) -> None:
        """Count the pending edges, and stop deferring. All other changes of the clock call this first."""
        entry = self.deferring
        if entry is not None:
            self.step_edges.limit = -inf
            for totals, time in self.step_edges.after(self.last_edge, self.phases):
                if time > self.last_edge:  # not counted by a signal handler
                    self.advance(entry, totals, time)
            self.deferring = None
            self._restore_limit()

    # Work ------------------------------------------------------------------------------------------------

    def work_seconds(self) -> float:
        """Return the seconds of all phases that are work, up to the latest edge."""
        return sum(totals.seconds for totals in self.work_phases)

    def wait_seconds(self) -> float:
        """Return the seconds of all phases in which a rank waits, up to the latest edge."""
        return sum(totals.seconds for totals in self.wait_phases)

    def has_entries(self) -> bool:
        """Return True if a block of a phase other than `init` was entered."""
        return any(totals.entries for name, totals in self.phases.items() if name != INIT)

    def possible_work_seconds(self, now: float) -> float:
        """Return the seconds that may have been work in a job that reports no iterations: the phases that are work, and `other`.

        The result is up to date on the main thread. On other threads, the time since the latest edge is missing.
        """
        if self.thread in {None, get_ident()}:
            self.count_pending_edges()
            self.switch_to(self.active, now)
        return self.work_seconds() + self.phases[OTHER].seconds

    # On the recording thread -----------------------------------------------------------------------------

    def read(self, end_time: float | None = None) -> ClockReading:
        """Return a copy whose seconds sum to the wall time. *end_time* replaces the current time in simulations.

        The main thread takes no lock. If an edge occurs during the copy, `last_edge` changes, and the copy is repeated. The hundredth copy is
        returned in any case; its phases may miss or repeat the time of an edge.
        """
        for attempt in range(100):
            version = last = self.last_edge
            seconds = {name: totals.seconds for name, totals in self.phases.items()}
            active, active_since, start_work = (
                self.active,
                self.active_since,
                self.iteration_start_work_seconds,
            )
            has_iteration, work_phases, history = self.iteration is not None, self.work_phases, self.history
            for totals, time in self.step_edges.after(last, self.phases):
                seconds[active.name] += time - last
                active, active_since, last = totals, time, time
            now = monotonic() if end_time is None else end_time
            history_reading = history.read(active.name, now)
            if self.last_edge == version or attempt == 99:
                break
        seconds[active.name] += max(now - last, 0.0)
        work = sum(seconds[totals.name] for totals in work_phases)
        open_work = max(work - start_work, 0.0) if has_iteration else 0.0
        positive_seconds = {name: value for name, value in seconds.items() if value > 0}
        return ClockReading(
            now, active.name, active_since, positive_seconds, work, open_work, history_reading
        )


def is_done(task: Any) -> bool:
    """Return True for a task that is finished or deleted."""
    return task is None or bool(task.done())
