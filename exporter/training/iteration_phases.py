"""Phases of training iterations that a bridge reports: phases that follow each other without nesting.

A job spends its time in torch. When a hook runs, the exporter's code and data are therefore no longer in the caches of the
processor, and each line costs several times as much as in a loop. For this reason, the start of a phase changes the phase of the
iteration on the clock's stack instead of entering a block. In a usual step, the start of a phase only stores the time (see
`step_edges.py`). The phases are counted together at the end of the step.
"""

from __future__ import annotations

from bisect import bisect_left
from threading import get_ident
from time import monotonic

from exporter.training.blocks import HotBlock
from exporter.training.durations import CELLS
from exporter.training.iterations import IterationBlock
from exporter.training.kinds import named_kind
from exporter.training.recorder import MANY_RECORDS, TRAINING
from exporter.training.records import IterationEnded
from exporter.training.totals import PhaseTotals

_CLOCK, _STEP, _RECORDS = TRAINING.clock, TRAINING.clock.step_edges, TRAINING.records


class IterationPhases:
    """Phases of the iterations of a training, of which at most one is open.

    Usually a phase has no block: the block of the iteration changes its phase. A phase has a separate block in four cases:

    - blocks are observed or timed on a GPU;
    - a block of the job is open inside the iteration;
    - no iteration is open;
    - the thread is not the main thread.

    Attributes:
        iteration: Block that is entered again for each iteration.
        outside: Totals of the phase `iteration`, which has the time of an iteration outside of the other phases.
        defers: True if the caller stores the edges of usual steps in the clock's `step_edges`.
    """

    __slots__ = (
        *("iteration", "outside", "defers"),
        *("_data_loading", "_forward", "_backward", "_optimizer", "_block"),
    )

    def __init__(self, iteration: IterationBlock) -> None:
        self.iteration = iteration
        self.outside = iteration.totals
        self.defers = False
        self._data_loading = _CLOCK.phases["data_loading"]
        self._forward = _CLOCK.phases["forward"]
        self._backward = _CLOCK.phases["backward"]
        self._optimizer = _CLOCK.phases["optimizer"]
        self._block: HotBlock | None = None  # separate block of the open phase

    def switch_to(self, name: str | None) -> None:
        """Leave the open phase, if any, and enter the named phase at the same time. Has no effect if the named phase is open.

        For None, no phase is entered, and the time counts as the time of the iteration outside of its phases.
        """
        totals = self.outside if name is None else _CLOCK.phases[name]
        is_main = get_ident() == _CLOCK.thread
        if is_main:
            _CLOCK.count_pending_edges()
        block, iteration = self._block, self.iteration
        if totals is (iteration.totals if block is None else block.totals):
            return
        if block is None and is_main and self._advance(totals):
            return
        if block is not None:
            self._block = None
            block.__exit__(None, None, None)
        if not is_main or not iteration.is_open:
            iteration.totals = self.outside
        elif totals is self.outside or (not _CLOCK.is_watched and _CLOCK.stack[-1] is iteration):
            self._continue_in(totals)
            return
        else:
            self._continue_in(self.outside)
        if name is not None:
            block = self._block = HotBlock(named_kind(name, is_phase=True))
            block.__enter__()

    def _advance(self, totals: PhaseTotals) -> bool:
        """Continue the iteration in a phase, and return True.

        Changes nothing and returns False in four cases: a bin of the history has ended, the clock is watched, another block is open inside
        the iteration, or the phase was never entered before.
        """
        now = monotonic()
        if now >= _CLOCK.limit or _CLOCK.stack[-1] is not self.iteration or not totals.is_entered:
            return False
        _CLOCK.advance(self.iteration, totals, now)
        return True

    def _continue_in(self, totals: PhaseTotals) -> None:
        """Continue the iteration in a phase, also in the cases in which `_advance` returns False. Count an entry of the phase."""
        if totals is not self.iteration.totals:
            _CLOCK.continue_in(self.iteration, totals, monotonic())
            if totals is not self.outside:
                totals.entries += 1

    def end(self, error: BaseException | None = None) -> None:
        """Leave the open phase, if any. *error* is the exception that ended the phase."""
        block = self._block
        if block is None:
            self.switch_to(None)
        else:
            self._block = None
            block.__exit__(None, error, None)

    def next_iteration(self) -> None:
        """Leave the open phase, end the iteration, and begin the next iteration with the same block."""
        if self.end_usual_step():
            return
        clock, iteration = _CLOCK, self.iteration
        if get_ident() == clock.thread:
            clock.count_pending_edges()
        if iteration.totals is not self.outside and self._advance(self.outside):
            self.outside.entries += 1
            iteration.begin_next(clock.last_edge)
        else:
            self.end()
            iteration.__exit__(None, None, None)
            iteration.__enter__()
        if self.defers:
            self._defer()

    # Usual steps ------------------------------------------------------------------------------------------------

    def _defer(self) -> None:
        """Defer the edges of the next step. Has no effect on a thread other than the main thread or inside a phase.

        The phases of a usual step must have been entered before: the first entry of a phase includes the phase in the history.
        """
        if (
            get_ident() != _CLOCK.thread
            or self._block is not None
            or self.iteration.totals is not self.outside
        ):
            return
        phases = (self._data_loading, self._forward, self._backward, self._optimizer)
        if all(totals.is_entered for totals in phases):
            _CLOCK.defer(self.iteration)

    def count_batch(self) -> None:
        """Count the fetch, the forward pass and the backward pass of a batch whose gradients are accumulated, if they are pending."""
        clock, step = _CLOCK, _STEP
        if step.backward_ended <= clock.last_edge:
            return
        fetch_seconds = step.forward_began - step.fetch_began
        forward_seconds = step.backward_began - step.forward_began
        backward_seconds = step.backward_ended - step.backward_began
        # No call until the clock is consistent.
        self.outside.seconds += step.fetch_began - clock.last_edge
        self._data_loading.seconds += fetch_seconds
        self._forward.seconds += forward_seconds
        self._backward.seconds += backward_seconds
        clock.last_edge = clock.active_since = step.backward_ended
        self._data_loading.count_entry(fetch_seconds)
        self._forward.count_entry(forward_seconds)
        self._backward.count_entry(backward_seconds)

    def end_usual_step(self) -> bool:
        """Count the pending phases of a usual step, and begin the next iteration. Return False in other steps.

        In a usual step, all edges are deferred, and the phases follow each other in the order of `StepEdges`: fetch, forward pass,
        backward pass, optimizer. The step ends before `StepEdges.limit`.
        """
        clock, step, iteration = _CLOCK, _STEP, self.iteration
        outside, data_loading, forward = self.outside, self._data_loading, self._forward
        backward, optimizer = self._backward, self._optimizer
        now = monotonic()
        last = clock.last_edge
        if not (
            clock.deferring is iteration
            and last < step.fetch_began < step.optimizer_began
            and now < step.limit
        ):
            return False
        if now >= clock.history.bin_end:
            return self._end_step_in_new_bin(now)
        fetch_seconds = step.forward_began - step.fetch_began
        forward_seconds = step.backward_began - step.forward_began
        backward_seconds = step.backward_ended - step.backward_began
        optimizer_seconds = now - step.optimizer_began
        # No call until the clock is consistent.
        outside.seconds += (step.fetch_began - last) + (step.optimizer_began - step.backward_ended)
        data_loading.seconds += fetch_seconds
        forward.seconds += forward_seconds
        backward.seconds += backward_seconds
        optimizer.seconds += optimizer_seconds
        clock.last_edge = clock.active_since = now
        # Entries and durations, without calls of `count_entry`, which would cost 1 µs.
        outside.entries += 1
        data_loading.entries += 1
        data_loading.duration_seconds += fetch_seconds
        data_loading.cells[bisect_left(CELLS, fetch_seconds)] += 1
        forward.entries += 1
        forward.duration_seconds += forward_seconds
        forward.cells[bisect_left(CELLS, forward_seconds)] += 1
        backward.entries += 1
        backward.duration_seconds += backward_seconds
        backward.cells[bisect_left(CELLS, backward_seconds)] += 1
        optimizer.entries += 1
        optimizer.duration_seconds += optimizer_seconds
        optimizer.cells[bisect_left(CELLS, optimizer_seconds)] += 1
        if last != iteration.began:  # an earlier batch of the step was counted before
            iteration.begin_next(now)
            return True
        # As `begin_next`, without a call and without reading the totals, which would cost 1 µs.
        work_seconds = now - last - fetch_seconds
        iteration.began = now
        iteration.start_wait_seconds += fetch_seconds
        iteration.start_work_seconds += work_seconds
        clock.iteration_start_work_seconds = iteration.start_work_seconds
        record: IterationEnded = (last, now, work_seconds, fetch_seconds, False, TRAINING.expected)
        if len(_RECORDS) < MANY_RECORDS:
            _RECORDS.append(record)
        else:
            TRAINING.append(record)
        return True

    def _end_step_in_new_bin(self, now: float) -> bool:
        """Count the pending phases of a usual step during which a bin of the history ended, and begin the next iteration.

        Return False, after the phases are counted, if the iteration was closed by another thread or ended with its task.
        """
        clock, iteration = _CLOCK, self.iteration
        clock.count_pending_edges()
        clock.remove_ended(now)
        if clock.stack[-1] is not iteration:
            return False
        clock.advance(iteration, self.outside, now)
        self.outside.entries += 1
        iteration.begin_next(now)
        clock.defer(iteration)
        return True
