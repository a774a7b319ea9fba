"""Blocks of a training, as context managers and decorators.

On the main thread a hot block updates the clock inline; all other cases (asyncio tasks, observers, other threads,
blocks left out of order) take the slow path.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from threading import get_ident
from time import monotonic, time
from typing import Any

from exporter.errors import OneLoggerError
from exporter.recording.timing import AnyFunction, within
from exporter.training import kinds
from exporter.training.attributes import TracingTimestamp
from exporter.training.clock import StackEntry
from exporter.training.durations import CELLS
from exporter.training.kinds import BlockKind, restored_kind
from exporter.training.observer import ObservedBlock
from exporter.training.rare_blocks import OpenBlock, begin_block, end_open_block, moment_now
from exporter.training.recorder import MANY_RECORDS, TRAINING
from exporter.training.records import EvaluationStepEnded, IterationEnded
from exporter.training.span_log import log_begin, log_end
from exporter.training.spans import InertSpan, Span

_CLOCK = TRAINING.clock
_new_record = tuple.__new__  # a third of the time of a named tuple's own constructor
MOST_THREADS = 64
"""Threads, except the main thread, whose open iterations are tracked."""


class HotBlock(StackEntry, InertSpan):
    """Block of a phase that is entered in each step; reusable, and a decorator."""

    __slots__ = ("kind", "twins", "observed", "began", "thread")

    def __init__(self, kind: BlockKind) -> None:
        super().__init__()
        self.kind = kind
        self.totals = _CLOCK.phases[str(kind.phase)]
        self.has_phase = True
        self.thread: int | None = None
        self.observed: ObservedBlock | None = None
        self.twins: list[HotBlock] = []  # open blocks of reentrant uses

    def __enter__(self) -> Span | InertSpan:
        clock = _CLOCK
        totals = self.totals
        now = monotonic()
        if (
            now >= clock.limit
            or get_ident() != clock.thread
            or ((running_loop := clock.running_loop) is not None and running_loop() is not None)
            or self.is_open
            or not totals.is_entered
        ):
            return self._enter_slowly(now)
        active = clock.active
        last = clock.last
        clock.last = now
        active.seconds += now - last
        if active is totals:
            self.is_nested = True
        else:
            self.is_nested = False
            totals.entries += 1
            self.mark = totals.seconds
            clock.active = totals
            clock.since = now
        self.is_open = True
        clock.stack.append(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        clock = _CLOCK
        now = monotonic()
        stack = clock.stack
        if stack[-1] is not self or now >= clock.limit:
            return self._leave_slowly(now, error)
        last = clock.last
        clock.last = now
        active = clock.active
        active.seconds += now - last
        del stack[-1]
        self.is_open = False
        outer = stack[-1].totals
        if active is not outer:
            clock.active = outer
            clock.since = now
        if not self.is_nested and (cells := active.cells) is not None:
            own = active.seconds - self.mark
            active.duration_seconds += own
            cells[bisect_left(CELLS, own)] += 1
        return None

    # The slow path ---------------------------------------------------------------------------------------

    def _enter_slowly(self, now: float) -> Span | InertSpan:
        if self.is_open:
            twin = type(self)(self.kind)
            twin.thread = get_ident()
            self.twins.append(twin)
            return twin.__enter__()
        if TRAINING.is_on:
            self.begin(now, self.kind.call)
        return self if self.observed is None else self.observed.span

    def _leave_slowly(self, now: float, error: BaseException | None) -> None:
        here = get_ident()
        for twin in reversed(self.twins):
            if twin.thread == here:
                self.twins.remove(twin)
                twin.__exit__(None, error, None)
                return
        if self.is_open:
            self.end(now, error)

    def begin(self, now: float, call: str, began: float | None = None) -> None:
        """Begin the block on any thread, at the time *began* if given."""
        clock = _CLOCK
        if clock.thread is None:
            TRAINING.adopt(get_ident())
        self.is_open = TRAINING.is_training = True
        self.thread = get_ident()
        self.began = now if began is None else began
        if self.thread == clock.thread:
            clock.enter(self, self.kind.phase, now)
            self.begin_on_device()
        if self.kind in TRAINING.observed_kinds:
            try:
                self._observe(call)
            except OneLoggerError:
                self.end(monotonic(), None, is_complete=False)
                raise

    def begin_on_device(self) -> None:
        """Record the begin on the GPU, if the step is timed."""
        if TRAINING.gpu.on:
            TRAINING.gpu.begin(self.kind, str(self.kind.phase))

    def _observe(self, call: str) -> None:
        """Create the span of the block and notify the observers."""
        began = TracingTimestamp(self.began + time() - monotonic(), self.began)
        span = Span.create(self.kind.span_name, TRAINING.parent_for_span(), None, None, began)
        span.on_event = lambda span, event: TRAINING.notify(lambda each: each.event_added(span, event))
        kind = self.kind
        if not all(TRAINING.notify(lambda each: each.allows(kind, call, {}))):
            return
        observed = self.observed = ObservedBlock(kind, span, began, self.lexical, call, {})
        TRAINING.enter_span(span)
        if TRAINING.logs_spans():
            log_begin(observed, with_parameters=False)
        TRAINING.notify(lambda each: each.block_began(observed) if each.wants(kind) else None)

    def end(
        self,
        now: float,
        error: BaseException | None,
        *,
        ended: float | None = None,
        is_complete: bool = True,
    ) -> None:
        """End the block on any thread, at the time *ended* if given; an incomplete block counts no step."""
        at = now if ended is None else ended
        if get_ident() == _CLOCK.thread:
            if TRAINING.gpu.on:
                TRAINING.gpu.end(self.kind)
            _CLOCK.leave(self, now)
        self.is_open = False
        try:
            self.finish(at, error, is_complete=is_complete)
        finally:
            self._stop_observing(at, error, is_complete=is_complete)

    def finish(self, now: float, error: BaseException | None, *, is_complete: bool) -> None:
        """Count the iteration or batch of the block, if any."""

    def _stop_observing(self, now: float, error: BaseException | None, *, is_complete: bool) -> None:
        observed, self.observed = self.observed, None
        if observed is None:
            return
        at = TracingTimestamp(now + time() - monotonic(), now)
        observed.span.stop(None, at)
        TRAINING.leave_span(observed.span)
        if TRAINING.logs_spans():
            log_end(observed, at, ok=error is None and is_complete, reason=None, with_parameters=False)
        if is_complete:
            TRAINING.notify(
                lambda each: each.block_ended(observed, at, error) if each.wants(self.kind) else None,
                propagates=error is None,
            )
        else:
            TRAINING.notify(lambda each: each.block_discarded(observed), propagates=False)

    def abandon(self, now: float) -> None:
        """End the block without counting a step; the clock has already removed the entry."""
        self.end(now, None, is_complete=False)

    # A decorator, and a span -----------------------------------------------------------------------------

    def __call__(self, function: AnyFunction) -> AnyFunction:
        """Decorate a function, a coroutine function or a generator function: each call is a block."""
        return within(lambda: type(self)(self.kind), function)

    @property
    def name(self) -> str:
        """Name of the block's span."""
        return self.kind.span_name

    @property
    def active(self) -> bool:
        """True if the block is open."""
        return self.is_open

    @property
    def span(self) -> Span | None:
        """Span of the open block; None without an observer."""
        return None if self.observed is None else self.observed.span

    def __reduce__(self) -> tuple[Callable[..., HotBlock], tuple[str, str]]:
        """Return a block that is not open, for copies and other processes."""
        return _restored, (self.kind.span_name, self.kind.call)

    def __repr__(self) -> str:
        return f"<{self.kind.call}>"


class EvaluationBlock(HotBlock):
    """Batch of a validation or test."""

    __slots__ = ()

    def __enter__(self) -> Span | InertSpan:
        return self._enter_slowly(monotonic())

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._leave_slowly(monotonic(), error)

    def finish(self, now: float, error: BaseException | None, *, is_complete: bool) -> None:
        """Count the batch, unless the body raised."""
        if not is_complete:
            return
        kind, began = self.kind, self.began
        TRAINING.notify(lambda each: each.iteration_ended(kind, began, now, error is not None))
        if error is None:
            mode = "validation" if kind is kinds.VALIDATION_ITERATION else "test"
            TRAINING.append(EvaluationStepEnded(mode, max(now - began, 0.0), now))


class IterationBlock(HotBlock):
    """Training iteration: a step of the optimizer, with all microbatches."""

    __slots__ = ("work", "waits")

    def __enter__(self) -> Span | InertSpan:
        clock = _CLOCK
        now = monotonic()
        if (
            now >= clock.limit
            or get_ident() != clock.thread
            or not clock.accepts_iteration
            or ((running_loop := clock.running_loop) is not None and running_loop() is not None)
            or self.is_open
        ):
            return self._enter_slowly(now)
        totals = self.totals
        active = clock.active
        last = clock.last
        clock.last = now
        active.seconds += now - last
        self.is_nested = active is totals
        if not self.is_nested:
            totals.entries += 1
            clock.active = totals
            clock.since = now
        self.is_open = True
        self.thread = clock.thread
        clock.accepts_iteration = False
        self.began = now
        clock.stack.append(self)
        work = waits = 0.0
        for totals in clock.work:
            work += totals.seconds
        for totals in clock.waits:
            waits += totals.seconds
        self.work = clock.iteration_work = work
        self.waits = waits
        clock.iteration = self
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        clock = _CLOCK
        now = monotonic()
        stack = clock.stack
        if stack[-1] is not self or now >= clock.limit:
            return self._leave_slowly(now, error)
        last = clock.last
        clock.last = now
        active = clock.active
        active.seconds += now - last
        del stack[-1]
        self.is_open = False
        outer = stack[-1].totals
        if active is not outer:
            clock.active = outer
            clock.since = now
        clock.iteration = None
        clock.accepts_iteration = True
        work = -self.work
        for totals in clock.work:
            work += totals.seconds
        waits = -self.waits
        for totals in clock.waits:
            waits += totals.seconds
        records = TRAINING.records
        record = _new_record(
            IterationEnded, (self.began, now, work, waits, error is not None, TRAINING.expected)
        )
        if len(records) < MANY_RECORDS:
            records.append(record)
        else:
            TRAINING.append(record)
        return None

    def _mark(self) -> None:
        """Note the work and the waiting before the iteration."""
        clock = _CLOCK
        self.work = clock.iteration_work = clock.work_seconds()
        self.waits = clock.wait_seconds()
        clock.iteration = self

    def begin(self, now: float, call: str, began: float | None = None) -> None:
        """Begin the iteration; ignored if an observer refuses the iteration, or if inferred in an instrumented job."""
        clock, kind = _CLOCK, self.kind
        if kind.inferred and TRAINING.job_is_instrumented:
            return
        if not kind.inferred:
            TRAINING.take_over()
        if clock.thread is None:
            TRAINING.adopt(get_ident())
        is_main = get_ident() == clock.thread
        if is_main:
            task = clock.present_task()
            for earlier in [
                each for each in clock.stack if isinstance(each, IterationBlock) and each.task == task
            ]:
                if any(TRAINING.notify(lambda each: each.begin_while_open(kind, call))):
                    return
                clock.remove([earlier], now)
                earlier.abandon(now)
            clock.begin_training(now)
        elif (other := TRAINING.iterations_elsewhere.get(get_ident())) is not None:
            other.abandon(now)
        self.work = self.waits = 0.0
        super().begin(now, call, began)
        if not is_main and self.is_open:
            TRAINING.iterations_elsewhere[get_ident()] = self
            if len(TRAINING.iterations_elsewhere) > MOST_THREADS:
                del TRAINING.iterations_elsewhere[next(iter(TRAINING.iterations_elsewhere))]
        if is_main and self.is_open:
            clock.accepts_iteration = False
            self._mark()

    def finish(self, now: float, error: BaseException | None, *, is_complete: bool) -> None:
        """Append the record of the iteration; an iteration that raised is recorded as failed."""
        clock, kind, began = _CLOCK, self.kind, self.began
        work, waits = 0.0, None
        if self.thread == clock.thread:
            if clock.iteration is self:
                clock.iteration = None
                clock.accepts_iteration = TRAINING.job_is_instrumented
            work, waits = clock.work_seconds() - self.work, clock.wait_seconds() - self.waits
        elif self.thread is not None and TRAINING.iterations_elsewhere.get(self.thread) is self:
            del TRAINING.iterations_elsewhere[self.thread]
        if is_complete:
            failed = error is not None
            TRAINING.notify(
                lambda each: each.iteration_ended(kind, began, now, failed), propagates=not failed
            )
            TRAINING.append(IterationEnded(began, now, work, waits, failed, TRAINING.expected))


class InferredIterationBlock(IterationBlock):
    """Training iteration inferred by a bridge."""

    __slots__ = ()

    def __enter__(self) -> Span | InertSpan:
        return self._enter_slowly(monotonic())

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._leave_slowly(monotonic(), error)


class RareBlock:
    """Block that is entered rarely and returns a span; reusable, and a decorator."""

    __slots__ = ("kind", "_values", "_given", "_open")

    def __init__(
        self, kind: BlockKind, values: Callable[[], Mapping[str, object]] | None = None, **given: Any
    ) -> None:
        self.kind = kind
        self._values = values
        self._given = given
        self._open: list[tuple[Span, OpenBlock | None]] = []

    def __enter__(self) -> Span:
        values = None if self._values is None else self._values()
        opened = begin_block(self.kind, self.kind.call, entered=True, values=values, **self._given)
        self._open.append(opened)
        return opened[0]

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self._open:
            return
        span, block = self._open.pop()
        if block is None:
            span.stop()
        elif block.is_ended:
            if (
                block.is_open and block.thread == get_ident()
            ):  # discarded by a signal handler during the begin
                _CLOCK.leave(block, monotonic())
            TRAINING.notify(
                lambda each: each.end_without_begin(self.kind, self.kind.call), propagates=error is None
            )
        else:
            end_open_block(block, moment_now(), error=error)

    def __call__(self, function: AnyFunction) -> AnyFunction:
        """Decorate a function, a coroutine function or a generator function: each call is a block."""
        return within(lambda: RareBlock(self.kind, self._values, **self._given), function)

    def __reduce__(self) -> tuple[Callable[..., RareBlock], tuple[str, str]]:
        """Return a block that is not open, for copies and other processes."""
        return _restored_rare, (self.kind.span_name, self.kind.call)

    def __repr__(self) -> str:
        return f"<{self.kind.call}>"


def hot_block(kind: BlockKind) -> HotBlock:
    """Return a block of a hot kind."""
    if kind is kinds.TRAINING_ITERATION:
        return IterationBlock(kind)
    if kind is kinds.INFERRED_ITERATION:
        return InferredIterationBlock(kind)
    return EvaluationBlock(kind) if kind in kinds.STEPS else HotBlock(kind)


def phase_block(name: object) -> HotBlock | RareBlock:
    """Return a block of a phase; an unknown name returns a block with a span only."""
    kind = kinds.named_kind(name, phase=True)
    return RareBlock(kind) if kind.phase is None else HotBlock(kind)


def _restored(span_name: str, call: str) -> HotBlock:
    return hot_block(restored_kind(span_name, call))


def _restored_rare(span_name: str, call: str) -> RareBlock:
    return RareBlock(restored_kind(span_name, call))
