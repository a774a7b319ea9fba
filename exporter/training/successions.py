"""Successions of hot blocks with a single clock reading: a phase that follows a phase, an iteration that follows an iteration.

Used by the bridges, whose phases and iterations follow one another without a gap. As in the blocks, the updates of an edge
contain no call; all unusual cases leave and enter the blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from time import monotonic

from exporter.training.blocks import HotBlock, IterationBlock
from exporter.training.durations import CELLS
from exporter.training.recorder import MANY_RECORDS, TRAINING
from exporter.training.records import IterationEnded

_CLOCK = TRAINING.clock
_new_record = tuple.__new__  # a third of the time of a named tuple's own constructor


def next_phase(before: HotBlock, after: HotBlock) -> None:
    """Leave a phase and enter the next phase at the same time."""
    clock = _CLOCK
    stack = clock.stack
    totals = after.totals
    now = monotonic()
    if (
        now >= clock.limit
        or stack[-1] is not before
        or stack[-2].totals is totals
        or before.is_nested
        or before.task is not None
        or after.is_open
        or not totals.is_entered
    ):
        before.__exit__(None, None, None)
        after.__enter__()
        return
    last = clock.last
    clock.last = now
    active = clock.active
    active.seconds += now - last
    stack[-1] = after
    before.is_open = False
    after.is_open = True
    after.is_nested = False
    after.mark = totals.seconds
    totals.entries += 1
    clock.active = totals
    clock.since = now
    if (cells := active.cells) is not None:
        own = active.seconds - before.mark
        active.duration_seconds += own
        cells[bisect_left(CELLS, own)] += 1


def next_iteration(iteration: IterationBlock, phase: HotBlock) -> None:
    """Leave the last phase of an iteration, end the iteration, and begin the next iteration with the same block."""
    clock = _CLOCK
    stack = clock.stack
    now = monotonic()
    if (
        now >= clock.limit
        or stack[-1] is not phase
        or stack[-2] is not iteration
        or clock.iteration is not iteration
        or phase.is_nested
    ):
        phase.__exit__(None, None, None)
        iteration.__exit__(None, None, None)
        iteration.__enter__()
        return
    totals = iteration.totals
    last = clock.last
    clock.last = now
    active = clock.active
    active.seconds += now - last
    del stack[-1]
    phase.is_open = False
    totals.entries += 1
    clock.active = totals
    clock.since = now
    if (cells := active.cells) is not None:
        own = active.seconds - phase.mark
        active.duration_seconds += own
        cells[bisect_left(CELLS, own)] += 1
    work = waits = 0.0
    for each in clock.work:
        work += each.seconds
    for each in clock.waits:
        waits += each.seconds
    ended = (iteration.began, now, work - iteration.work, waits - iteration.waits, False, TRAINING.expected)
    record = _new_record(IterationEnded, ended)
    iteration.began = now
    iteration.work = clock.iteration_work = work
    iteration.waits = waits
    records = TRAINING.records
    if len(records) < MANY_RECORDS:
        records.append(record)
    else:
        TRAINING.append(record)
