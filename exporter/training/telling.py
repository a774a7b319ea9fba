"""Records: the numbers of the training, and what else the job says of itself.

Used in the training process, on the job's threads. Numbers are noted as they are given, one mark each; they are looked at
by the recording thread. A tensor on a GPU is never waited for: its value arrives with a later call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from exporter.recording.tensors import TensorReader
from exporter.recording.values import END_REASONS
from exporter.training import calls, hot
from exporter.training.arguments import is_tensor, taken
from exporter.training.kinds import FIELDS, MODES, NUMBERS
from exporter.training.reports import report
from exporter.training.types import shown

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
) -> None:
    """Record numbers of the present step; never waits, never raises.

    Args:
        loss: A number, or a tensor of one element, which is not waited for.
        grad_norm: Norm of the gradient, likewise.
        learning_rate: The present one.
        loss_scale: The present one, under mixed precision.
        samples: Samples of this step, this rank's own share: 0 on ranks that compute the same again.
        tokens: Tokens, likewise.
        microbatches: Micro-batches of this step that are done.
        epoch: The epoch that is under way.
        mode: train, validation or test.
    """
    base = _TRAIN if mode is _USUAL else _MODES.get(mode, 0) if type(mode) is str else 0
    if not base:
        report("record", "mode", f"mode to be one of {', '.join(MODES)}, not {shown(mode)}"[:200])
        return
    place = hot._place  # noqa: SLF001  # `here()` costs as much as all the rest
    extend = place.extend
    if type(loss) is float and type(grad_norm) is float and type(tokens) is int:  # the usual ones, at once
        extend((base, loss, base + _TOKENS, tokens, base + _GRAD_NORM, grad_norm))  # type: ignore[unreachable]  # an int is a float to the checker
    else:
        if loss is not None:
            _record_value(extend, base + _LOSS, loss)
        if tokens is not None:
            extend((base + _TOKENS, tokens if type(tokens) in _PLAIN else taken(tokens)))
        if grad_norm is not None:
            _record_value(extend, base + _GRAD_NORM, grad_norm)
    if samples is not None:
        extend((base + _SAMPLES, samples if type(samples) in _PLAIN else taken(samples)))
    if learning_rate is not None:
        _record_value(extend, base + _LEARNING_RATE, learning_rate)
    if loss_scale is not None:
        _record_value(extend, base + _LOSS_SCALE, loss_scale)
    if microbatches is not None:
        extend((base + _MICROBATCHES, microbatches if type(microbatches) in _PLAIN else taken(microbatches)))
    if epoch is not None:
        extend((base + _EPOCH, epoch if type(epoch) in _PLAIN else taken(epoch)))
    if len(place.buffer) > hot.limit:
        hot.Hooks.full(place.track, False)  # nothing is failing


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
) -> None:
    """Say what is known about the run; only what is given changes, and nothing raises.

    Args:
        job_name: Of the job, for people.
        framework: What trains: `lightning`, `transformers` …
        framework_version: Of it.
        model: The model's name.
        precision: `bf16`, `fp16`, `fp8`, `tf32` …: the row of the peak table.
        flops_method: How the FLOP of a token or sample were found, in a word.
        flops_per_token: Model FLOP of one token, forward and backward.
        hardware_flops_per_token: The same with what is computed again.
        flops_per_sample: Model FLOP of one sample, where tokens are not counted.
        peak_flops: FLOP/s of this rank's device, dense; instead of the table's.
        step_target: The step at which the training is to end.
        world_size: Ranks.
    """
    given = {name: taken(value) for name, value in locals().items() if value is not None}
    if given:
        calls.say("describe", **given)


def skipped_step(reason: str) -> None:
    """Say that the present step did not change the model.

    Args:
        reason: `overflow` or `nonfinite`.
    """
    calls.say("skipped_step", reason=taken(reason))


def interruption(reason: str) -> None:
    """Say why the process is about to end.

    Args:
        reason: One of the reasons of `training_interruptions_total`.
    """
    given = taken(reason)
    if given not in END_REASONS:
        report("interruption", "reason", f"one of {', '.join(END_REASONS)}, not {shown(given)}"[:300])
        return
    calls.say("interruption", reason=given)


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

    Args:
        step: The step that was saved.
        kind: sync, async or local.
        ok: Whether it succeeded.
        seconds: Until it was safe.
        bytes: Its size.
        blocking_seconds: For how long it held up the training.
    """
    calls.say(
        "checkpoint_saved",
        step=taken(step),
        kind=taken(kind),
        ok=taken(ok),
        seconds=taken(seconds),
        bytes=taken(bytes),
        blocking_seconds=taken(blocking_seconds),
    )


def step(step: int | None = None, *, seconds: float | None = None, mode: str = "train") -> None:
    """Say that a step has just ended; for code that sees nothing else of it.

    Args:
        step: Steps completed, this one included; None for one more than before.
        seconds: What it took; None for the time since the last one.
        mode: train, validation or test.
    """
    kind = taken(mode)
    if kind not in _MODES:
        report("step", "mode", f"mode to be one of {', '.join(MODES)}, not {shown(kind)}"[:200])
        return
    values = calls.asked(*calls.LOOP_FIELDS) if kind == "train" and hot.Hooks.values is not None else {}
    calls.say("step", step=taken(step), seconds=taken(seconds), mode=kind, asked=values)


def collect() -> None:
    """Take the values of this thread's tensors that have arrived meanwhile."""
    for reader in list(_readers.values()):
        reader.collect()


def _record_value(extend: Callable[[Any], None], code: int, value: object) -> None:
    """Record a number, plain or of another library, or a tensor."""
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
    hot._place.extend((code, value))  # noqa: SLF001  # as in `record`


def _refused(code: int, reason: str) -> None:
    field = FIELDS[(code - NUMBERS) % 8]
    report(
        "record", f"tensor_{reason}", f"{field} to be a number, or a tensor of one element that can be copied"
    )
