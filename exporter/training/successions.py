"""Phases that follow each other in training iterations, for the bridges.

A job spends its time in torch, so that the caches of the processor contain nothing of the exporter when a hook runs, and a
call of a C function costs up to 0.3 µs. The start of a phase therefore changes the phase of the iteration on the clock's stack
instead of entering a block, and in the usual case calls only `monotonic`.
"""

from __future__ import annotations

from threading import get_ident
from time import monotonic

from exporter.training.blocks import HotBlock
from exporter.training.clock import PhaseTotals
from exporter.training.iterations import IterationBlock
from exporter.training.kinds import named_kind
from exporter.training.recorder import MANY_RECORDS, TRAINING
from exporter.training.records import IterationEnded

_CLOCK = TRAINING.clock
_new_record = tuple.__new__  # a third of the time of a named tuple's own constructor


class Phases:
    """Phases of a training, of which at most one is open.

    Usually the block of the iteration continues in the phase. A phase has a separate block if blocks are observed or timed on a
    GPU, inside a block of the job, outside of an iteration, and on threads other than the main thread.

    Attributes:
        iteration: Block that is entered again for each iteration.
        outside: Totals of the phase that has the time of an iteration outside of the other phases.
    """

    __slots__ = ("iteration", "outside", "data_loading", "forward", "backward", "optimizer", "_block")

    def __init__(self, iteration: IterationBlock) -> None:
        self.iteration = iteration
        self.outside = iteration.totals
        self.data_loading = _CLOCK.phases["data_loading"]
        self.forward = _CLOCK.phases["forward"]
        self.backward = _CLOCK.phases["backward"]
        self.optimizer = _CLOCK.phases["optimizer"]
        self._block: HotBlock | None = None  # separate block of the open phase

    def switch_to(self, name: str | None) -> None:
        """Leave the open phase, if any, and enter the named phase at the same time. For None, no phase is entered."""
        totals = self.outside if name is None else _CLOCK.phases[name]
        block, iteration = self._block, self.iteration
        if totals is (iteration.totals if block is None else block.totals):
            return
        is_main = get_ident() == _CLOCK.thread
        if block is None and is_main and self.advance(totals):
            return
        if block is not None:
            self._block = None
            block.__exit__(None, None, None)
        if not is_main or _CLOCK.iteration is not iteration:
            iteration.totals = self.outside
        elif totals is self.outside or (not _CLOCK.is_watched and _CLOCK.stack[-1] is iteration):
            self._continue_in(totals)
            return
        else:
            self._continue_in(self.outside)
        if name is not None:
            block = self._block = HotBlock(named_kind(name, phase=True))
            block.__enter__()

    def advance(self, totals: PhaseTotals) -> bool:
        """Continue the iteration in a phase. Must be called on the main thread.

        Returns False, without a change, at the end of a bin of the history, while the clock is watched, inside another block,
        outside of the iteration, and at the first entry of a phase.
        """
        clock, iteration = _CLOCK, self.iteration
        ended = iteration.totals
        now = monotonic()
        if (
            now >= clock.limit
            or clock.active is not ended
            or clock.stack[-1] is not iteration  # a block inside, which may have the phase of the iteration
            or clock.iteration is not iteration
            or not totals.is_entered
        ):
            return False
        seconds = ended.seconds + (now - clock.last)
        clock.last = now
        ended.seconds = seconds
        clock.active = iteration.totals = totals
        clock.since = now
        duration = seconds - iteration.mark
        iteration.mark = totals.seconds
        if totals is not self.outside:
            totals.entries += 1
        if ended.cells is not None:
            ended.duration_seconds += duration
            if ended.lower_bound < duration <= ended.upper_bound:  # in the cell of the previous duration
                ended.cells[ended.cell] += 1
            else:
                ended.count(duration)
        return True

    def is_outside(self) -> bool:
        """Return True if no phase is open."""
        return self._block is None and self.iteration.totals is self.outside

    def _continue_in(self, totals: PhaseTotals) -> None:
        """Continue the iteration in a phase, also in the cases in which `advance` returns False."""
        if totals is not self.iteration.totals:
            _CLOCK.continue_in(self.iteration, totals, monotonic())
            if totals is not self.outside:
                totals.entries += 1

    def end(self, error: BaseException | None = None) -> None:
        """Leave the open phase, if any."""
        block = self._block
        if block is None:
            self.switch_to(None)
        else:
            self._block = None
            block.__exit__(None, error, None)

    def next_iteration(self) -> None:
        """Leave the open phase, end the iteration, and begin the next iteration with the same block."""
        clock, iteration = _CLOCK, self.iteration
        if iteration.totals is self.outside or not self.advance(self.outside):
            self.end()
            iteration.__exit__(None, None, None)
            iteration.__enter__()
            return
        now = clock.last
        self.outside.entries += 1
        work = waits = 0.0
        for totals in clock.work:
            work += totals.seconds
        for totals in clock.waits:
            waits += totals.seconds
        record = _new_record(
            IterationEnded,
            (
                iteration.began,
                now,
                work - iteration.work,
                waits - iteration.waits,
                False,
                TRAINING.expected,
            ),
        )
        iteration.began = now
        iteration.work = clock.iteration_work = work
        iteration.waits = waits
        records = TRAINING.records
        if len(records) < MANY_RECORDS:
            records.append(record)
        else:
            TRAINING.append(record)
