"""Callbacks: the job's work told by pairs of calls, for code that has no place for a block; one-logger's 25.

Used in the training process. Each says that something begins or ends now, or at a time that is given in milliseconds
since the epoch; a time that lies ahead is taken as now, one in the past as it is, however old. Those that begin give
the span, which can be given attributes and events. None raises, unless the job chose to have misuse raised. The pairs are
made from the rows of `exporter.training.span_kinds`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from exporter.training import buffers, calls
from exporter.training import span_kinds as kinds
from exporter.training.buffers import Handle, Hooks
from exporter.training.span_kinds import BEGIN, END, STEPS, VALUES, Kind
from exporter.training.spans import Span


class Start(Protocol):
    """A callback that says that something begins."""

    def __call__(self, start_time_msec: float | None = None) -> Any:
        """Give its span."""


class Finish(Protocol):
    """A callback that says that something ends."""

    def __call__(self, finish_time_msec: float | None = None) -> None:
        """Say so."""


def _pair(kind: Kind) -> tuple[Start, Finish]:
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
    """Say that a training loop begins.

    Args:
        train_iterations_start: Steps that the job has done before, such as those of the checkpoint it resumes.
        train_samples_start: Samples that it has trained on before; None for steps times the global batch size.
        train_iterations_target_or_fn: The step at which it is to end; None for what was configured.
        train_samples_target_or_fn: The same in samples.
        start_time_msec: When; None for now.
    """
    call = kinds.TRAINING_LOOP.begin
    values = calls.loop_values(
        call,
        train_iterations_start,
        train_samples_start,
        train_iterations_target_or_fn,
        train_samples_target_or_fn,
    )
    return calls.begin(kinds.TRAINING_LOOP, call, at=calls.moment_of(start_time_msec, call), values=values)


def on_save_checkpoint_start(global_step: int, start_time_msec: float | None = None) -> Span:
    """Say that the saving of a checkpoint begins.

    Args:
        global_step: The step that is saved.
        start_time_msec: When; None for now.
    """
    kind, call, values = kinds.CHECKPOINT_SAVE, kinds.CHECKPOINT_SAVE.begin, calls.save_values(global_step)
    at = calls.moment_of(start_time_msec, call)
    return calls.begin(kind, call, at=at, name=calls.save_name(values), values=values)


def on_save_checkpoint_success(global_step: int, time_msec: float | None = None) -> None:
    """Say that a checkpoint is safe; of an asynchronous save at any time later, in any order, from any thread.

    Args:
        global_step: The step that the save was begun with.
        time_msec: When; None for now.
    """
    call = "on_save_checkpoint_success"
    calls.say(call, at=calls.moment_of(time_msec, call), **calls.save_values(global_step))
    Hooks.flush_soon()


def on_save_checkpoint_end(finish_time_msec: float | None = None) -> None:
    """Say that the saving, as far as it held up the training, ends; a synchronous save without success has failed."""
    kind, call = kinds.CHECKPOINT_SAVE, kinds.CHECKPOINT_SAVE.end
    at, values = calls.moment_of(finish_time_msec, call), Hooks.telemetry.ask("is_save_checkpoint_enabled")
    calls.end(kind, call, at=at, values=values)
