"""Successions of hot blocks: the phases of an iteration, one after the other, and an iteration that follows an iteration.

Used by the bridges. A job's own code spends its time in torch, so that a hook finds nothing of the exporter in the caches of
the processor: the fewer functions and objects an edge needs, the faster the edge. As in the blocks, an edge has a single
clock reading and updates the clock without a call; all unusual cases leave and enter the blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from time import monotonic

from exporter.training.blocks import HotBlock
from exporter.training.durations import CELLS
from exporter.training.iterations import IterationBlock
from exporter.training.kinds import named_kind
from exporter.training.recorder import MANY_RECORDS, TRAINING
from exporter.training.records import IterationEnded

_CLOCK = TRAINING.clock
_new_record = tuple.__new__  # a third of the time of a named tuple's own constructor


class Phases:
    """Phases of a training, of which at most one is open; *iteration* is the block of every iteration."""

    __slots__ = ("iteration", "present", "name", "_blocks")

    def __init__(self, iteration: IterationBlock) -> None:
        self.iteration = iteration
        self.present: HotBlock | None = None
        self.name: str | None = None
        self._blocks: dict[str, HotBlock] = {}

    def switch(self, name: str | None) -> None:
        """Leave the open phase, if any, and enter the named phase at the same time; None enters no phase."""
        if name == self.name:
            return
        before, after = self.present, None
        if name is not None:
            after = self._blocks.get(name)
            if after is None:
                after = self._blocks[name] = HotBlock(named_kind(name, phase=True))
        self.present, self.name = after, name
        clock, iteration = _CLOCK, self.iteration
        stack = clock.stack
        totals = iteration.totals if after is None else after.totals
        now = monotonic()
        if (
            now >= clock.limit
            or clock.iteration is not iteration
            or stack[-1 if before is None else -2] is not iteration
            or (before is not None and stack[-1] is not before)
            or iteration.task is not None
            or not totals.is_entered
        ):
            if before is not None:
                before.__exit__(None, None, None)
            if after is not None:
                after.__enter__()
            return
        last = clock.last
        clock.last = now
        active = clock.active
        active.seconds += now - last
        clock.active = totals
        clock.since = now
        if before is None:
            stack.append(after)  # type: ignore[arg-type]  # a phase begins
        elif after is None:
            del stack[-1]
        else:
            stack[-1] = after
        if after is not None:
            after.is_open = True
            after.is_nested = False
            after.mark = totals.seconds
            totals.entries += 1
        if before is not None:
            before.is_open = False
            if (cells := active.cells) is not None:
                own = active.seconds - before.mark
                active.duration_seconds += own
                cells[bisect_left(CELLS, own)] += 1

    def next_iteration(self) -> None:
        """Leave the open phase, end the iteration, and begin the next iteration with the same block."""
        before, self.present, self.name = self.present, None, None
        clock, iteration = _CLOCK, self.iteration
        stack = clock.stack
        now = monotonic()
        if (
            now >= clock.limit
            or clock.iteration is not iteration
            or before is None
            or stack[-1] is not before
            or stack[-2] is not iteration
        ):
            if before is not None:
                before.__exit__(None, None, None)
            iteration.__exit__(None, None, None)
            iteration.__enter__()
            return
        last = clock.last
        clock.last = now
        active = clock.active
        active.seconds += now - last
        del stack[-1]
        before.is_open = False
        totals = iteration.totals
        totals.entries += 1
        clock.active = totals
        clock.since = now
        if (cells := active.cells) is not None:
            own = active.seconds - before.mark
            active.duration_seconds += own
            cells[bisect_left(CELLS, own)] += 1
        work = waits = 0.0
        for each in clock.work:
            work += each.seconds
        for each in clock.waits:
            waits += each.seconds
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
