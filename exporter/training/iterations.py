"""Training iterations: blocks for a step of the optimizer with all its microbatches.

Each complete iteration appends one record.
"""

from __future__ import annotations

from threading import get_ident
from time import monotonic

from exporter.training import kinds
from exporter.training.blocks import EvaluationBlock, HotBlock
from exporter.training.kinds import BlockKind
from exporter.training.recorder import MANY_RECORDS, TRAINING
from exporter.training.records import IterationEnded
from exporter.training.spans import NonRecordingSpan, Span

_CLOCK, _RECORDS = TRAINING.clock, TRAINING.records
MAX_ITERATIONS_OF_OTHER_THREADS = 64
"""Limit of the open iterations on threads other than the main thread. Above the limit, the oldest iteration is no longer tracked."""


class IterationBlock(HotBlock):
    """Block for a training iteration that the job reports.

    Attributes:
        start_work_seconds: Seconds of all phases that are work, at the start of the iteration; 0 outside the main thread.
        start_wait_seconds: Seconds of all phases in which a rank waits, at the start of the iteration; 0 outside the main thread.
    """

    __slots__ = ("start_work_seconds", "start_wait_seconds")

    # The fast paths repeat lines of `HotBlock`, because calls of the methods of `HotBlock` would take 8 % of the time of an iteration.

    def __enter__(self) -> Span | NonRecordingSpan:
        clock = _CLOCK
        if get_ident() != clock.thread or (
            (running_loop := clock.running_loop) is not None and running_loop() is not None
        ):
            return self._enter_slowly(monotonic())
        now = monotonic()
        last = clock.last_edge
        if not clock.accepts_iteration or not last <= now < clock.limit or self.is_open:
            return self._enter_slowly(now)
        active, totals = clock.active, self.totals
        clock.last_edge = now
        active.seconds += now - last
        self.is_nested = active is totals
        if active is not totals:
            totals.entries += 1
            self.entry_seconds = totals.seconds
            clock.active = totals
            clock.active_since = now
        # A signal handler may raise before the sums below are known.
        self.start_work_seconds = self.start_wait_seconds = 0.0
        self.is_open = True
        self.task = None
        clock.stack.append(self)
        clock.accepts_iteration = False
        self.thread = clock.thread
        self.began = now
        work = waits = 0.0
        for phase in clock.work_phases:
            work += phase.seconds
        for phase in clock.wait_phases:
            waits += phase.seconds
        self.start_work_seconds = clock.iteration_start_work_seconds = work
        self.start_wait_seconds = waits
        clock.iteration = self
        return self

    def __exit__(self, error_type: object, error: BaseException | None, traceback: object) -> None:
        clock = _CLOCK
        now = monotonic()
        stack, last = clock.stack, clock.last_edge
        if (
            stack[-1] is not self
            or clock.iteration is not self
            or clock.active is not clock.iteration_phase  # the iteration has continued in a different phase
            or not last <= now < clock.limit
        ):
            return self._leave_slowly(now, error)
        active = clock.active
        clock.last_edge = now
        active.seconds += now - last
        del stack[-1]
        self.is_open = False
        outer = stack[-1].totals
        if active is not outer:
            clock.active = outer
            clock.active_since = now
        clock.iteration = None
        clock.accepts_iteration = True
        work = waits = 0.0
        for phase in clock.work_phases:
            work += phase.seconds
        for phase in clock.wait_phases:
            waits += phase.seconds
        record: IterationEnded = (
            self.began,
            now,
            work - self.start_work_seconds,
            waits - self.start_wait_seconds,
            error is not None,
            TRAINING.expected,
        )
        if len(_RECORDS) < MANY_RECORDS:
            _RECORDS.append(record)
        else:
            TRAINING.append(record)
        return None

    def begin_next(self, now: float) -> None:
        """End this open iteration of the main thread, and begin the next one at the same time with the same object.

        The clock's stack stays unchanged, and no observer is notified.
        """
        previous_start_work, previous_start_waits = self.start_work_seconds, self.start_wait_seconds
        self._set_start_totals()
        record: IterationEnded = (
            self.began,
            now,
            self.start_work_seconds - previous_start_work,
            self.start_wait_seconds - previous_start_waits,
            False,
            TRAINING.expected,
        )
        self.began = now
        _CLOCK.iteration_start_work_seconds = self.start_work_seconds
        if len(_RECORDS) < MANY_RECORDS:
            _RECORDS.append(record)
        else:
            TRAINING.append(record)

    def _set_start_totals(self) -> None:
        """Set the seconds of work and of waiting at the start of the iteration to the totals at the latest edge of the clock."""
        work = waits = 0.0
        for phase in _CLOCK.work_phases:
            work += phase.seconds
        for phase in _CLOCK.wait_phases:
            waits += phase.seconds
        self.start_work_seconds = work
        self.start_wait_seconds = waits

    def begin(self, now: float, call: str, began: float | None = None) -> None:
        """Begin the iteration, unless a bridge inferred it in an instrumented job.

        Open iterations of the same task, or of the same thread outside the main thread, are ended as incomplete. On the main thread,
        an observer may refuse the new iteration instead.
        """
        clock, kind = _CLOCK, self.kind
        if kind.is_inferred and TRAINING.job_is_instrumented:
            return
        if not kind.is_inferred:
            TRAINING.take_over()
        if clock.thread is None:
            TRAINING.start_on(get_ident())
        is_main = get_ident() == clock.thread
        if is_main:
            task = clock.current_task()
            open_iterations = [
                entry for entry in clock.stack if isinstance(entry, IterationBlock) and entry.task == task
            ]
            for iteration in open_iterations:
                if any(TRAINING.observers.notify(lambda observer: observer.begin_while_open(kind, call))):
                    return
                clock.remove([iteration], now)
                iteration.abandon(now)
            clock.begin_training(now)
        elif (earlier_iteration := TRAINING.iterations_of_other_threads.get(get_ident())) is not None:
            earlier_iteration.abandon(now)
        self.start_work_seconds = self.start_wait_seconds = 0.0
        super().begin(now, call, began)
        if not is_main and self.is_open:
            TRAINING.iterations_of_other_threads[get_ident()] = self
            if len(TRAINING.iterations_of_other_threads) > MAX_ITERATIONS_OF_OTHER_THREADS:
                # `list` copies the keys in a single call. A loop over the dictionary could meet a change by another thread.
                oldest_thread = list(TRAINING.iterations_of_other_threads)[0]  # noqa: RUF015
                TRAINING.iterations_of_other_threads.pop(oldest_thread, None)
        if is_main and self.is_open:
            clock.accepts_iteration = False
            self._set_start_totals()
            clock.iteration_start_work_seconds = self.start_work_seconds
            clock.iteration = self

    def finish(self, end_time: float, error: BaseException | None, *, is_complete: bool) -> None:
        """Append the record of a complete iteration. An iteration that raised is recorded as failed."""
        clock, kind, began = _CLOCK, self.kind, self.began
        # The iteration may have continued in a different phase. The next entry of this object begins in the phase of the kind.
        self.totals = clock.phases[str(kind.phase)]
        work, waits = 0.0, None
        if self.thread == clock.thread:
            if clock.iteration is self:
                clock.iteration = None
                clock.accepts_iteration = TRAINING.job_is_instrumented
            work, waits = (
                clock.work_seconds() - self.start_work_seconds,
                clock.wait_seconds() - self.start_wait_seconds,
            )
        elif self.thread is not None and TRAINING.iterations_of_other_threads.get(self.thread) is self:
            # With a default, because a different thread may have removed the entry since the check.
            TRAINING.iterations_of_other_threads.pop(self.thread, None)
        if is_complete:
            is_failed = error is not None
            TRAINING.observers.notify(
                lambda observer: observer.iteration_ended(kind, began, end_time, is_failed),
                propagates=not is_failed,
            )
            TRAINING.append((began, end_time, work, waits, is_failed, TRAINING.expected))


class InferredIterationBlock(IterationBlock):
    """Block for a training iteration that a bridge infers.

    Entry and exit always take the slow path, which refuses the block in an instrumented job.
    """

    __slots__ = ()

    def __enter__(self) -> Span | NonRecordingSpan:
        return self._enter_slowly(monotonic())

    def __exit__(self, error_type: object, error: BaseException | None, traceback: object) -> None:
        self._leave_slowly(monotonic(), error)


def new_hot_block(kind: BlockKind) -> HotBlock:
    """Return a new block for a hot kind that is not inferred."""
    if kind is kinds.TRAINING_ITERATION:
        return IterationBlock(kind)
    return EvaluationBlock(kind) if kind in kinds.STEPS else HotBlock(kind)
