"""Event: something that happened once, and how any value becomes part of one.

Used in the job. `check_…` raises, for faces whose originals do; what `exporter.log` is given is converted.
"""

from __future__ import annotations

import enum
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from exporter.recording.values import Value

Datum = str | float | int | bool
"""What an event may carry."""

LONGEST_TEXT = 32_768
"""Characters of a message or of a datum; what is longer is cut, since a queue of events must stay small."""
LONGEST_TYPE = 512
LONGEST_SHOWN = 1000
"""Characters of a datum that was no text and became one."""
_ANY_LENGTH = 1 << 62
_BEYOND = 1 << 63


class Severity(str, enum.Enum):
    """How bad it is. Each equals its lower-case name, so that `severity="warning"` will do everywhere."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
"""Every severity, and the number that `logging` gives it."""
_OTHER_WORDS = {
    word: severity
    for severity, words in {
        "debug": "trace verbose notset",
        "info": "notice information success",
        "warning": "warn",
        "error": "err exception severe",
        "critical": "fatal crit alert emergency emerg panic",
    }.items()
    for word in (severity, *words.split())
}


@dataclass(frozen=True, slots=True)
class Event(Value):
    """One event, as handlers are given it; nothing in it changes any more."""

    type: str  # what happened: `checkpoint.saved`; a label value, so there should be few different ones
    message: str | None = None  # for people; None where the type says it all
    severity: str = "info"  # one of `Severity`, as plain text
    data: Mapping[str, Datum] = field(default_factory=dict, hash=False)  # what programs look at
    timestamp: float = 0.0  # when it happened, Unix time, seconds
    logged_at: float = 0.0  # when it was logged, Unix time, seconds
    monotonic_ns: int = 0  # when it was logged, on a clock of this machine that is never set, nanoseconds
    id: str = ""  # 16 hexadecimal digits from the operating system's randomness
    span_id: str | None = None  # the span that it belongs to, None for none
    parent_ids: tuple[str, ...] = ()  # the ids of the events that led to it
    rank: int | None = None  # global rank of the process, None where it has none
    run: str = ""


# Converting: never raises ------------------------------------------------------------------------------------


def find_severity(severity: object) -> str | None:
    """One of ours, from its name, another library's word or a level of `logging`; None for anything else."""
    found = getattr(severity, "value", severity)
    if isinstance(found, str):
        return _OTHER_WORDS.get(found.lower())
    if isinstance(found, int | float):
        return next((name for name, least in reversed(LEVELS.items()) if found >= least), "debug")
    return None


def convert_data(data: Mapping[str, object], refuse: Callable[[str], object]) -> Mapping[str, Datum]:
    """Make plain values of anything; what needs no change is given back as it is.

    Numbers of numpy and torch scalars in the machine's own memory become plain numbers; None is left out; all else
    becomes short text. No value on a GPU is waited for. What cannot be converted is left out and its name refused.
    """
    if _is_plain(data, LONGEST_TEXT):
        return data  # type: ignore[return-value]  # as just seen
    plain: dict[str, Datum] = {}
    for name, value in data.items():
        try:
            if value is not None:
                plain[str(name)[:LONGEST_TYPE]] = _converted(value)
        except Exception:  # noqa: BLE001, PERF203  # an object of the job's that cannot even be shown
            refuse(name if isinstance(name, str) else type(name).__name__)
    return plain


def _converted(value: Any) -> Datum:
    if _is_tensor(value):
        return _tensor(value)
    if not isinstance(value, bool | int | float | str):
        if callable(getattr(value, "item", None)) and getattr(value, "size", 1) == 1:
            value = value.item()
        elif isinstance(value, os.PathLike):
            value = os.fsdecode(value)
        elif isinstance(value, bytes | bytearray):
            value = bytes(value[:LONGEST_SHOWN]).decode("utf-8", "backslashreplace")
        elif type(value).__module__ in {"datetime", "decimal", "uuid"}:
            value = str(value)
    if isinstance(value, bool | int | float | str):
        return _without_subclass(value)
    return _SHORT.repr(value)[:LONGEST_SHOWN]


def _without_subclass(value: Datum, longest: int = LONGEST_TEXT) -> Datum:
    """Take an instance of a subclass as what it is at heart; a whole number beyond 64 bits as text."""
    if isinstance(value, str):
        return str.__str__(value)[:longest]
    if isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float.__float__(value)
    whole = int.__int__(value)
    if -_BEYOND <= whole < _BEYOND:
        return whole
    return str(whole) if whole.bit_length() < 4096 else f"a whole number of {whole.bit_length()} bits"


def _is_tensor(value: object) -> bool:
    return type(value).__module__.partition(".")[0] in {"torch", "jax", "jaxlib"} and hasattr(value, "shape")


def _tensor(value: Any) -> Datum:
    """The number of a tensor of one element that lies in the machine's own memory, else its shape."""
    device = str(getattr(value, "device", ""))
    if device == "cpu" and value.numel() == 1 and not value.is_complex():
        return _without_subclass(value.detach().item())
    return f"{type(value).__name__} of shape {tuple(value.shape)} on {device or 'a device'}"


class _Short(reprlib.Repr):
    """Shows a container in bounds, without asking a tensor for its values."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = self.maxdeque = 50
        self.maxstring = self.maxother = self.maxlong = 200

    def repr_instance(self, x: Any, level: int) -> str:
        """Show what is no container."""
        return str(_tensor(x)) if _is_tensor(x) else super().repr_instance(x, level)


_SHORT = _Short()


# Checking: for faces whose originals raise -------------------------------------------------------------------


def check_severity(severity: object) -> str:
    """Take a member of Severity or its lower-case name, else raise ValueError."""
    found = getattr(severity, "value", severity)
    if not isinstance(found, str) or found not in LEVELS:
        raise ValueError(f"severity must be one of {', '.join(LEVELS)}, not {severity!r}")
    return found


def check_data(data: Mapping[str, Datum], *, whole: bool = False) -> Mapping[str, Datum]:
    """Take plain values, texts beyond `LONGEST_TEXT` cut unless `whole`; what needs no change is given back as it is.

    Raises:
        TypeError: A value is no str, float, int or bool, or a name no str.
        ValueError: A whole number needs more than 64 bits.
    """
    longest = _ANY_LENGTH if whole else LONGEST_TEXT
    if _is_plain(data, longest):
        return data
    plain = {}
    for name, value in data.items():
        if not isinstance(name, str) or not isinstance(value, bool | int | float | str):
            raise TypeError(f"data must be str, float, int or bool under names, not {name!r}: {type(value)}")
        if isinstance(value, int) and not -_BEYOND <= value < _BEYOND:
            raise ValueError(f"the datum {name!r} must fit into 64 bits, not {value!r:.60}")
        plain[str.__str__(name)] = _without_subclass(value, longest)
    return plain


def _is_plain(data: Mapping[Any, Any], longest: int) -> bool:
    for name, value in data.items():
        kind = type(value)
        if type(name) is not str or not (
            kind is float
            or kind is bool
            or (kind is int and -_BEYOND <= value < _BEYOND)
            or (kind is str and len(value) <= longest)
        ):
            return False
    return True


def check_type(type_: str) -> str:
    """Take the type of an event: some text, else raise TypeError or ValueError."""
    if not isinstance(type_, str):
        raise TypeError(f"the type of an event must be str, not {type(type_).__name__}")
    if not type_:
        raise ValueError("the type of an event must not be empty: say what happened: 'checkpoint.saved'")
    return str.__str__(type_)[:LONGEST_TYPE]


def check_timestamp(timestamp: Any) -> float:
    """Take Unix time, or a datetime (a naive one as local time), else raise TypeError or ValueError."""
    try:
        seconds = timestamp.timestamp() if hasattr(timestamp, "timestamp") else timestamp
        if isinstance(seconds, int | float) and not isinstance(seconds, bool) and isfinite(seconds):
            return float(seconds)
    except (OverflowError, OSError):
        pass
    number = isinstance(timestamp, int | float) and not isinstance(timestamp, bool)
    kind = ValueError if number or hasattr(timestamp, "timestamp") else TypeError
    raise kind(f"timestamp must be Unix time in seconds or a datetime, not this {type(timestamp).__name__}")


def check_parents(parent_ids: Iterable[str]) -> tuple[str, ...]:
    """Take the ids of the events that led to one, else raise TypeError."""
    parents = tuple(parent_ids)
    if isinstance(parent_ids, str) or not all(isinstance(parent, str) for parent in parents):
        raise TypeError(f"parent_ids must be a collection of ids, which are str, not {parent_ids!r}")
    return parents
