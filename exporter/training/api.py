"""What a job tells of its training: its work as blocks, its numbers, and what else it says of itself.

Used on the job's threads. A block's body always runs, and what it raises always comes out again; nothing here raises,
unless the job chose it, and a tensor on a GPU is never waited for: its value arrives with a later call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar, final

from exporter.errors import OneLoggerError
from exporter.recording.recorder import RECORDER
from exporter.recording.tensors import TensorReader
from exporter.recording.timing import AnyFunction, within
from exporter.recording.values import END_REASONS
from exporter.training import buffers, calls
from exporter.training import span_kinds as kinds
from exporter.training.attributes import Attributes, SpanName, is_tensor, shown, taken
from exporter.training.buffers import Handle, Hooks, handle_of
from exporter.training.metrics import report
from exporter.training.recording import TRAINING as _TRAINING  # noqa: F401  # the process's recording begins with it
from exporter.training.span_kinds import FIELDS, MODES, NUMBERS, Kind, kind_named
from exporter.training.spans import Span

Item = TypeVar("Item")


# Short blocks ---------------------------------------------------------------------------------------------


def _named(kind: Kind, make: AnyFunction) -> AnyFunction:
    """Name a function that makes the blocks of a kind."""
    make.__name__ = make.__qualname__ = kind.call
    make.__doc__ = f"Make a block of {kind.doc}."
    return make


def _short(kind: Kind) -> Callable[[], Handle]:
    """Make the function that gives the block of a kind that is entered many times a second."""
    return _named(kind, lambda: buffers.place.handles[kind])


def training_iteration() -> Handle:
    """Make a block of one training iteration: one step of the optimizer, all its micro-batches included."""
    if buffers.in_task():
        buffers.look_for_tasks()
    return buffers.place.handles[kinds.TRAINING_ITERATION]  # type: ignore[no-any-return]  # a handle


validation_iteration = _short(kinds.VALIDATION_ITERATION)
testing_iteration = _short(kinds.TESTING_ITERATION)
data_loading = _short(kinds.DATA_LOADING)
model_forward = _short(kinds.MODEL_FORWARD)
model_backward = _short(kinds.MODEL_BACKWARD)
zero_grad = _short(kinds.ZERO_GRAD)
optimizer_update = _short(kinds.OPTIMIZER_UPDATE)


def phase(name: str) -> Handle:
    """Make a block of a phase, by its name in `training_phase_seconds_total`; by another it is a span, and misuse."""
    return handle_of(kind_named(name, phase=True))


def guessed_iteration() -> Handle:
    """Make a block of an iteration that a bridge has concluded; what the job tells itself takes its place."""
    return handle_of(kinds.GUESSED_ITERATION)


def batches(loader: Iterable[Item]) -> Iterator[Item]:
    """Iterate over a loader; the time that each batch is waited for counts as `data_loading`."""
    iterator = iter(loader)
    while True:
        with data_loading():
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


# Rare blocks ----------------------------------------------------------------------------------------------


class _Block:
    """A block that is entered rarely: entering it gives its span; `values` gives what is to be told then."""

    __slots__ = ("kind", "span", "_make", "_values")

    def __init__(self, kind: Kind, values: Callable[[], dict[str, Any]] | None = None, **make: Any) -> None:
        self.kind = kind
        self.span: Span | None = None
        self._values = values
        self._make = make

    def __enter__(self) -> Span:
        make = self._make
        if self._values is not None:
            make = make | {"values": self._values()}
            if self.kind is kinds.CHECKPOINT_SAVE:
                make["name"] = calls.save_name(make["values"])
        try:
            self.span = calls.begin(self.kind, self.kind.call, entered=True, **make)
        except OneLoggerError as error:  # the body does not run, so nobody leaves the block
            calls.end(self.kind, self.kind.call, entered=True, exception=error)
            raise
        return self.span

    def __exit__(
        self, kind: type[BaseException] | None, exception: BaseException | None, traceback: object
    ) -> None:
        calls.end(self.kind, self.kind.call, span=self.span, entered=True, exception=exception)

    def __call__(self, function: AnyFunction) -> AnyFunction:
        """Decorate a function, a coroutine function or a generator function: each call is one block."""
        return within(lambda: _Block(self.kind, self._values, **self._make), function)


def _rare(kind: Kind, values: Callable[[], dict[str, Any]] | None = None) -> Callable[[], _Block]:
    """Make the function that gives the block of a kind."""
    return _named(kind, lambda: _Block(kind, values))


application = _rare(kinds.APPLICATION, lambda: Hooks.telemetry.ask_application())  # noqa: PLW0108  # at that time
distributed_init = _rare(kinds.DISTRIBUTED_INIT)
model_init = _rare(kinds.MODEL_INIT)
dataloader_init = _rare(kinds.DATALOADER_INIT)
optimizer_init = _rare(kinds.OPTIMIZER_INIT)
checkpoint_load = _rare(kinds.CHECKPOINT_LOAD)
validation_loop = _rare(kinds.VALIDATION_LOOP)
testing_loop = _rare(kinds.TESTING_LOOP)


def training_loop(
    train_iterations_start: int,
    train_samples_start: int | None = None,
    train_iterations_target_or_fn: int | Callable[[], int] | None = None,
    train_samples_target_or_fn: int | Callable[[], int] | None = None,
) -> _Block:
    """Make a block of a training loop.

    Args:
        train_iterations_start: Steps that the job has done before, such as those of the checkpoint it resumes.
        train_samples_start: Samples that it has trained on before; None for steps times the global batch size.
        train_iterations_target_or_fn: The step at which it is to end; None for what was configured.
        train_samples_target_or_fn: The same in samples.
    """
    targets = (train_iterations_target_or_fn, train_samples_target_or_fn)
    given = (train_iterations_start, train_samples_start, *targets)
    return _Block(kinds.TRAINING_LOOP, lambda: calls.loop_values("training_loop", *given))


def guessed_loop(start: int, samples: int | None = None, target: int | None = None) -> _Block:
    """Make a block of a loop that a bridge has concluded; what the job tells itself takes its place."""
    given = (start, samples, target, None)
    return _Block(kinds.GUESSED_LOOP, lambda: calls.loop_values("training_loop", *given))


def checkpoint_save(global_step: int) -> _Block:
    """Make a block in which a step is saved; left in order it is a success, where saves are synchronous."""
    return _Block(kinds.CHECKPOINT_SAVE, lambda: calls.save_values(global_step))


def span(
    name: SpanName,
    span_attributes: Attributes | Mapping[str, Any] | None = None,
    start_event_attributes: Attributes | None = None,
    **attributes: Any,
) -> _Block:
    """Make a block of any name; one that is a phase counts as that phase, any other as the phase around it."""
    given = Attributes(attributes)
    given.add_attributes(Attributes.of(span_attributes))
    kind = kind_named(name, phase=False)
    return _Block(kind, name=name, span_attributes=given, start_event_attributes=start_event_attributes)


@final
class background:  # noqa: N801  # it is called like a function
    """A block of work beside the training, on any thread: `checkpoint_upload`, `prefetch` … It is in no phase."""

    __slots__ = ("_began", "_task")

    def __init__(self, task: str) -> None:
        self._task = task
        self._began = 0.0

    def __enter__(self) -> background:
        self._began = monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, exception: object, traceback: object) -> None:
        calls.say("background", task=taken(self._task), seconds=max(monotonic() - self._began, 0.0))

    def __call__(self, function: AnyFunction) -> AnyFunction:
        """Decorate a function: each call is one block."""
        return within(lambda: background(self._task), function)


# Numbers --------------------------------------------------------------------------------------------------

_MODES = {mode: NUMBERS + 8 * place for place, mode in enumerate(MODES)}
_USUAL = "train"
_TRAIN = _MODES[_USUAL]
_LOSS, _GRAD_NORM, _LEARNING_RATE, _LOSS_SCALE, _SAMPLES, _TOKENS, _MICROBATCHES, _EPOCH = range(8)
_PLAIN = frozenset({float, int})
_readers: dict[int, TensorReader] = {}


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
    mode: str = "train",
    **unknown: object,
) -> None:
    """Record numbers of the present step; never waits, never raises. Any other number is for a Stat.

    A loss or the norm of the gradient may be a tensor of one element, which is not waited for. Samples and tokens are this
    rank's own share of the step: 0 on ranks that compute the same again. The mode is train, validation or test.
    """
    base = _TRAIN if mode is _USUAL else _MODES.get(mode, 0) if type(mode) is str else 0
    if not base:
        report("record", "mode", f"mode to be one of {', '.join(MODES)}, not {shown(mode)}"[:200])
        return
    if unknown:
        _refuse("record", unknown)
    place = buffers.place
    extend = place.extend
    # Each by itself: a loop over all takes a third longer.
    if loss is not None:
        _record(extend, base + _LOSS, loss)
    if tokens is not None:
        _record(extend, base + _TOKENS, tokens)
    if grad_norm is not None:
        _record(extend, base + _GRAD_NORM, grad_norm)
    if samples is not None:
        _record(extend, base + _SAMPLES, samples)
    if learning_rate is not None:
        _record(extend, base + _LEARNING_RATE, learning_rate)
    if loss_scale is not None:
        _record(extend, base + _LOSS_SCALE, loss_scale)
    if microbatches is not None:
        _record(extend, base + _MICROBATCHES, microbatches)
    if epoch is not None:
        _record(extend, base + _EPOCH, epoch)
    if len(place.buffer.items) > buffers.limit:
        Hooks.full(place.buffer, False)  # nothing is failing


def _refuse(call: str, names: Mapping[str, object]) -> None:
    """Count what has no place here, and say where it has one."""
    report(call, "name", f"none of {', '.join(sorted(names))}, which are for a Stat of the job's own"[:200])


def _record(extend: Callable[[Any], None], code: int, value: object) -> None:
    if type(value) in _PLAIN:
        extend((code, value))
    elif not is_tensor(value):
        extend((code, taken(value)))
    else:
        reader = _readers.get(code)
        if reader is None:
            reader = _readers.setdefault(code, TensorReader(partial(_arrived, code), partial(_refused, code)))
        reader.add(value)


def _arrived(code: int, value: float) -> None:
    buffers.place.extend((code, value))


def _refused(code: int, reason: str) -> None:
    field = FIELDS[(code - NUMBERS) % 8]
    expected = f"{field} to be a number, or a tensor of one element that can be copied"
    report("record", f"tensor_{reason}", expected)


def _collect() -> None:
    """Take the values of this thread's tensors that have arrived meanwhile; never raises."""
    for code, reader in list(_readers.items()):
        try:
            reader.collect()
        except Exception:  # noqa: BLE001, PERF203  # whatever torch raises, as for all once CUDA is in error
            _refused(code, "error")


Hooks.collect = _collect


# Facts ----------------------------------------------------------------------------------------------------


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
    """Say what is known about the run; only what is given changes, and nothing raises.

    `precision` (`bf16`, `fp16`, `fp8`, `tf32` …) is the row of the peak table, which `peak_flops`, FLOP/s of this rank's
    device, dense, replaces. FLOP of a token or sample are the model's, forward and backward; `hardware_flops_per_token`
    counts what is computed again too. `flops_method` says in a word how they were found.
    """
    given = {
        name: taken(value) for name, value in locals().items() if value is not None and name != "unknown"
    }
    if given:
        calls.say("describe", **given)
    if unknown:
        _refuse("describe", unknown)


def skipped_step(reason: str) -> None:
    """Say that the present step did not change the model, for `overflow` or `nonfinite`."""
    calls.say("skipped_step", reason=taken(reason))


def interruption(reason: str) -> None:
    """Say why the process is about to end, by one of the reasons of `training_interruptions_total`."""
    given = taken(reason)
    if given in END_REASONS:
        calls.say("interruption", reason=given)
    else:
        report("interruption", "reason", f"one of {', '.join(END_REASONS)}, not {shown(given)}"[:300])


def checkpoint_saved(
    step: int,
    *,
    kind: str = "sync",
    ok: bool = True,
    seconds: float | None = None,
    bytes: int | None = None,
    blocking_seconds: float | None = None,
) -> None:
    """Say that a checkpoint was saved, afterwards; for frameworks that tell no earlier.

    The kind is sync, async or local; `seconds` until it was safe, of which it held up the training for some.
    """
    calls.say("checkpoint_saved", **{name: taken(value) for name, value in locals().items()})
    RECORDER.flush_soon()


def step(step: int | None = None, *, seconds: float | None = None, mode: str = "train") -> None:
    """Say that a step has just ended; for code that sees nothing else of it.

    `step` counts the steps completed, this one included; None for one more than before. `seconds` is what it took; None
    for the time since the last one. The mode is train, validation or test.
    """
    kind = taken(mode)
    if not isinstance(kind, str) or kind not in _MODES:
        report("step", "mode", f"mode to be one of {', '.join(MODES)}, not {shown(kind)}"[:200])
        return
    if Hooks.gpu is not None and kind == "train":
        Hooks.gpu.step()
    asked = Hooks.telemetry.ask(*calls.LOOP_FIELDS) if kind == "train" and Hooks.values is not None else {}
    calls.say("step", step=taken(step), seconds=taken(seconds), mode=kind, asked=asked)


if not TYPE_CHECKING:
    __all__ = [
        name
        for name, value in sorted(globals().items())
        if callable(value) and value.__module__ == __name__ and not name.startswith(("_", "guessed_"))
    ]
