"""Public training API: blocks, metrics and run metadata.

Used on the job's threads. The body of a block always runs, and its exceptions pass through unchanged. No call raises,
unless the job requests errors, and no call waits for a GPU: a later call collects the value of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from time import monotonic
from typing import Any, TypeVar, final

from exporter.recording.conversion import is_asynchronous, safe_repr, to_attribute, to_scalar
from exporter.recording.tensors import TensorReader
from exporter.recording.timing import AnyFunction, within
from exporter.recording.values import END_REASONS
from exporter.training import kinds
from exporter.training.attributes import Attributes, SpanName
from exporter.training.blocks import (
    EvaluationBlock,
    HotBlock,
    InferredIterationBlock,
    IterationBlock,
    RareBlock,
    phase_block,
)
from exporter.training.loop_values import loop_values
from exporter.training.metrics import LARGEST, amount
from exporter.training.misuse import report
from exporter.training.numbers import MODES
from exporter.training.rare_blocks import moment_now
from exporter.training.recorder import TRAINING
from exporter.training.records import (
    BackgroundEnded,
    Interrupted,
    SaveReported,
    StepSkipped,
)

Item = TypeVar("Item")
Block = HotBlock | RareBlock
MOST_PARAMETERS = 32
"""Further names that `describe` keeps."""


# Shared blocks: creating a block takes as long as entering the block.
_ITERATION = IterationBlock(kinds.TRAINING_ITERATION)
_DATA_LOADING = HotBlock(kinds.DATA_LOADING)
_FORWARD = HotBlock(kinds.MODEL_FORWARD)
_BACKWARD = HotBlock(kinds.MODEL_BACKWARD)
_ZERO_GRAD = HotBlock(kinds.ZERO_GRAD)
_OPTIMIZER = HotBlock(kinds.OPTIMIZER_UPDATE)


# Hot blocks ----------------------------------------------------------------------------------------------------


def training_iteration() -> IterationBlock:
    """Return a block of a training iteration: a step of the optimizer, with all microbatches."""
    return IterationBlock(kinds.TRAINING_ITERATION) if _ITERATION.is_open else _ITERATION


def inferred_iteration() -> IterationBlock:
    """Return a block of an iteration that a bridge has inferred; blocks of the job itself replace it."""
    return InferredIterationBlock(kinds.INFERRED_ITERATION)


def validation_iteration() -> EvaluationBlock:
    """Return a block of a validation batch."""
    return EvaluationBlock(kinds.VALIDATION_ITERATION)


def testing_iteration() -> EvaluationBlock:
    """Return a block of a test batch."""
    return EvaluationBlock(kinds.TESTING_ITERATION)


def data_loading() -> HotBlock:
    """Return a block of waiting for data."""
    return HotBlock(kinds.DATA_LOADING) if _DATA_LOADING.is_open else _DATA_LOADING


def model_forward() -> HotBlock:
    """Return a block of a forward pass."""
    return HotBlock(kinds.MODEL_FORWARD) if _FORWARD.is_open else _FORWARD


def model_backward() -> HotBlock:
    """Return a block of a backward pass."""
    return HotBlock(kinds.MODEL_BACKWARD) if _BACKWARD.is_open else _BACKWARD


def zero_grad() -> HotBlock:
    """Return a block of setting gradients to zero."""
    return HotBlock(kinds.ZERO_GRAD) if _ZERO_GRAD.is_open else _ZERO_GRAD


def optimizer_update() -> HotBlock:
    """Return a block of an optimizer's step."""
    return HotBlock(kinds.OPTIMIZER_UPDATE) if _OPTIMIZER.is_open else _OPTIMIZER


def phase(name: str) -> Block:
    """Return a block of a phase by name in `training_phase_seconds_total`; an unknown name is misuse and becomes a span."""
    return phase_block(name)


def batches(loader: Iterable[Item]) -> Iterator[Item]:
    """Iterate over a loader; the time spent waiting for each batch counts as `data_loading`."""
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
    """Return a block of the whole job."""
    return RareBlock(kinds.APPLICATION)


def distributed_init() -> RareBlock:
    """Return a block of the rendezvous of the ranks."""
    return RareBlock(kinds.DISTRIBUTED_INIT)


def model_init() -> RareBlock:
    """Return a block of the construction of the model."""
    return RareBlock(kinds.MODEL_INIT)


def dataloader_init() -> RareBlock:
    """Return a block of the construction of the data loaders."""
    return RareBlock(kinds.DATALOADER_INIT)


def optimizer_init() -> RareBlock:
    """Return a block of the construction of the optimizer."""
    return RareBlock(kinds.OPTIMIZER_INIT)


def checkpoint_load() -> RareBlock:
    """Return a block of loading a checkpoint."""
    return RareBlock(kinds.CHECKPOINT_LOAD)


def validation_loop() -> RareBlock:
    """Return a block of a validation."""
    return RareBlock(kinds.VALIDATION_LOOP)


def testing_loop() -> RareBlock:
    """Return a block of a test."""
    return RareBlock(kinds.TESTING_LOOP)


def training_loop(
    train_iterations_start: int,
    train_samples_start: int | None = None,
    train_iterations_target_or_fn: int | Callable[[], int] | None = None,
    train_samples_target_or_fn: int | Callable[[], int] | None = None,
) -> RareBlock:
    """Return a block of a training loop.

    Args:
        train_iterations_start: Steps before this loop, such as those of a restored checkpoint.
        train_samples_start: Samples before this loop; None for steps times the global batch size.
        train_iterations_target_or_fn: The step at which the loop is to end; None for the configured one.
        train_samples_target_or_fn: The same in samples.
    """
    targets = (train_iterations_target_or_fn, train_samples_target_or_fn)
    given = (train_iterations_start, train_samples_start, *targets)
    return RareBlock(kinds.TRAINING_LOOP, lambda: loop_values("training_loop", *given))


def inferred_loop(start: int, samples: int | None = None, target: int | None = None) -> RareBlock:
    """Return a block of a loop that a bridge has inferred; blocks of the job itself replace it."""
    return RareBlock(kinds.INFERRED_LOOP, lambda: loop_values("training_loop", start, samples, target, None))


def checkpoint_save(global_step: int) -> RareBlock:
    """Return a block in which a step is saved; a block that ends in order is a success, if saves are synchronous."""
    return RareBlock(kinds.CHECKPOINT_SAVE, lambda: {"global_step": to_scalar(global_step)})


def span(
    name: SpanName,
    span_attributes: Attributes | Mapping[str, Any] | None = None,
    start_event_attributes: Attributes | None = None,
    **attributes: Any,
) -> RareBlock:
    """Return a block of any name; the name of a phase counts as that phase, any other as the phase around it."""
    given = Attributes(attributes)
    given.add_attributes(Attributes.of(span_attributes))
    kind = kinds.named_kind(name, phase=False)
    return RareBlock(
        kind, span_name=name, span_attributes=given, start_event_attributes=start_event_attributes
    )


@final
class background:  # noqa: N801  # called like a function
    """Block of background work on any thread, such as `checkpoint_upload`; belongs to no phase."""

    __slots__ = ("_began", "_task")

    def __init__(self, task: str) -> None:
        self._task = to_scalar(task)
        self._began = 0.0

    def __enter__(self) -> background:
        self._began = monotonic()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        TRAINING.append(BackgroundEnded(self._task, max(monotonic() - self._began, 0.0)))
        TRAINING.start_recording()

    def __call__(self, function: AnyFunction) -> AnyFunction:
        """Decorate a function: each call is a block."""
        return within(lambda: background(self._task), function)  # type: ignore[arg-type]  # converted again


# Numbers -------------------------------------------------------------------------------------------------------

_TRAIN = "train"
_numbers = TRAINING.numbers
_readers: dict[tuple[str, str], TensorReader] = {}


def record(
    *,
    loss: Any = None,
    grad_norm: Any = None,
    learning_rate: float | None = None,
    loss_scale: Any = None,
    samples: float | None = None,
    tokens: float | None = None,
    microbatches: int | None = None,
    epoch: int | None = None,
    mode: str = _TRAIN,
    **unknown: object,
) -> None:
    """Record numbers of the present step; never waits, never raises. A Stat records any other number.

    A number may be a tensor or an array of a single element; a later call collects the value. Samples and tokens are
    the share of this rank: 0 on ranks that compute the same again. The mode is train, validation or test.
    """
    numbers = _numbers
    modal = numbers.train if mode is _TRAIN else numbers.modes.get(mode) if type(mode) is str else None
    if modal is None:
        report("record", "mode", f"mode to be one of {', '.join(MODES)}, not {safe_repr(mode)}")
        return
    if unknown:
        _refuse("record", unknown)
    if not numbers.is_used:
        TRAINING.start_recording()
    # Fast path for plain floats; `x - x` is 0 for finite numbers only.
    if loss is not None:
        if type(loss) is float and loss - loss == 0.0 and modal.loss is not None:
            modal.loss = loss
        else:
            _take("loss", mode, loss)
    if tokens is not None:
        if type(tokens) is int and 0 <= tokens < LARGEST and modal.tokens:
            modal.tokens += tokens
        else:
            _take("tokens", mode, tokens)
    if grad_norm is not None:
        if type(grad_norm) is float and grad_norm - grad_norm == 0.0 and numbers.grad_norm is not None:
            numbers.grad_norm = grad_norm
        else:
            _take("grad_norm", mode, grad_norm)
    if samples is not None:
        if type(samples) is int and 0 <= samples < LARGEST and modal.samples:
            modal.samples += samples
        else:
            _take("samples", mode, samples)
    if learning_rate is not None:
        _take("learning_rate", mode, learning_rate)
    if loss_scale is not None:
        _take("loss_scale", mode, loss_scale)
    if microbatches is not None:
        _take("microbatches", mode, microbatches)
    if epoch is not None:
        _take("epoch", mode, epoch)


def _refuse(call: str, names: Mapping[str, object]) -> None:
    """Report names that are unknown; a Stat records such numbers."""
    report(call, "name", f"none of {', '.join(sorted(names))}, which are for a Stat of the job's own"[:200])


def _take(field: str, mode: str, value: object) -> None:
    if not TRAINING.is_on:
        return
    if type(value) is not float and type(value) is not int:
        if is_asynchronous(value):
            _take_tensor(field, mode, value)
            return
        value = to_scalar(value)
    wrong = _numbers.take(field, mode, value)
    if wrong is not None:
        report("record", field, f"{field} {wrong}, not {safe_repr(value)}")


def _take_tensor(field: str, mode: str, value: object) -> None:
    reader = _readers.get((field, mode))
    if reader is None:
        add, refuse = partial(_take, field, mode), partial(_refused, field)
        reader = _readers.setdefault((field, mode), TensorReader(add, refuse))
    reader.add(value)


def _refused(field: str, reason: str) -> None:
    expected = f"{field} to be a number, or a tensor of one element that can be copied"
    report("record", f"tensor_{reason}", expected)


def collect_tensors() -> None:
    """Collect the values of this thread's tensors that are ready; never raises."""
    for (field, _), reader in list(_readers.items()):
        try:
            reader.collect()
        except Exception:  # noqa: BLE001, PERF203  # any error of CUDA
            _refused(field, "error")


def forget_tensors() -> None:
    """Forget the tensors in flight, in a forked child."""
    for reader in _readers.values():
        reader.after_fork()


TRAINING.on_collect(collect_tensors, forget_tensors)


# Facts ---------------------------------------------------------------------------------------------------------


def describe(
    *,
    job_name: str | None = None,
    framework: str | None = None,
    framework_version: str | None = None,
    model: str | None = None,
    precision: str | None = None,
    flops_method: str | None = None,
    flops_per_token: float | None = None,
    hardware_flops_per_token: float | None = None,
    flops_per_sample: float | None = None,
    peak_flops: float | None = None,
    step_target: int | None = None,
    world_size: int | None = None,
    **unknown: object,
) -> None:
    """Record facts about the run; facts that are not given stay as they are.

    `precision` is the row of the peak table, such as `bf16`, `fp16`, `fp8` or `tf32`; `peak_flops`, in FLOP/s of this rank's
    device, replaces the table. `flops_per_token` and `flops_per_sample` are the model's, forward and backward;
    `hardware_flops_per_token` includes recomputation. `flops_method` names the method by which the FLOP were found.
    Up to 32 further names become data of the event `training.begin`.
    """
    given = {
        name: to_scalar(value) for name, value in locals().items() if value is not None and name != "unknown"
    }
    if given:
        TRAINING.describe(given)
    if unknown:
        more = {name[:100]: to_attribute(value) for name, value in list(unknown.items())[:MOST_PARAMETERS]}
        TRAINING.describe({}, more)


def skipped_step(reason: str) -> None:
    """Record that the present step did not change the model, because of `overflow` or `nonfinite`."""
    TRAINING.append(StepSkipped(to_scalar(reason)))
    TRAINING.start_recording()


def interruption(reason: str) -> None:
    """Record the reason why the process is about to exit, as in `training_interruptions_total`."""
    given = to_scalar(reason)
    if type(given) is str and given in END_REASONS:
        TRAINING.append(Interrupted(given))
        TRAINING.start_recording()
    else:
        report("interruption", "reason", f"one of {', '.join(END_REASONS)}, not {safe_repr(given)}")


def checkpoint_saved(
    step: int,
    *,
    kind: str = "sync",
    ok: bool = True,
    seconds: float | None = None,
    bytes: int | None = None,
    blocking_seconds: float | None = None,
) -> None:
    """Record a save that is over, for frameworks that report no begin.

    Args:
        step: The step that was saved.
        kind: sync, async or local.
        ok: True if the save succeeded.
        seconds: The time until the save was safe.
        bytes: The size of the checkpoint.
        blocking_seconds: The part of the time in which the save blocked the training.
    """
    now = moment_now()
    save = SaveReported(
        step=to_scalar(step),
        kind=to_scalar(kind),
        ok=to_scalar(ok),
        seconds=to_scalar(seconds),
        blocking_seconds=to_scalar(blocking_seconds),
        bytes=to_scalar(bytes),
        at=now.perf_counter_seconds,
        wall=now.seconds_since_epoch,
    )
    TRAINING.append(save)
    TRAINING.start_recording()
    TRAINING.publish_soon()


def step(step: int | None = None, *, seconds: float | None = None, mode: str = _TRAIN) -> None:
    """Record a step that has just completed, for code without blocks.

    Args:
        step: The number of completed steps, including this step; None for one more than before.
        seconds: The duration of the step; None for the time since the previous step.
        mode: train, validation or test.
    """
    number, duration, kind = to_scalar(step), to_scalar(seconds), to_scalar(mode)
    if type(kind) is not str or kind not in MODES:
        report("step", "mode", f"mode to be one of {', '.join(MODES)}, not {safe_repr(kind)}")
    elif number is not None and (type(number) is not int or amount(number) is None):
        report("step", "value", f"step of 0 or more, not {safe_repr(number)}")
    elif duration is not None and amount(duration, 1e9) is None:
        report("step", "value", f"seconds of 0 or more, not {safe_repr(duration)}")
    else:
        whole = number if type(number) is int else None
        TRAINING.report_step(whole, amount(duration, 1e9), kind)
