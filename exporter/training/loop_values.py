"""Arguments of a training loop, converted; the job's callables are called once."""

from __future__ import annotations

from exporter.recording.conversion import safe_repr, to_scalar
from exporter.training.misuse import report


def loop_values(
    call: str, start: object, samples: object, iterations_target: object, samples_target: object
) -> dict[str, object]:
    """Return the arguments of the begin of a training loop as plain values."""
    return {
        "train_iterations_start": to_scalar(start),
        "train_samples_start": to_scalar(samples),
        "train_iterations_target": _target(iterations_target, call, "train_iterations_target"),
        "train_samples_target": _target(samples_target, call, "train_samples_target"),
    }


def _target(given: object, call: str, name: str) -> int | None:
    """Return a whole number, or that of a callable; None, and a misuse, of anything else."""
    try:
        found = to_scalar(given() if callable(given) else given)
    except Exception as error:  # noqa: BLE001  # the job's callable
        report(call, "callable_raised", f"{name} to be a number, but its callable raised {safe_repr(error)}")
        return None
    if type(found) is float and found.is_integer():
        return int(found)  # 1e5, as in a file of settings
    if found is None or type(found) is int:
        return found
    report(call, name, f"{name} to be a whole number, not {safe_repr(found)}"[:200])
    return None
