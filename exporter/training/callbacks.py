"""Callbacks for the start and the end of blocks, for code that cannot use context managers.

The names and signatures are one-logger's. The time of a callback is in milliseconds since the epoch; None means the current
time. A callback that starts a block returns the span of the block.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from time import monotonic

from exporter.recording.conversion import to_scalar
from exporter.training import kinds
from exporter.training.blocks import HotBlock
from exporter.training.iterations import new_hot_block
from exporter.training.kinds import BlockKind
from exporter.training.loop_values import loop_values
from exporter.training.rare_blocks import begin_block, end_block, timestamp_of
from exporter.training.recorder import TRAINING
from exporter.training.records import SaveSucceeded
from exporter.training.spans import NonRecordingSpan, Span


def _begin(kind: BlockKind, start_time_msec: float | None) -> Span:
    return begin_block(kind, kind.begin_name, timestamp=timestamp_of(start_time_msec, kind.begin_name))[0]


def _end(kind: BlockKind, finish_time_msec: float | None) -> None:
    end_block(kind, kind.end_name, timestamp=timestamp_of(finish_time_msec, kind.end_name))


def _begin_hot(kind: BlockKind, start_time_msec: float | None) -> Span | NonRecordingSpan:
    """Begin a new block of a hot kind. Return the span; without an observer, the block itself, which ignores attributes and events."""
    now, call = monotonic(), kind.begin_name
    began = None if start_time_msec is None else timestamp_of(start_time_msec, call).perf_counter_seconds
    block = new_hot_block(kind)
    block.is_lexical = False
    if TRAINING.is_on and _discard_open_block(kind, call, now):
        block.begin(now, call, began)
        if block.is_open:
            TRAINING.callback_blocks.append(block)
    return block if block.span is None else block.span


def _discard_open_block(kind: BlockKind, call: str, now: float) -> bool:
    """Discard the open block of a kind before the next block starts. Return False if an observer refuses the next block instead.

    An open iteration is not discarded here, because `IterationBlock.begin` discards it.
    """
    open_block = None if kind in kinds.ITERATIONS else _find_open(kind, in_process=False)
    if open_block is None:
        return True
    if any(TRAINING.observers.notify(lambda observer: observer.begin_while_open(kind, call))):
        return False
    open_block.abandon(now)
    return True


def _end_hot(kind: BlockKind, finish_time_msec: float | None) -> None:
    now, call = monotonic(), kind.end_name
    end_time = None if finish_time_msec is None else timestamp_of(finish_time_msec, call).perf_counter_seconds
    block = _find_open(kind, in_process=True) if TRAINING.is_on else None
    if block is None:
        if TRAINING.is_on:
            TRAINING.observers.notify(lambda observer: observer.end_without_begin(kind, call))
        return
    block.end(now, None, ended=end_time)


def _find_open(kind: BlockKind, *, in_process: bool) -> HotBlock | None:
    """Return the latest open block of a kind in this thread or task. With *in_process*, fall back to all threads and tasks."""
    clock, thread = TRAINING.clock, get_ident()
    task = clock.current_task() if thread == clock.thread else None
    candidate: HotBlock | None = None
    callback_blocks = [
        block for block in TRAINING.callback_blocks if isinstance(block, HotBlock) and block.is_open
    ]
    stack = [entry for entry in clock.stack if isinstance(entry, HotBlock) and entry not in callback_blocks]
    for block in reversed([*stack, *callback_blocks]):
        if block.kind is kind and block.is_open:
            if block.thread == thread and block.task == task:
                return block
            candidate = candidate or block
    return candidate if in_process else None


# Initialization and the application ----------------------------------------------------------------------------


def on_app_start(start_time_msec: float | None = None) -> Span:
    """Record the start of the application."""
    return _begin(kinds.APPLICATION, start_time_msec)


def on_app_end(finish_time_msec: float | None = None) -> None:
    """Record the end of the application."""
    _end(kinds.APPLICATION, finish_time_msec)


def on_distributed_init_start(start_time_msec: float | None = None) -> Span:
    """Record the start of the rendezvous of the ranks."""
    return _begin(kinds.DISTRIBUTED_INIT, start_time_msec)


def on_distributed_init_end(finish_time_msec: float | None = None) -> None:
    """Record the end of the rendezvous of the ranks."""
    _end(kinds.DISTRIBUTED_INIT, finish_time_msec)


def on_model_init_start(start_time_msec: float | None = None) -> Span:
    """Record the start of the construction of the model."""
    return _begin(kinds.MODEL_INIT, start_time_msec)


def on_model_init_end(finish_time_msec: float | None = None) -> None:
    """Record the end of the construction of the model."""
    _end(kinds.MODEL_INIT, finish_time_msec)


def on_dataloader_init_start(start_time_msec: float | None = None) -> Span:
    """Record the start of the construction of the data loaders."""
    return _begin(kinds.DATALOADER_INIT, start_time_msec)


def on_dataloader_init_end(finish_time_msec: float | None = None) -> None:
    """Record the end of the construction of the data loaders."""
    _end(kinds.DATALOADER_INIT, finish_time_msec)


def on_load_checkpoint_start(start_time_msec: float | None = None) -> Span:
    """Record the start of the loading of a checkpoint."""
    return _begin(kinds.CHECKPOINT_LOAD, start_time_msec)


def on_load_checkpoint_end(finish_time_msec: float | None = None) -> None:
    """Record the end of the loading of a checkpoint."""
    _end(kinds.CHECKPOINT_LOAD, finish_time_msec)


def on_optimizer_init_start(start_time_msec: float | None = None) -> Span:
    """Record the start of the construction of the optimizer."""
    return _begin(kinds.OPTIMIZER_INIT, start_time_msec)


def on_optimizer_init_end(finish_time_msec: float | None = None) -> None:
    """Record the end of the construction of the optimizer."""
    _end(kinds.OPTIMIZER_INIT, finish_time_msec)


# Training, validation, test ------------------------------------------------------------------------------------


def on_train_start(
    train_iterations_start: int,
    train_samples_start: int | None = None,
    train_iterations_target_or_fn: int | Callable[[], int] | None = None,
    train_samples_target_or_fn: int | Callable[[], int] | None = None,
    start_time_msec: float | None = None,
) -> Span:
    """Record the start of a training loop. The arguments before the time are those of `training_loop`."""
    kind, targets = kinds.TRAINING_LOOP, (train_iterations_target_or_fn, train_samples_target_or_fn)
    values = loop_values(kind.begin_name, train_iterations_start, train_samples_start, *targets)
    timestamp = timestamp_of(start_time_msec, kind.begin_name)
    return begin_block(kind, kind.begin_name, timestamp=timestamp, values=values)[0]


def on_train_end(finish_time_msec: float | None = None) -> None:
    """Record the end of the training loop."""
    _end(kinds.TRAINING_LOOP, finish_time_msec)


def on_training_single_iteration_start(start_time_msec: float | None = None) -> Span | NonRecordingSpan:
    """Record the start of a training iteration."""
    return _begin_hot(kinds.TRAINING_ITERATION, start_time_msec)


def on_training_single_iteration_end(finish_time_msec: float | None = None) -> None:
    """Record the end of the training iteration."""
    _end_hot(kinds.TRAINING_ITERATION, finish_time_msec)


def on_validation_start(start_time_msec: float | None = None) -> Span:
    """Record the start of a validation."""
    return _begin(kinds.VALIDATION_LOOP, start_time_msec)


def on_validation_end(finish_time_msec: float | None = None) -> None:
    """Record the end of the validation."""
    _end(kinds.VALIDATION_LOOP, finish_time_msec)


def on_validation_single_iteration_start(start_time_msec: float | None = None) -> Span | NonRecordingSpan:
    """Record the start of a batch of a validation."""
    return _begin_hot(kinds.VALIDATION_ITERATION, start_time_msec)


def on_validation_single_iteration_end(finish_time_msec: float | None = None) -> None:
    """Record the end of the batch of a validation."""
    _end_hot(kinds.VALIDATION_ITERATION, finish_time_msec)


def on_testing_start(start_time_msec: float | None = None) -> Span:
    """Record the start of a test."""
    return _begin(kinds.TESTING_LOOP, start_time_msec)


def on_testing_end(finish_time_msec: float | None = None) -> None:
    """Record the end of the test."""
    _end(kinds.TESTING_LOOP, finish_time_msec)


# Checkpoints ---------------------------------------------------------------------------------------------------


def on_save_checkpoint_start(global_step: int, start_time_msec: float | None = None) -> Span:
    """Record the start of saving the checkpoint of a step."""
    kind = kinds.CHECKPOINT_SAVE
    timestamp = timestamp_of(start_time_msec, kind.begin_name)
    values = {"global_step": to_scalar(global_step)}
    return begin_block(kind, kind.begin_name, timestamp=timestamp, values=values)[0]


def on_save_checkpoint_success(global_step: int, time_msec: float | None = None) -> None:
    """Record that a checkpoint is complete. An asynchronous save may be confirmed later, on any thread."""
    call = "on_save_checkpoint_success"
    step, timestamp = to_scalar(global_step), timestamp_of(time_msec, call)
    if TRAINING.saves_are_enabled():
        TRAINING.append(
            SaveSucceeded(call, step, timestamp.perf_counter_seconds, timestamp.seconds_since_epoch)
        )
    TRAINING.observers.notify(lambda observer: observer.save_succeeded(step, timestamp, call))
    TRAINING.publish_soon()


def on_save_checkpoint_end(finish_time_msec: float | None = None) -> None:
    """Record the end of the blocking part of a save. A synchronous save that is not confirmed by then has failed."""
    _end(kinds.CHECKPOINT_SAVE, finish_time_msec)
