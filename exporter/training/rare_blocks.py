"""Rare blocks: application, loops, saves, initialization, and spans with user-defined names.

A *hot* block is entered in each step (see `blocks.py`); all other blocks are *rare*. A rare block always has a span, to which the job
may add attributes and events until the block ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from math import isfinite
from threading import get_ident
from time import monotonic, time
from typing import Any

from exporter.errors import OneLoggerError
from exporter.recording.conversion import safe_repr, to_number
from exporter.recording.timing import AnyFunction, within
from exporter.training import kinds
from exporter.training.attributes import MAX_FUTURE_SECONDS, Attributes, SpanName, TracingTimestamp
from exporter.training.checkpoints import SavePolicy
from exporter.training.clock import StackEntry
from exporter.training.failures import reason_of
from exporter.training.kinds import BlockKind, restored_kind
from exporter.training.misuse import report
from exporter.training.observer import ObservedBlock
from exporter.training.progress import is_count
from exporter.training.recorder import MAX_OPEN_RARE_BLOCKS, TRAINING
from exporter.training.records import (
    ApplicationBegan,
    ApplicationEnded,
    LoopBegan,
    LoopEnded,
    Record,
    SaveBegan,
    SaveEnded,
    SpanEnded,
)
from exporter.training.span_log import log_begin, log_end
from exporter.training.spans import Event, Span

_KEYS = count()
_SINGLE_IN_PROCESS = kinds.LOOPS | {kinds.APPLICATION}
"""Kinds of which a process has at most one open block, on any thread."""


class StartedBlock(StackEntry):
    """Rare block after its start. On the main thread, it is also an entry of the clock's stack while `is_open` is true.

    Attributes:
        key: Number of the block in the order of the starts in this process.
        policy: Properties of a save; the defaults for other kinds.
        thread: Thread that started the block.
        is_logged: True after the start was logged for event handlers.
        is_ended: True after the end, also if the entry is still on the clock's stack.
    """

    __slots__ = ("kind", "key", "observed", "policy", "thread", "is_logged", "is_ended")

    def __init__(self, kind: BlockKind, observed: ObservedBlock, policy: SavePolicy) -> None:
        super().__init__()
        self.kind = kind
        self.key = next(_KEYS)
        self.observed = observed
        self.policy = policy
        self.thread = get_ident()
        self.is_lexical = observed.is_lexical
        self.is_logged = self.is_ended = False

    def abandon(self, now: float) -> None:  # noqa: ARG002  # the end also needs the wall clock
        """End the block as incomplete, because the surrounding block has ended."""
        self.evict()

    def evict(self) -> None:
        """End the block as incomplete: a surrounding block has ended, or more than `MAX_OPEN_RARE_BLOCKS` are open."""
        end_open_block(self, timestamp_now(), is_complete=False)

    def discard(self) -> None:
        """Close the block without a record of its end."""
        discard_block(self)


def timestamp_now() -> TracingTimestamp:
    """Return the current time of the wall clock and the monotonic clock."""
    # On Linux, `monotonic` and `perf_counter` read the same clock.
    return TracingTimestamp(time(), monotonic())


def timestamp_of(milliseconds: object, call: str) -> TracingTimestamp:
    """Return the timestamp of a time in milliseconds since the epoch.

    Return the current time for None, for 0 and for a time more than ten minutes ahead. A number that is negative or not finite, or an
    object that is not a number, also becomes the current time and is reported as misuse.
    """
    wall, now = time(), monotonic()
    if milliseconds is None:
        return TracingTimestamp(wall, now)
    number = to_number(milliseconds)
    try:
        unix_seconds = -1.0 if number is None else number / 1000
    except OverflowError:
        unix_seconds = -1.0
    if not isfinite(unix_seconds) or unix_seconds < 0:
        report(call, "time", f"milliseconds since the epoch, not {safe_repr(milliseconds)}")
    if not 0 < unix_seconds <= wall + MAX_FUTURE_SECONDS:
        unix_seconds = wall
    return TracingTimestamp(unix_seconds, now - (wall - unix_seconds))


# Context manager ------------------------------------------------------------------------------------------------


class RareBlock:
    """Context manager and decorator of a rare block. Entering returns the span. The object may be entered repeatedly.

    Args:
        kind: Kind of the block.
        values: Function that returns the converted arguments of the start. It is called at each entry.
        **arguments: Further arguments of `begin_block`.
    """

    __slots__ = ("kind", "_values", "_arguments", "_open")

    def __init__(
        self, kind: BlockKind, values: Callable[[], Mapping[str, object]] | None = None, **arguments: Any
    ) -> None:
        self.kind = kind
        self._values = values
        self._arguments = arguments
        self._open: list[tuple[Span, StartedBlock | None]] = []

    def __enter__(self) -> Span:
        values = None if self._values is None else self._values()
        span, block = begin_block(
            self.kind, self.kind.call, is_lexical=True, values=values, **self._arguments
        )
        self._open.append((span, block))
        return span

    def __exit__(self, error_type: object, error: BaseException | None, traceback: object) -> None:
        if not self._open:
            return
        span, block = self._open.pop()
        if block is None:
            span.stop()
        elif block.is_ended:
            # The block is still on the clock's stack if a signal handler has discarded it while it started.
            if block.is_open and block.thread == get_ident():
                TRAINING.clock.leave(block, monotonic())
            TRAINING.observers.notify(
                lambda observer: observer.end_without_begin(self.kind, self.kind.call),
                propagates=error is None,
            )
        else:
            end_open_block(block, timestamp_now(), error=error)

    def __call__(self, function: AnyFunction) -> AnyFunction:
        """Decorate a function, a coroutine function or a generator function: each call is a block."""
        return within(lambda: RareBlock(self.kind, self._values, **self._arguments), function)

    def __reduce__(self) -> tuple[Callable[..., RareBlock], tuple[str, str]]:
        """Reduce to a closed block of the same kind, for copies and other processes."""
        return _restored, (self.kind.span_name, self.kind.call)

    def __repr__(self) -> str:
        return f"<{self.kind.call}>"


def _restored(span_name: str, call: str) -> RareBlock:
    return RareBlock(restored_kind(span_name, call))


# Start of a block ----------------------------------------------------------------------------------------------


def begin_block(
    kind: BlockKind,
    call: str,
    *,
    timestamp: TracingTimestamp | None = None,
    is_lexical: bool = False,
    span_name: SpanName | None = None,
    span_attributes: Attributes | None = None,
    start_event_attributes: Attributes | None = None,
    parent: Span | None = None,
    values: Mapping[str, object] | None = None,
) -> tuple[Span, StartedBlock | None]:
    """Start a rare block. Return the span and the block; the block is None if the recording is off or the start is refused.

    Args:
        kind: Kind of the block.
        call: API call of the job, for the reports of misuse.
        timestamp: Start of the block; None for the current time.
        is_lexical: True if a context manager starts the block, False for a callback.
        span_name: Name of the span; None for the span name of the kind.
        span_attributes: Attributes of the span.
        start_event_attributes: Attributes of the start event of the span.
        parent: Parent of the span; None for the innermost open span.
        values: Converted arguments of the start.

    Raises:
        OneLoggerError: An observer raised the error. A block that was started before is ended as incomplete.
    """
    began = timestamp or timestamp_now()
    is_save = kind is kinds.CHECKPOINT_SAVE
    policy = TRAINING.current_save_policy() if is_save and TRAINING.is_on else SavePolicy()
    arguments = dict(values or {})
    name: SpanName = kind.span_name if span_name is None else span_name
    if is_save:
        arguments |= {"strategy": policy.strategy, "enabled": policy.enabled}
        name = f"checkpoint_save_{policy.strategy}"
    parent_span = parent or TRAINING.spans.parent()
    span = Span.create(name, parent_span, span_attributes, start_event_attributes, began)
    if not TRAINING.is_on or not _prepare_begin(kind, call, arguments):
        return span, None
    span.on_event = _event_added
    block = StartedBlock(kind, ObservedBlock(kind, span, began, is_lexical, call, arguments), policy)
    _push(block, f"checkpoint_save_{policy.strategy}" if is_save else kind.phase)
    record = _begin_record(block)
    if record is not None:
        TRAINING.append(record)
    try:
        if all(TRAINING.observers.notify(lambda observer: observer.allows(kind, call, arguments))):
            TRAINING.spans.enter(span)  # only an observed block becomes a parent
            TRAINING.observers.notify(lambda observer: observer.block_began(block.observed))
    except OneLoggerError:
        end_open_block(block, timestamp_now(), is_complete=False)
        raise
    log_begin(block.observed, with_parameters=kind in _SINGLE_IN_PROCESS)
    block.is_logged = True
    return span, block


def _prepare_begin(kind: BlockKind, call: str, values: Mapping[str, object]) -> bool:
    """End or discard the blocks that the start of a block replaces. Return False if the start is refused.

    - An application ends the hot blocks that callbacks have left open.
    - A training loop discards the blocks that a bridge has inferred. The loop is refused and reported as misuse if its start is not a
      number of steps or samples.
    - An inferred block is refused in an instrumented job, and while a loop is open.
    - If the kind allows only one open block, the open block is discarded, unless an observer refuses the new block.
    """
    if kind.is_inferred:
        has_loop = any(block.kind in kinds.LOOPS for block in _open_rare())
        return not TRAINING.job_is_instrumented and not has_loop
    if kind is kinds.APPLICATION:
        TRAINING.abandon_callback_blocks()
    if kind is kinds.TRAINING_LOOP:
        TRAINING.take_over()
        for name in ("train_iterations_start", "train_samples_start"):
            value = values.get(name)
            if not is_count(value) and (value is not None or name == "train_iterations_start"):
                report(call, "invalid_start", f"{name} of 0 or more, not {safe_repr(value)}")
                TRAINING.observers.notify(lambda observer: observer.allows(kind, call, values))
                return False
    open_block = find_open(kind, in_process=kind in _SINGLE_IN_PROCESS) if kind.is_exclusive else None
    if open_block is None:
        return True
    if any(TRAINING.observers.notify(lambda observer: observer.begin_while_open(kind, call))):
        return False
    discard_block(open_block)
    return True


def _push(block: StartedBlock, phase: str | None) -> None:
    """Add a block to the open blocks, and on the main thread to the clock's stack. Above the limit, end the oldest open block."""
    now = monotonic()
    clock = TRAINING.clock
    if clock.thread is None:
        TRAINING.start_on(block.thread)
    TRAINING.start_recording()
    TRAINING.observers.check_handlers()
    if block.kind in kinds.LOOPS and block.thread == clock.thread:
        clock.begin_training(now)
    TRAINING.open_rare_blocks[block.key] = block
    block.is_open = True
    if block.thread == clock.thread:
        clock.enter(block, phase, now)
        if TRAINING.gpu.is_on and phase is not None:
            TRAINING.gpu.begin(block.kind, phase)
    TRAINING.is_training = TRAINING.is_training or phase is not None
    if len(TRAINING.open_rare_blocks) > MAX_OPEN_RARE_BLOCKS:
        oldest = next(iter(TRAINING.open_rare_blocks.values()), None)
        if oldest is not None:
            oldest.evict()


def _begin_record(block: StartedBlock) -> Record | None:
    """Return the record of the start of a block. Return None for a save that is not recorded, and for kinds without a record of the start."""
    values, began = block.observed.values, block.observed.began.perf_counter_seconds
    if block.kind in kinds.LOOPS:
        start, target = values["train_iterations_start"], values.get("train_iterations_target")
        step_target = target if type(target) is int else None
        return LoopBegan(start if type(start) is int else 0, step_target, began, block.kind.is_inferred)
    if block.kind is kinds.APPLICATION:
        return ApplicationBegan()
    if block.kind is kinds.CHECKPOINT_SAVE and block.policy.enabled:
        return SaveBegan(
            block.key, block.observed.call, values.get("global_step"), block.policy.strategy, began
        )
    return None


def _event_added(span: Span, event: Event) -> None:
    TRAINING.observers.notify(lambda observer: observer.event_added(span, event))


# End of a block ------------------------------------------------------------------------------------------------


def end_block(
    kind: BlockKind,
    call: str,
    *,
    timestamp: TracingTimestamp | None = None,
    span: Span | None = None,
    attributes: Attributes | None = None,
) -> None:
    """End the block of a span, or, without a span, the open block of a kind.

    If no such block is open, notify the observers. If the recording is off, only stop the span.
    """
    if not TRAINING.is_on:
        if span is not None:
            span.stop(attributes, timestamp)
        return
    block = _block_of(span) if span is not None else find_open(kind, in_process=True)
    if block is None:
        TRAINING.observers.notify(lambda observer: observer.end_without_begin(kind, call))
    else:
        end_open_block(block, timestamp or timestamp_now(), attributes=attributes)


def end_open_block(
    block: StartedBlock,
    timestamp: TracingTimestamp,
    *,
    error: BaseException | None = None,
    attributes: Attributes | None = None,
    is_complete: bool = True,
) -> None:
    """End a block that is still open.

    An application and a training loop also end the blocks that were started inside. *is_complete* is False if the job did not end the
    block itself, for example if the surrounding block ended.
    """
    if TRAINING.open_rare_blocks.get(block.key) is not block:
        return
    kind, span = block.kind, block.observed.span
    ends_all = kind in _SINGLE_IN_PROCESS
    is_orderly = not (kind is kinds.APPLICATION and any(other.kind in kinds.LOOPS for other in _open_rare()))
    if ends_all:
        TRAINING.observers.notify(lambda observer: observer.block_ending(block.observed), propagates=False)
        end_blocks_since(block)
    _close(block)
    span.stop(attributes, timestamp)
    TRAINING.spans.leave(span)
    _append_end(block, timestamp, error, is_orderly=is_orderly, is_complete=is_complete)
    if block.is_logged:
        log_end(
            block.observed,
            timestamp,
            ok=error is None and is_complete,
            reason=reason_of(error) if error else None,
            with_parameters=ends_all,
        )
    TRAINING.observers.notify(
        lambda observer: observer.block_ended(block.observed, timestamp, error), propagates=error is None
    )


def _close(block: StartedBlock) -> None:
    """Remove a block from the open blocks, and on the main thread from the clock's stack.

    If another thread closes a block of the main thread, the main thread removes the entry from the stack later.
    """
    now = monotonic()
    if TRAINING.gpu.is_on:
        TRAINING.gpu.end(block.kind)
    TRAINING.open_rare_blocks.pop(block.key, None)
    block.is_ended = True
    if block.thread != get_ident() or not block.is_open or TRAINING.clock.thread != block.thread:
        block.is_open = False
        return
    TRAINING.clock.leave(block, now, ends_all=block.kind in _SINGLE_IN_PROCESS)


def _append_end(
    block: StartedBlock,
    timestamp: TracingTimestamp,
    error: BaseException | None,
    *,
    is_orderly: bool,
    is_complete: bool,
) -> None:
    """Append the records of the end of a block: the duration of a span without a phase, and the end of a loop, application or save."""
    kind, end_time = block.kind, timestamp.perf_counter_seconds
    failure = "" if error is None else reason_of(error)
    seconds = max(end_time - block.observed.began.perf_counter_seconds, 0.0)
    if kind.phase is None:
        TRAINING.append(SpanEnded(block.observed.span.name_str, seconds))
    if kind in kinds.LOOPS:
        TRAINING.append(LoopEnded(failure))
    elif kind is kinds.APPLICATION:
        TRAINING.append(ApplicationEnded(failure, is_orderly))
        TRAINING.publish_soon()
    elif kind is kinds.CHECKPOINT_SAVE and block.policy.enabled:
        is_success = None if is_complete and not block.is_lexical else is_complete and error is None
        TRAINING.append(SaveEnded(block.key, end_time, timestamp.seconds_since_epoch, is_success))
        if is_success:
            TRAINING.publish_soon()


def end_blocks_since(block: StartedBlock) -> None:
    """End the blocks that were started inside an application or a training loop and are still open, the latest first.

    A training loop ends only blocks of its thread.
    """
    for inner in reversed(_open_rare()):
        if inner.key > block.key and (block.kind is kinds.APPLICATION or inner.thread == block.thread):
            end_open_block(inner, timestamp_now(), is_complete=False)


def discard_block(block: StartedBlock) -> None:
    """Close a block without a record of its end."""
    _close(block)
    TRAINING.spans.leave(block.observed.span)
    if block.is_logged:
        log_end(block.observed, timestamp_now(), ok=False, reason=None, with_parameters=False)
    TRAINING.observers.notify(lambda observer: observer.block_discarded(block.observed), propagates=False)


# Open blocks ---------------------------------------------------------------------------------------------------


def _open_rare() -> list[StartedBlock]:
    return [block for block in list(TRAINING.open_rare_blocks.values()) if type(block) is StartedBlock]


def find_open(kind: BlockKind, *, in_process: bool) -> StartedBlock | None:
    """Return the latest open block of a kind in this thread or task, or None. An inferred loop is also a training loop.

    With *in_process*, fall back to the latest block of all threads and tasks.
    """
    thread = get_ident()
    task = TRAINING.clock.current_task() if thread == TRAINING.clock.thread else None
    candidate = None
    for block in reversed(_open_rare()):
        if block.kind is kind or (kind is kinds.TRAINING_LOOP and block.kind is kinds.INFERRED_LOOP):
            if block.thread == thread and (block.thread != TRAINING.clock.thread or block.task == task):
                return block
            candidate = candidate or block
    return candidate if in_process else None


def _block_of(span: Span) -> StartedBlock | None:
    return next((block for block in _open_rare() if block.observed.span is span), None)
