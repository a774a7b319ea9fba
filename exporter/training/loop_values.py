"""Conversion of the arguments of `training_loop`. Callable targets are called, and numbers of numpy become Python numbers."""

from __future__ import annotations

from exporter.recording.conversion import safe_repr, to_scalar
from exporter.recording.signal_safety import is_from_signal_handler
from exporter.training.misuse import report


def loop_values(
    call_name: str,
    iterations_start: object,
    samples_start: object,
    iterations_target: object,
    samples_target: object,
) -> dict[str, object]:
    """Return the converted arguments of the start of a training loop, by name."""
    return {
        "train_iterations_start": to_scalar(iterations_start),
        "train_samples_start": to_scalar(samples_start),
        "train_iterations_target": _target_as_int(iterations_target, call_name, "train_iterations_target"),
        "train_samples_target": _target_as_int(samples_target, call_name, "train_samples_target"),
    }


def _target_as_int(target: object, call_name: str, name: str) -> int | None:
    """Return a target, or the result of a callable target, as an int.

    None means no target. Any other value that is not a whole number is counted as misuse, and the result is None.
    """
    # The last argument of `report` completes the message "expected …".
    try:
        number = to_scalar(target() if callable(target) else target)
    except Exception as error:  # the callable belongs to the job
        if is_from_signal_handler(error):
            raise
        report(
            call_name, "callable_raised", f"{name} to be a number, but its callable raised {safe_repr(error)}"
        )
        return None
    if type(number) is float and number.is_integer():
        return int(number)  # such as 1e5 in Python code
    if number is None or type(number) is int:
        return number
    report(call_name, name, f"{name} to be a whole number, not {safe_repr(number)}")
    return None
