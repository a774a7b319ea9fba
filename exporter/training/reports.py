"""Public training API: numbers, facts and results that the job reports.

The job calls these functions on its threads. A call does not raise, and does not wait for a GPU: a later call collects the value of
a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exporter.recording.conversion import safe_repr, to_attribute, to_scalar
from exporter.recording.values import END_REASONS
from exporter.training.metrics import MAX_AMOUNT, to_amount
from exporter.training.misuse import report
from exporter.training.numbers import MODES, ModeNumbers
from exporter.training.rare_blocks import timestamp_now
from exporter.training.recorder import TRAINING
from exporter.training.records import Interrupted, SaveReported, StepSkipped

MAX_CALL_PARAMETERS = 32
"""Maximum number of unknown names that a call of `describe` records. Further names are ignored."""


# Numbers -------------------------------------------------------------------------------------------------------

_TRAIN = "train"
_numbers = TRAINING.numbers


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
    """Record numbers of the current step. Use a Stat for numbers with other names.

    A number may be a tensor or an array of a single element. The call does not wait for a GPU: a later call collects the value.
    Samples and tokens are the share of this rank, 0 on a rank that repeats the computation of another rank. The mode is `train`,
    `validation` or `test`.
    """
    numbers = _numbers
    if mode is _TRAIN:  # the usual case
        mode_numbers: ModeNumbers | None = numbers.train
    else:
        mode_numbers = numbers.modes.get(mode) if type(mode) is str else None
    if mode_numbers is None:
        report("record", "mode", f"mode to be one of {', '.join(MODES)}, not {safe_repr(mode)}")
        return
    if unknown:
        _report_unknown_names("record", unknown)
    if not numbers.is_used:
        TRAINING.start_recording()
    # Fast path for plain floats; `x - x` is 0 for finite numbers only.
    if loss is not None:
        if type(loss) is float and loss - loss == 0.0 and mode_numbers.loss is not None:
            mode_numbers.loss = loss
        else:
            _record_number("loss", mode, loss)
    if tokens is not None:
        if type(tokens) is int and 0 <= tokens < MAX_AMOUNT and mode_numbers.tokens:
            mode_numbers.tokens += tokens
        else:
            _record_number("tokens", mode, tokens)
    if grad_norm is not None:
        if type(grad_norm) is float and grad_norm - grad_norm == 0.0 and numbers.grad_norm is not None:
            numbers.grad_norm = grad_norm
        else:
            _record_number("grad_norm", mode, grad_norm)
    if samples is not None:
        if type(samples) is int and 0 <= samples < MAX_AMOUNT and mode_numbers.samples:
            mode_numbers.samples += samples
        else:
            _record_number("samples", mode, samples)
    if learning_rate is not None:
        rate = learning_rate
        if type(rate) is float and rate - rate == 0.0 and numbers.learning_rate is not None:
            numbers.learning_rate = rate
        else:
            _record_number("learning_rate", mode, rate)
    if loss_scale is not None:
        _record_number("loss_scale", mode, loss_scale)
    if microbatches is not None:
        if type(microbatches) is int and 0 <= microbatches < MAX_AMOUNT and numbers.microbatches:
            numbers.microbatches += microbatches
        else:
            _record_number("microbatches", mode, microbatches)
    if epoch is not None:
        _record_number("epoch", mode, epoch)


def _report_unknown_names(call: str, names: Mapping[str, object]) -> None:
    """Report unknown keyword arguments of a call as misuse."""
    expected = f"known names, not {', '.join(sorted(names))}; record other numbers with a Stat"
    report(call, "name", expected)


def _record_number(field: str, mode: str, value: object) -> None:
    if TRAINING.is_on:
        _numbers.record(field, mode, value)


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
    """Record facts about the run. Facts that are not passed do not change.

    `precision`, such as `bf16`, `fp16`, `fp8` or `tf32`, selects the row of the table of peak FLOP/s. `peak_flops`, in FLOP/s of
    this rank's device, replaces the table. `flops_per_token` and `flops_per_sample` are the FLOPs of the model in a forward and a
    backward pass; `hardware_flops_per_token` includes recomputation. `flops_method` names the method by which the FLOPs were
    determined. Up to 32 further names become data of the event `training.begin`.
    """
    facts = {
        name: to_scalar(value) for name, value in locals().items() if value is not None and name != "unknown"
    }
    if facts:
        TRAINING.describe(facts)
    if unknown:
        parameters = {
            name[:100]: to_attribute(value) for name, value in list(unknown.items())[:MAX_CALL_PARAMETERS]
        }
        TRAINING.describe({}, parameters)


def skipped_step(reason: str) -> None:
    """Record that the current step did not change the model, because of `overflow` or `nonfinite`."""
    TRAINING.append(StepSkipped(to_scalar(reason)))
    TRAINING.start_recording()


def interruption(reason: str) -> None:
    """Record why the process is about to exit. *reason* is a value of the label `reason` of `training_interruptions_total`."""
    cause = to_scalar(reason)
    if type(cause) is str and cause in END_REASONS:
        TRAINING.append(Interrupted(cause))
        TRAINING.start_recording()
    else:
        report("interruption", "reason", f"one of {', '.join(END_REASONS)}, not {safe_repr(cause)}")


def checkpoint_saved(
    step: int,
    *,
    kind: str = "sync",
    ok: bool = True,
    seconds: float | None = None,
    bytes: int | None = None,
    blocking_seconds: float | None = None,
) -> None:
    """Record a completed save, for frameworks that do not report the start of a save.

    Args:
        step: Step that was saved.
        kind: `sync`, `async`, or `local` for a save that is stored on the node.
        ok: True if the save succeeded.
        seconds: Time from the start of the save until the checkpoint was complete.
        bytes: Size of the checkpoint.
        blocking_seconds: Part of the time in which the save blocked the training.
    """
    now = timestamp_now()
    save = SaveReported(
        step=to_scalar(step),
        kind=to_scalar(kind),
        ok=to_scalar(ok),
        seconds=to_scalar(seconds),
        blocking_seconds=to_scalar(blocking_seconds),
        bytes=to_scalar(bytes),
        end_time=now.perf_counter_seconds,
        unix_seconds=now.seconds_since_epoch,
    )
    TRAINING.append(save)
    TRAINING.start_recording()
    TRAINING.publish_soon()


def step(step: int | None = None, *, seconds: float | None = None, mode: str = _TRAIN) -> None:
    """Record a step or batch that has just completed, for code without blocks. Inside an open iteration, a training step is ignored.

    Args:
        step: Number of completed steps including this step; None for one more than before.
        seconds: Duration of the step; None for the time since the previous step.
        mode: `train`, `validation` or `test`.
    """
    number, duration, mode_name = to_scalar(step), to_scalar(seconds), to_scalar(mode)
    if type(mode_name) is not str or mode_name not in MODES:
        report("step", "mode", f"mode to be one of {', '.join(MODES)}, not {safe_repr(mode_name)}")
    elif number is not None and (type(number) is not int or to_amount(number) is None):
        report("step", "value", f"a step number of 0 or more, not {safe_repr(number)}")
    elif duration is not None and to_amount(duration, 1e9) is None:
        report("step", "value", f"seconds of at least 0 and less than 1e9, not {safe_repr(duration)}")
    else:
        step_number = number if type(number) is int else None
        TRAINING.report_step(step_number, to_amount(duration, 1e9), mode_name)
