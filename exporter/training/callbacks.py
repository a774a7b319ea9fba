"""Callbacks: the job's work told by pairs of calls, for code that has no place for a block; one-logger's 25.

Used in the training process. Each says that something begins or ends now, or at a time that is given in milliseconds
since the epoch; a time that lies ahead is taken as now, one in the past as it is, however old. Those that begin give
the span, which can be given attributes and events. None raises, unless the job chose to have misuse raised.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from exporter.training import calls, hot, kinds
from exporter.training.hot import Hot
from exporter.training.kinds import BEGIN, END, VALUES, Kind
from exporter.training.spans import Span


def _begin(kind: Kind, start_time_msec: float | None) -> Span:
    return calls.begin(kind, kind.begin, at=calls.moment(start_time_msec, kind.begin))


def _end(kind: Kind, finish_time_msec: float | None) -> None:
    calls.end(kind, kind.end, at=calls.moment(finish_time_msec, kind.end))


def _begin_short(kind: Kind, start_time_msec: float | None) -> Hot | Span:
    if start_time_msec is not None:
        return _begin(kind, start_time_msec)
    place = hot.here()
    place.say(kind.code + BEGIN, monotonic())
    _settle_misuse(place)
    handle: Hot = place.block(kind)
    return handle


def _end_short(kind: Kind, finish_time_msec: float | None) -> None:
    place = hot.here()
    if kind is kinds.TRAINING_ITERATION and hot.Hooks.values is not None:
        place.extend((VALUES, hot.Hooks.values()))
    if finish_time_msec is not None:
        _end(kind, finish_time_msec)
    else:
        place.say(kind.code + END, monotonic())
        _settle_misuse(place)


def _settle_misuse(place: object) -> None:
    if hot.limit < 0:
        hot.Hooks.full(place.track, False)  # type: ignore[attr-defined]  # nothing is failing


def on_app_start(start_time_msec: float | None = None) -> Span:
    """Say that the application begins; after the end of one, another job."""
    return calls.begin(
        kinds.APPLICATION,
        "on_app_start",
        at=calls.moment(start_time_msec, "on_app_start"),
        values=calls.application_values(),
    )


def on_app_end(finish_time_msec: float | None = None) -> None:
    """Say that the application ends; what is still open is closed."""
    _end(kinds.APPLICATION, finish_time_msec)


def on_distributed_init_start(start_time_msec: float | None = None) -> Span:
    """Say that the initialisation of the distributed runtime begins."""
    return _begin(kinds.DISTRIBUTED_INIT, start_time_msec)


def on_distributed_init_end(finish_time_msec: float | None = None) -> None:
    """Say that the initialisation of the distributed runtime ends."""
    _end(kinds.DISTRIBUTED_INIT, finish_time_msec)


def on_model_init_start(start_time_msec: float | None = None) -> Span:
    """Say that the making of the model begins."""
    return _begin(kinds.MODEL_INIT, start_time_msec)


def on_model_init_end(finish_time_msec: float | None = None) -> None:
    """Say that the making of the model ends."""
    _end(kinds.MODEL_INIT, finish_time_msec)


def on_dataloader_init_start(start_time_msec: float | None = None) -> Span:
    """Say that the making of the data loaders begins."""
    return _begin(kinds.DATALOADER_INIT, start_time_msec)


def on_dataloader_init_end(finish_time_msec: float | None = None) -> None:
    """Say that the making of the data loaders ends."""
    _end(kinds.DATALOADER_INIT, finish_time_msec)


def on_load_checkpoint_start(start_time_msec: float | None = None) -> Span:
    """Say that the loading of a checkpoint begins."""
    return _begin(kinds.CHECKPOINT_LOAD, start_time_msec)


def on_load_checkpoint_end(finish_time_msec: float | None = None) -> None:
    """Say that the loading of a checkpoint ends."""
    _end(kinds.CHECKPOINT_LOAD, finish_time_msec)


def on_optimizer_init_start(start_time_msec: float | None = None) -> Span:
    """Say that the making of the optimizer begins."""
    return _begin(kinds.OPTIMIZER_INIT, start_time_msec)


def on_optimizer_init_end(finish_time_msec: float | None = None) -> None:
    """Say that the making of the optimizer ends."""
    _end(kinds.OPTIMIZER_INIT, finish_time_msec)


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
    return calls.begin(
        kinds.TRAINING_LOOP,
        "on_train_start",
        at=calls.moment(start_time_msec, "on_train_start"),
        values=calls.loop_values(
            "on_train_start",
            train_iterations_start,
            train_samples_start,
            train_iterations_target_or_fn,
            train_samples_target_or_fn,
        ),
    )


def on_train_end(finish_time_msec: float | None = None) -> None:
    """Say that the training loop ends."""
    _end(kinds.TRAINING_LOOP, finish_time_msec)


def on_training_single_iteration_start(start_time_msec: float | None = None) -> Hot | Span:
    """Say that a training iteration begins."""
    return _begin_short(kinds.TRAINING_ITERATION, start_time_msec)


def on_training_single_iteration_end(finish_time_msec: float | None = None) -> None:
    """Say that the training iteration ends."""
    _end_short(kinds.TRAINING_ITERATION, finish_time_msec)


def on_validation_start(start_time_msec: float | None = None) -> Span:
    """Say that a validation begins."""
    return _begin(kinds.VALIDATION_LOOP, start_time_msec)


def on_validation_end(finish_time_msec: float | None = None) -> None:
    """Say that the validation ends."""
    _end(kinds.VALIDATION_LOOP, finish_time_msec)


def on_validation_single_iteration_start(start_time_msec: float | None = None) -> Hot | Span:
    """Say that a batch of a validation begins."""
    return _begin_short(kinds.VALIDATION_ITERATION, start_time_msec)


def on_validation_single_iteration_end(finish_time_msec: float | None = None) -> None:
    """Say that the batch of the validation ends."""
    _end_short(kinds.VALIDATION_ITERATION, finish_time_msec)


def on_testing_start(start_time_msec: float | None = None) -> Span:
    """Say that a test begins."""
    return _begin(kinds.TESTING_LOOP, start_time_msec)


def on_testing_end(finish_time_msec: float | None = None) -> None:
    """Say that the test ends."""
    _end(kinds.TESTING_LOOP, finish_time_msec)


def on_save_checkpoint_start(global_step: int, start_time_msec: float | None = None) -> Span:
    """Say that the saving of a checkpoint begins.

    Args:
        global_step: The step that is saved.
        start_time_msec: When; None for now.
    """
    return calls.begin(
        kinds.CHECKPOINT_SAVE,
        "on_save_checkpoint_start",
        at=calls.moment(start_time_msec, "on_save_checkpoint_start"),
        name=kinds.SAVE_NAMES[calls.save_strategy()],
        values=calls.save_values(global_step),
    )


def on_save_checkpoint_success(global_step: int, time_msec: float | None = None) -> None:
    """Say that a checkpoint is safe; of an asynchronous save at any time later, in any order, from any thread.

    Args:
        global_step: The step that the save was begun with.
        time_msec: When; None for now.
    """
    calls.say(
        "on_save_checkpoint_success",
        at=calls.moment(time_msec, "on_save_checkpoint_success"),
        **calls.save_values(global_step),
    )


def on_save_checkpoint_end(finish_time_msec: float | None = None) -> None:
    """Say that the saving, as far as it held up the training, ends; a synchronous save without success has failed."""
    calls.end(
        kinds.CHECKPOINT_SAVE,
        "on_save_checkpoint_end",
        at=calls.moment(finish_time_msec, "on_save_checkpoint_end"),
        values=calls.asked("is_save_checkpoint_enabled"),
    )
