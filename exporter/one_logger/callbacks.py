"""Callbacks: the job's work told by pairs of calls, for code that has no place for a block; one-logger's 25.

Each says that something begins or ends now, or at a time in milliseconds since the epoch. Those that begin give the span.
The pairs are made from the rows of `exporter.training.span_kinds`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from exporter.recording.recorder import RECORDER
from exporter.training import buffers, calls
from exporter.training import span_kinds as kinds
from exporter.training.buffers import Handle, Hooks
from exporter.training.span_kinds import BEGIN, END, STEPS, VALUES, Kind
from exporter.training.spans import Span


def _pair(kind: Kind) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Make the two callbacks of a kind."""

    def start(start_time_msec: float | None = None) -> Span | Handle:
        if start_time_msec is None and kind in STEPS:
            calls.note_time(kind, BEGIN)
            return buffers.handle_of(kind)
        values = Hooks.telemetry.ask_application() if kind is kinds.APPLICATION else None
        return calls.begin(kind, kind.begin, at=calls.moment_of(start_time_msec, kind.begin), values=values)

    def finish(finish_time_msec: float | None = None) -> None:
        if kind is kinds.TRAINING_ITERATION and Hooks.values is not None:
            buffers.here().extend((VALUES, Hooks.values()))
        if finish_time_msec is None and kind in STEPS:
            calls.note_time(kind, END)
        else:
            calls.end(kind, kind.end, at=calls.moment_of(finish_time_msec, kind.end))

    for made, name, what in ((start, kind.begin, "begins"), (finish, kind.end, "ends")):
        made.__name__ = made.__qualname__ = name
        made.__doc__ = f"Say that {kind.doc} {what}."
    return start, finish


on_app_start, on_app_end = _pair(kinds.APPLICATION)
on_distributed_init_start, on_distributed_init_end = _pair(kinds.DISTRIBUTED_INIT)
on_model_init_start, on_model_init_end = _pair(kinds.MODEL_INIT)
on_dataloader_init_start, on_dataloader_init_end = _pair(kinds.DATALOADER_INIT)
on_load_checkpoint_start, on_load_checkpoint_end = _pair(kinds.CHECKPOINT_LOAD)
on_optimizer_init_start, on_optimizer_init_end = _pair(kinds.OPTIMIZER_INIT)
_, on_train_end = _pair(kinds.TRAINING_LOOP)
on_training_single_iteration_start, on_training_single_iteration_end = _pair(kinds.TRAINING_ITERATION)
on_validation_start, on_validation_end = _pair(kinds.VALIDATION_LOOP)
on_validation_single_iteration_start, on_validation_single_iteration_end = _pair(kinds.VALIDATION_ITERATION)
on_testing_start, on_testing_end = _pair(kinds.TESTING_LOOP)


def on_train_start(
    train_iterations_start: int,
    train_samples_start: int | None = None,
    train_iterations_target_or_fn: int | Callable[[], int] | None = None,
    train_samples_target_or_fn: int | Callable[[], int] | None = None,
    start_time_msec: float | None = None,
) -> Span:
    """Say that a training loop begins; the other arguments are those of `training_loop`."""
    kind, targets = kinds.TRAINING_LOOP, (train_iterations_target_or_fn, train_samples_target_or_fn)
    values = calls.loop_values(kind.begin, train_iterations_start, train_samples_start, *targets)
    return calls.begin(kind, kind.begin, at=calls.moment_of(start_time_msec, kind.begin), values=values)


def on_save_checkpoint_start(global_step: int, start_time_msec: float | None = None) -> Span:
    """Say that the saving of the checkpoint of a step begins."""
    kind, values = kinds.CHECKPOINT_SAVE, calls.save_values(global_step)
    at = calls.moment_of(start_time_msec, kind.begin)
    return calls.begin(kind, kind.begin, at=at, name=calls.save_name(values), values=values)


def on_save_checkpoint_success(global_step: int, time_msec: float | None = None) -> None:
    """Say that a checkpoint is safe; of an asynchronous save at any time later, in any order, from any thread."""
    call = "on_save_checkpoint_success"
    calls.say(call, at=calls.moment_of(time_msec, call), **calls.save_values(global_step))
    RECORDER.flush_soon()


def on_save_checkpoint_end(finish_time_msec: float | None = None) -> None:
    """Say that the saving, as far as it held up the training, ends; a synchronous save without success has failed."""
    kind, values = kinds.CHECKPOINT_SAVE, Hooks.telemetry.ask("is_save_checkpoint_enabled")
    calls.end(kind, kind.end, at=calls.moment_of(finish_time_msec, kind.end), values=values)


if not TYPE_CHECKING:
    __all__ = [name for name in globals() if name.startswith("on_")]
