"""Successions of hot blocks: the phases of an iteration, one after the other, and an iteration that follows an iteration.

Used by the bridges. A job's own code spends its time in torch, so that a hook finds nothing of the exporter in the caches of
the processor: the fewer functions and objects an edge needs, the faster the edge. As in the blocks, an edge has a single
clock reading and updates the clock without a call; all unusual cases leave and enter the blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from threading import get_ident
from time import monotonic

from exporter.training.blocks import HotBlock
from exporter.training.durations import CELLS
from exporter.training.iterations import IterationBlock
from exporter.training.kinds import DATA_LOADING, MODEL_BACKWARD, MODEL_FORWARD, OPTIMIZER_UPDATE, named_kind
from exporter.training.recorder import MANY_RECORDS, TRAINING
from exporter.training.records import IterationEnded

_CLOCK = TRAINING.clock
_new_record = tuple.__new__  # a third of the time of a named tuple's own constructor


class Phases:
    """Phases of a training, of which at most one is open.

    Attributes:
        iteration: The block of every iteration.
        present: The open phase, or the iteration if no phase is open.
    """

    __slots__ = ("iteration", "present", "data_loading", "forward", "backward", "optimizer", "_others")

    def __init__(self, iteration: IterationBlock) -> None:
        self.iteration = iteration
        self.present: HotBlock = iteration
        self.data_loading = HotBlock(DATA_LOADING)
        self.forward = HotBlock(MODEL_FORWARD)
        self.backward = HotBlock(MODEL_BACKWARD)
        self.optimizer = HotBlock(OPTIMIZER_UPDATE)
        standard = (self.data_loading, self.forward, self.backward, self.optimizer)
        self._others = {str(block.kind.phase): block for block in standard}

    def switch(self, name: str | None) -> None:
        """Leave the open phase, if any, and enter the named phase at the same time; None enters no phase."""
        block: HotBlock | None = self.iteration
        if name is not None:
            block = self._others.get(name)
            if block is None:
                block = self._others[name] = HotBlock(named_kind(name, phase=True))
        before = self.present
        if block is before or self.advance(block):
            return
        self.present = block
        if before is not self.iteration:
            before.__exit__(None, None, None)
        if block is not self.iteration:
            block.__enter__()

    def advance(self, block: HotBlock) -> bool:
        """Switch to a different phase, or to the iteration; return False, without a change, in an unusual case."""
        clock, iteration, before = _CLOCK, self.iteration, self.present
        stack = clock.stack
        now = monotonic()
        if (
            now >= clock.limit
            or block is before
            or stack[-1] is not before
            or (before is not iteration and stack[-2] is not iteration)
            or clock.iteration is not iteration
            or get_ident() != clock.thread
            or iteration.task is not None
            or not block.totals.is_entered
        ):
            return False
        self.present = block
        ended, begun = before.totals, block.totals
        last = clock.last
        clock.last = now
        ended.seconds += now - last
        clock.active = begun
        clock.since = now
        if block is iteration:
            del stack[-1]
        else:
            if before is iteration:
                stack.append(block)
            else:
                stack[-1] = block
            block.is_open = True
            block.is_nested = False
            block.task = None
            block.mark = begun.seconds
            begun.entries += 1
        if before is not iteration:
            before.is_open = False
            if (cells := ended.cells) is not None:
                own = ended.seconds - before.mark
                ended.duration_seconds += own
                cells[bisect_left(CELLS, own)] += 1
        return True

    def next_iteration(self) -> None:
        """Leave the open phase, end the iteration, and begin the next iteration with the same block."""
        clock, iteration, before = _CLOCK, self.iteration, self.present
        if before is iteration or not self.advance(iteration):
            if before is not iteration:
                self.present = iteration
                before.__exit__(None, None, None)
            iteration.__exit__(None, None, None)
            iteration.__enter__()
            return
        now = clock.last
        iteration.totals.entries += 1
        work = waits = 0.0
        for totals in clock.work:
            work += totals.seconds
        for totals in clock.waits:
            waits += totals.seconds
        ended = (
            iteration.began,
            now,
            work - iteration.work,
            waits - iteration.waits,
            False,
            TRAINING.expected,
        )
        record = _new_record(IterationEnded, ended)
        iteration.began = now
        iteration.work = clock.iteration_work = work
        iteration.waits = waits
        records = TRAINING.records
        if len(records) < MANY_RECORDS:
            records.append(record)
        else:
            TRAINING.append(record)
