"""Hot blocks: blocks that are entered in each step, as context managers and decorators.

On the main thread, a hot block usually updates the clock inline, without a call. This is the *fast path*. The *slow path* handles all
other cases: asyncio tasks, observers, other threads, the first entry of a phase, blocks that are not left in reverse order, and others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from threading import get_ident
from time import monotonic, time

from exporter.errors import OneLoggerError
from exporter.recording.timing import AnyFunction, within
from exporter.training import kinds
from exporter.training.attributes import TracingTimestamp
from exporter.training.clock import StackEntry
from exporter.training.durations import CELLS
from exporter.training.kinds import BlockKind, restored_kind
from exporter.training.observer import ObservedBlock
from exporter.training.recorder import TRAINING
from exporter.training.records import EvaluationStepEnded
from exporter.training.span_log import log_begin, log_end
from exporter.training.spans import NonRecordingSpan, Span

_CLOCK = TRAINING.clock


class HotBlock(StackEntry, NonRecordingSpan):
    """Context manager and decorator of a hot block. The object may be entered repeatedly.

    A block without an observer is also the span that the entry returns.

    Attributes:
        twins: Open blocks that stand in for this object. While the object is open, another entry, such as a recursive entry or an entry on
            another thread, enters a twin.
        observed: The span of the open block with its details; None without an observer.
        began: Start of the block in monotonic seconds, set by the slow path and by iterations.
        thread: Thread that entered the block, set by the slow path and by iterations.
    """

    __slots__ = ("kind", "twins", "observed", "began", "thread")

    def __init__(self, kind: BlockKind) -> None:
        super().__init__()
        self.kind = kind
        self.totals = _CLOCK.phases[str(kind.phase)]
        self.has_phase = True
        self.thread: int | None = None
        self.observed: ObservedBlock | None = None
        self.twins: list[HotBlock] = []

    def __enter__(self) -> Span | NonRecordingSpan:
        clock = _CLOCK
        totals = self.totals
        if get_ident() != clock.thread or (
            (running_loop := clock.running_loop) is not None and running_loop() is not None
        ):
            return self._enter_slowly(monotonic())
        now = monotonic()
        # No call from here to the end of the update. *now* is before *last* if a signal handler has counted later edges.
        last = clock.last_edge
        if not last <= now < clock.limit or self.is_open or not totals.is_entered:
            return self._enter_slowly(now)
        active = clock.active
        clock.last_edge = now
        active.seconds += now - last
        if active is totals:
            self.is_nested = True
        else:
            self.is_nested = False
            totals.entries += 1
            self.entry_seconds = totals.seconds
            clock.active = totals
            clock.active_since = now
        self.is_open = True
        self.task = None
        clock.stack.append(self)
        return self

    def __exit__(self, error_type: object, error: BaseException | None, traceback: object) -> None:
        clock = _CLOCK
        now = monotonic()
        stack = clock.stack
        last = clock.last_edge
        if stack[-1] is not self or not last <= now < clock.limit:
            return self._leave_slowly(now, error)
        clock.last_edge = now
        active = clock.active
        active.seconds += now - last
        del stack[-1]
        self.is_open = False
        outer = stack[-1].totals
        if active is not outer:
            clock.active = outer
            clock.active_since = now
        if not self.is_nested and (cells := active.cells):
            own_seconds = active.seconds - self.entry_seconds
            active.duration_seconds += own_seconds
            cells[bisect_left(CELLS, own_seconds)] += 1
        return None

    # The slow path ---------------------------------------------------------------------------------------

    def _enter_slowly(self, now: float) -> Span | NonRecordingSpan:
        """Enter the block, or a twin if the block is open. Return the span."""
        if self.is_open:
            twin = type(self)(self.kind)
            twin.thread = get_ident()
            self.twins.append(twin)
            return twin.__enter__()
        if TRAINING.is_on:
            self.begin(now, self.kind.call)
        return self if self.observed is None else self.observed.span

    def _leave_slowly(self, now: float, error: BaseException | None) -> None:
        """Leave the latest open twin of this thread; without such a twin, leave the block."""
        thread = get_ident()
        for twin in reversed(self.twins):
            if twin.thread == thread:
                self.twins.remove(twin)
                twin.__exit__(None, error, None)
                return
        if self.is_open:
            self.end(now, error)

    def begin(self, now: float, call: str, began: float | None = None) -> None:
        """Begin the block on any thread.

        The phase is counted from *now*. The duration of an iteration or a batch, and the span, start at *began*, by default *now*.

        Raises:
            OneLoggerError: An observer raised the error. The block is ended.
        """
        clock = _CLOCK
        if clock.thread is None:
            TRAINING.start_on(get_ident())
        self.is_open = TRAINING.is_training = True
        self.thread = get_ident()
        self.began = now if began is None else began
        if self.thread == clock.thread:
            clock.enter(self, self.kind.phase, now)
            self.begin_on_device()
        if self.kind in TRAINING.observers.kinds:
            try:
                self._observe(call)
            except OneLoggerError:
                self.end(monotonic(), None, is_complete=False)
                raise

    def begin_on_device(self) -> None:
        """Report the start to the GPU timer, if the timing is on."""
        if TRAINING.gpu.is_on:
            TRAINING.gpu.begin(self.kind, str(self.kind.phase))

    def _observe(self, call: str) -> None:
        """Create the span of the block and notify the observers, unless an observer refuses the block."""
        began = TracingTimestamp(self.began + time() - monotonic(), self.began)
        span = Span.create(self.kind.span_name, TRAINING.spans.parent(), None, None, began)
        span.on_event = lambda span, event: TRAINING.observers.notify(
            lambda observer: observer.event_added(span, event)
        )
        kind = self.kind
        if not all(TRAINING.observers.notify(lambda observer: observer.allows(kind, call, {}))):
            return
        observed = self.observed = ObservedBlock(kind, span, began, self.is_lexical, call, {})
        TRAINING.spans.enter(span)
        if TRAINING.observers.logs_spans():
            log_begin(observed, with_parameters=False)
        TRAINING.observers.notify(
            lambda observer: observer.block_began(observed) if observer.observes(kind) else None
        )

    def end(
        self,
        now: float,
        error: BaseException | None,
        *,
        ended: float | None = None,
        is_complete: bool = True,
    ) -> None:
        """End the block on any thread.

        The phase is counted until *now*. The duration of an iteration or a batch, and the span, end at *ended*, by default *now*. An
        incomplete block counts no iteration and no batch.
        """
        end_time = now if ended is None else ended
        if get_ident() == _CLOCK.thread:
            if TRAINING.gpu.is_on:
                TRAINING.gpu.end(self.kind)
            _CLOCK.leave(self, now)
        self.is_open = False
        try:
            self.finish(end_time, error, is_complete=is_complete)
        finally:
            self._stop_observing(end_time, error, is_complete=is_complete)

    def finish(self, end_time: float, error: BaseException | None, *, is_complete: bool) -> None:
        """Count the iteration or batch of the block. Other blocks have nothing to count."""

    def _stop_observing(self, end_time: float, error: BaseException | None, *, is_complete: bool) -> None:
        """Stop the span, if any, and notify the observers."""
        observed, self.observed = self.observed, None
        if observed is None:
            return
        timestamp = TracingTimestamp(end_time + time() - monotonic(), end_time)
        observed.span.stop(None, timestamp)
        TRAINING.spans.leave(observed.span)
        if TRAINING.observers.logs_spans():
            log_end(observed, timestamp, ok=error is None and is_complete, reason=None, with_parameters=False)
        if is_complete:
            TRAINING.observers.notify(
                lambda observer: (
                    observer.block_ended(observed, timestamp, error) if observer.observes(self.kind) else None
                ),
                propagates=error is None,
            )
        else:
            TRAINING.observers.notify(lambda observer: observer.block_discarded(observed), propagates=False)

    def abandon(self, now: float) -> None:
        """End the block without counting an iteration or a batch, after the clock has removed the entry."""
        self.end(now, None, is_complete=False)

    # Use as a decorator and as a span -----------------------------------------------------------------------------

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
        """Span of the open block; None if the block is not observed."""
        return None if self.observed is None else self.observed.span

    def __reduce__(self) -> tuple[Callable[..., HotBlock], tuple[type[HotBlock], str, str]]:
        """Reduce to a closed block of the same kind, for copies and other processes."""
        return _restored, (type(self), self.kind.span_name, self.kind.call)

    def __repr__(self) -> str:
        return f"<{self.kind.call}>"


class EvaluationBlock(HotBlock):
    """Block for a batch of a validation or a test."""

    __slots__ = ()

    def __enter__(self) -> Span | NonRecordingSpan:
        return self._enter_slowly(monotonic())

    def __exit__(self, error_type: object, error: BaseException | None, traceback: object) -> None:
        self._leave_slowly(monotonic(), error)

    def finish(self, end_time: float, error: BaseException | None, *, is_complete: bool) -> None:
        """Notify the observers of a complete batch, and count the batch unless the body raised."""
        if not is_complete:
            return
        kind, began = self.kind, self.began
        TRAINING.observers.notify(
            lambda observer: observer.iteration_ended(kind, began, end_time, error is not None)
        )
        if error is None:
            mode = "validation" if kind is kinds.VALIDATION_ITERATION else "test"
            TRAINING.append(EvaluationStepEnded(mode, max(end_time - began, 0.0), end_time))


def _restored(block: type[HotBlock], span_name: str, call: str) -> HotBlock:
    return block(restored_kind(span_name, call))
