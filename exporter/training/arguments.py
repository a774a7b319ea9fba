"""Arguments: what a job passes as a number or a text, made plain where it is passed.

Used in the training process, on the job's threads: what is behind the calls compares, hashes and prints plain values
only, and so never runs the job's code on the recording thread. Nothing here raises, or waits for a device.
"""

from __future__ import annotations

from operator import index

from exporter.training.types import Unusable, shown

_PLAIN = frozenset({str, int, float, bool, type(None)})


def taken(value: object) -> object:
    """Take a number or a text of any library.

    Returns:
        A str, int, float or bool of the same value, or None; `Unusable` for anything else, so that whoever checks it
        refuses it.
    """
    if type(value) in _PLAIN:
        return value
    try:
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            return int.__int__(value)
        if isinstance(value, float):
            return float.__float__(value)
        if not _is_elsewhere(value):
            return _number(value)
    except Exception:  # noqa: BLE001  # the code of whoever made it
        return Unusable(shown(value))
    return Unusable(shown(value))


def is_tensor(value: object) -> bool:
    """Whether it lives on a device as torch's tensors do, so that its value may have to be waited for.

    What numpy makes says that it is on the `"cpu"`, in a text, and is a number like any other.
    """
    try:
        return type(getattr(value, "device", "")) is not str
    except Exception:  # noqa: BLE001  # the code of whoever made it
        return True


def _is_elsewhere(value: object) -> bool:
    """Whether its value would have to be waited for."""
    return is_tensor(value) and getattr(value.device, "type", "") != "cpu"  # type: ignore[attr-defined]  # it has one


def _number(value: object) -> object:
    try:
        return int(index(value))  # type: ignore[arg-type]  # anything may come
    except TypeError:  # it is no whole number
        return float(value)  # type: ignore[arg-type]  # likewise
