"""Conversion of the arguments of `training_loop`: callables are called, numbers become plain Python numbers."""

from __future__ import annotations

from exporter.recording.conversion import safe_repr, to_scalar
from exporter.training.misuse import report


def loop_values(
    call: str,
    iterations_start: object,
    samples_start: object,
    iterations_target: object,
    samples_target: object,
) -> dict[str, object]:
    """Return the arguments of the start of a training loop as plain values."""
    return {
        "train_iterations_start": to_scalar(iterations_start),
        "train_samples_start": to_scalar(samples_start),
        "train_iterations_target": _whole_number(iterations_target, call, "train_iterations_target"),
        "train_samples_target": _whole_number(samples_target, call, "train_samples_target"),
    }


def _whole_number(target: object, call: str, name: str) -> int | None:
    """Return a target, or the result of a callable, as an int. None is valid; other values are misuse and return None."""
    try:
        number = to_scalar(target() if callable(target) else target)
    except Exception as error:  # noqa: BLE001  # the callable belongs to the job
        report(call, "callable_raised", f"{name} to be a number, but its callable raised {safe_repr(error)}")
        return None
    if type(number) is float and number.is_integer():
        return int(number)  # such as 1e5 from a YAML file
    if number is None or type(number) is int:
        return number
    report(call, name, f"{name} to be a whole number, not {safe_repr(number)}"[:200])
    return None
