"""Public training API: blocks.

A block measures an activity of the job, such as a forward pass or a save. It is a context manager for the code of the activity, and
a decorator for a function that performs the activity. A *hot* block is entered in each step; all other blocks are *rare*.

A block never suppresses an exception of its body. An invalid value of an argument raises nothing, and is usually counted as misuse. The
only exception: the iteration over `batches` raises TypeError for an object that is not iterable.

In a job that configures one-logger with PROPAGATE_EXCEPTIONS, misuse may raise OneLoggerError. A block whose entry raises does not
run its body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from threading import get_ident
from time import monotonic
from typing import Any, TypeVar, final

from exporter.recording.conversion import to_scalar
from exporter.recording.timing import AnyFunction, within
from exporter.training import kinds
from exporter.training.attributes import Attributes, SpanName
from exporter.training.blocks import EvaluationBlock, HotBlock
from exporter.training.iterations import InferredIterationBlock, IterationBlock
from exporter.training.loop_values import loop_values
from exporter.training.rare_blocks import RareBlock
from exporter.training.recorder import TRAINING
from exporter.training.records import BackgroundEnded

Item = TypeVar("Item")
Block = HotBlock | RareBlock

_CLOCK = TRAINING.clock
# Blocks of the main thread, which is the first thread that enters a block. They are reused while they are not open, because creating a
# block takes as long as entering it. Other threads get a new block for each call, because two threads that enter the same block would
# overwrite its state.
_ITERATION = IterationBlock(kinds.TRAINING_ITERATION)
_DATA_LOADING = HotBlock(kinds.DATA_LOADING)
_FORWARD = HotBlock(kinds.MODEL_FORWARD)
_BACKWARD = HotBlock(kinds.MODEL_BACKWARD)
_ZERO_GRAD = HotBlock(kinds.ZERO_GRAD)
_OPTIMIZER = HotBlock(kinds.OPTIMIZER_UPDATE)


# Hot blocks ----------------------------------------------------------------------------------------------------


def training_iteration() -> IterationBlock:
    """Return a block for a training iteration: a step of the optimizer with all its microbatches.

    An iteration that ends without an exception counts as a step, also if the job leaves the block with `break`. Fetch a batch that may
    be missing outside of the block, as `batches` does.
    """
    is_reusable = get_ident() == _CLOCK.thread and not _ITERATION.is_open
    return _ITERATION if is_reusable else IterationBlock(kinds.TRAINING_ITERATION)


def inferred_iteration() -> IterationBlock:
    """Return a block for an iteration that a bridge infers. The job's own blocks replace inferred blocks."""
    return InferredIterationBlock(kinds.INFERRED_ITERATION)


def validation_iteration() -> EvaluationBlock:
    """Return a block for a batch of a validation."""
    return EvaluationBlock(kinds.VALIDATION_ITERATION)


def testing_iteration() -> EvaluationBlock:
    """Return a block for a batch of a test."""
    return EvaluationBlock(kinds.TESTING_ITERATION)


def data_loading() -> HotBlock:
    """Return a block for the wait for a batch."""
    is_reusable = get_ident() == _CLOCK.thread and not _DATA_LOADING.is_open
    return _DATA_LOADING if is_reusable else HotBlock(kinds.DATA_LOADING)


def model_forward() -> HotBlock:
    """Return a block for a forward pass."""
    is_reusable = get_ident() == _CLOCK.thread and not _FORWARD.is_open
    return _FORWARD if is_reusable else HotBlock(kinds.MODEL_FORWARD)


def model_backward() -> HotBlock:
    """Return a block for a backward pass."""
    is_reusable = get_ident() == _CLOCK.thread and not _BACKWARD.is_open
    return _BACKWARD if is_reusable else HotBlock(kinds.MODEL_BACKWARD)


def zero_grad() -> HotBlock:
    """Return a block for setting the gradients to zero."""
    is_reusable = get_ident() == _CLOCK.thread and not _ZERO_GRAD.is_open
    return _ZERO_GRAD if is_reusable else HotBlock(kinds.ZERO_GRAD)


def optimizer_update() -> HotBlock:
    """Return a block for the update of the parameters by the optimizer."""
    is_reusable = get_ident() == _CLOCK.thread and not _OPTIMIZER.is_open
    return _OPTIMIZER if is_reusable else HotBlock(kinds.OPTIMIZER_UPDATE)


def phase(name: str) -> Block:
    """Return a block for a phase. *name* is a value of the label `phase` of `training_phase_seconds_total`, such as `compile`.

    An unknown name is counted as misuse. The result is then a span with this name, whose time counts for the surrounding phase.
    """
    kind = kinds.named_kind(name, is_phase=True)
    return RareBlock(kind) if kind.phase is None else HotBlock(kind)


def batches(loader: Iterable[Item]) -> Iterator[Item]:
    """Iterate over a loader. The time spent waiting for a batch counts as `data_loading`."""
    iterator = iter(loader)
    while True:
        with data_loading():
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


# Rare blocks ---------------------------------------------------------------------------------------------------


def application() -> RareBlock:
    """Return a block for the whole job."""
    return RareBlock(kinds.APPLICATION)


def distributed_init() -> RareBlock:
    """Return a block for the rendezvous of the ranks."""
    return RareBlock(kinds.DISTRIBUTED_INIT)


def model_init() -> RareBlock:
    """Return a block for the construction of the model."""
    return RareBlock(kinds.MODEL_INIT)


def dataloader_init() -> RareBlock:
    """Return a block for the construction of the data loaders."""
    return RareBlock(kinds.DATALOADER_INIT)


def optimizer_init() -> RareBlock:
    """Return a block for the construction of the optimizer."""
    return RareBlock(kinds.OPTIMIZER_INIT)


def checkpoint_load() -> RareBlock:
    """Return a block for loading a checkpoint."""
    return RareBlock(kinds.CHECKPOINT_LOAD)


def validation_loop() -> RareBlock:
    """Return a block for a validation."""
    return RareBlock(kinds.VALIDATION_LOOP)


def testing_loop() -> RareBlock:
    """Return a block for a test."""
    return RareBlock(kinds.TESTING_LOOP)


def training_loop(
    train_iterations_start: int,
    train_samples_start: int | None = None,
    train_iterations_target_or_fn: int | Callable[[], int] | None = None,
    train_samples_target_or_fn: int | Callable[[], int] | None = None,
) -> RareBlock:
    """Return a block for a training loop.

    Args:
        train_iterations_start: Number of steps before this loop, such as the steps of a restored checkpoint.
        train_samples_start: Number of samples before this loop; None for the steps times the global batch size. Exported only
            in jobs that configure one-logger.
        train_iterations_target_or_fn: Step at which the loop is expected to end; None for the configured target.
        train_samples_target_or_fn: Number of samples at which the loop is expected to end; None for the configured target. Exported only in
            jobs that configure one-logger.
    """
    targets = (train_iterations_target_or_fn, train_samples_target_or_fn)
    arguments = (train_iterations_start, train_samples_start, *targets)
    return RareBlock(kinds.TRAINING_LOOP, lambda: loop_values("training_loop", *arguments))


def inferred_loop(start: int, samples: int | None = None, target: int | None = None) -> RareBlock:
    """Return a block for a loop that a bridge infers. The job's own blocks replace inferred blocks.

    Args:
        start: Number of steps before this loop.
        samples: Number of samples before this loop; None for the steps times the global batch size. Exported only
            in jobs that configure one-logger.
        target: Step at which the loop is expected to end; None for the configured target.
    """
    return RareBlock(kinds.INFERRED_LOOP, lambda: loop_values("training_loop", start, samples, target, None))


def checkpoint_save(global_step: int) -> RareBlock:
    """Return a block for saving the checkpoint of a step. A synchronous save succeeds if the block ends without an exception."""
    return RareBlock(kinds.CHECKPOINT_SAVE, lambda: {"global_step": to_scalar(global_step)})


def span(
    name: SpanName,
    span_attributes: Attributes | Mapping[str, Any] | None = None,
    start_event_attributes: Attributes | None = None,
    **attributes: Any,
) -> RareBlock:
    """Return a block for an activity with a name of the job's choice.

    The time counts for the phase with that name, if there is one. The names `model_forward`, `model_backward` and `optimizer_update` count
    for `forward`, `backward` and `optimizer`. The time of a block with any other name counts for the surrounding phase.

    Args:
        name: Name of the span.
        span_attributes: Attributes of the span, which replace `attributes` of the same name.
        start_event_attributes: Attributes of the start event of the span.
        **attributes: Further attributes of the span.
    """
    merged_attributes = Attributes(attributes)
    merged_attributes.add_attributes(Attributes.of(span_attributes))
    kind = kinds.named_kind(name, is_phase=False)
    return RareBlock(
        kind, span_name=name, span_attributes=merged_attributes, start_event_attributes=start_event_attributes
    )


@final
class background:  # noqa: N801  # called like a function
    """Block for background work on any thread, such as `checkpoint_upload`. Its time belongs to no phase."""

    __slots__ = ("_began", "_task")

    def __init__(self, task: str) -> None:
        self._task = to_scalar(task)
        self._began = 0.0

    def __enter__(self) -> background:
        self._began = monotonic()
        return self

    def __exit__(self, error_type: object, error: object, traceback: object) -> None:
        TRAINING.append(BackgroundEnded(self._task, max(monotonic() - self._began, 0.0)))
        TRAINING.start_recording()

    def __call__(self, function: AnyFunction) -> AnyFunction:
        """Decorate a function: each call is a block."""
        return within(lambda: background(self._task), function)  # type: ignore[arg-type]  # __init__ accepts any object
