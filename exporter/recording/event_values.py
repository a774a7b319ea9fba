"""Event: something that happened once, with what is known about it, and how any value becomes part of one.

Used in the training process, where events are logged, and by handlers, which are given them. The `check_` functions
are for faces whose originals raise; `exporter.log` never does and uses those that convert.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
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
_MOST = (1 << 63) - 1
_LEAST = -_MOST - 1


class Severity(str, enum.Enum):
    """How bad it is. Each equals its lower-case name, so that `severity="warning"` will do everywhere."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"

    @property
    def level(self) -> int:
        """The number that `logging` gives it."""
        return LEVELS[self.value]


LEVELS: Mapping[str, int] = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
"""Every severity, and the number that `logging` gives it."""
_OTHER_WORDS = {
    "trace": "debug",
    "verbose": "debug",
    "notset": "debug",
    "notice": "info",
    "information": "info",
    "success": "info",
    "warn": "warning",
    "err": "error",
    "exception": "error",
    "severe": "error",
    "fatal": "critical",
    "crit": "critical",
    "alert": "critical",
    "emergency": "critical",
    "emerg": "critical",
    "panic": "critical",
}


@dataclass(frozen=True, slots=True)
class Event(Value):
    """One event, as handlers are given it; nothing in it changes any more.

    Attributes:
        type: What happened: `checkpoint.saved`. A value of the label `type`, so there should be few of them.
        message: For people; None where the type says it all.
        severity: One of `Severity`, as plain text.
        data: What programs look at. A bool stays a bool.
        timestamp: When it happened, Unix time, seconds.
        logged_at: When it was logged, Unix time, seconds.
        monotonic_ns: When it was logged, on a clock of this machine that is never set, nanoseconds.
        id: 16 hexadecimal digits from the operating system's randomness.
        span_id: The span that it belongs to, None for none.
        parent_ids: The ids of the events that led to it.
        rank: Global rank of the process, None where it has none.
        run: The run's name.
    """

    type: str
    message: str | None = None
    severity: str = "info"
    data: Mapping[str, Datum] = field(default_factory=dict, hash=False)
    timestamp: float = 0.0
    logged_at: float = 0.0
    monotonic_ns: int = 0
    id: str = ""
    span_id: str | None = None
    parent_ids: tuple[str, ...] = ()
    rank: int | None = None
    run: str = ""

    def as_dict(self) -> dict[str, object]:
        """Give a dict of its own with every field, fit for JSON but for numbers that are not finite."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return fields | {"data": dict(self.data), "parent_ids": list(self.parent_ids)}


# Converting: never raises ------------------------------------------------------------------------------------


def convert_data(data: Mapping[str, object], refuse: Callable[[str], object]) -> Mapping[str, Datum]:
    """Make plain values of anything; what needs no change is given back as it is.

    A number of numpy and a torch scalar in the machine's own memory become plain numbers; None is left out; lists,
    paths, dates and all else become short text. No value on a GPU is waited for.

    Args:
        data: By name.
        refuse: Called with the name of what cannot be converted, which is left out.
    """
    if _is_plain(data, LONGEST_TEXT):
        return data  # type: ignore[return-value]  # as just seen
    plain: dict[str, Datum] = {}
    for name, value in data.items():
        try:
            if value is not None:
                plain[str(name)[:LONGEST_TYPE]] = _converted(value)
        except Exception:  # noqa: BLE001, PERF203  # an object of the job's that cannot even be shown
            refuse(str(type(name).__name__ if not isinstance(name, str) else name))
    return plain


def _converted(value: Any) -> Datum:
    if isinstance(value, bool | int | float | str):
        return _as_plain(value)
    kind = type(value)
    library = kind.__module__.partition(".")[0]
    if library in {"torch", "jax", "jaxlib"} and hasattr(value, "shape"):
        return _Short.tensor(value)
    if callable(getattr(value, "item", None)) and getattr(value, "size", 1) == 1:
        return _converted_item(value.item())
    if isinstance(value, os.PathLike):
        return _as_plain(os.fsdecode(value))
    if isinstance(value, bytes | bytearray):
        return bytes(value[:LONGEST_SHOWN]).decode("utf-8", "backslashreplace")
    if isinstance(value, dt.date | dt.time | dt.timedelta) or library in {
        "decimal",
        "uuid",
    }:
        return str(value)
    return _SHORT.repr(value)[:LONGEST_SHOWN]


def _converted_item(item: object) -> Datum:
    return (
        _as_plain(item) if isinstance(item, bool | int | float | str) else _SHORT.repr(item)[:LONGEST_SHOWN]
    )


def _as_plain(value: Datum) -> Datum:
    """Take an instance of a subclass as what it is at heart, text of a bounded length, an int of 64 bits or text."""
    if isinstance(value, str):
        return str.__str__(value)[:LONGEST_TEXT]
    if isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float.__float__(value)
    whole = int.__int__(value)
    if _LEAST <= whole <= _MOST:
        return whole
    return str(whole) if whole.bit_length() < 4096 else f"a whole number of {whole.bit_length()} bits"


class _Short(reprlib.Repr):
    """Shows a container in bounds, without asking a tensor for its values."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = self.maxdeque = 50
        self.maxstring = self.maxother = self.maxlong = 200

    def repr_instance(self, x: Any, level: int) -> str:
        """Show what is no container."""
        if type(x).__module__.partition(".")[0] in {"torch", "jax", "jaxlib"} and hasattr(x, "shape"):
            return str(self.tensor(x))
        return super().repr_instance(x, level)

    @staticmethod
    def tensor(value: Any) -> Datum:
        """Give the number of a tensor of one element that lies in the machine's own memory, else its shape."""
        device = str(getattr(value, "device", ""))
        if device == "cpu" and value.numel() == 1 and not value.is_complex():
            return _as_plain(value.detach().item())
        return f"{type(value).__name__} of shape {tuple(value.shape)} on {device or 'a device'}"


_SHORT = _Short()


def severity_of(severity: object) -> str:
    """Name a severity: of ours, of another library's words, or of a level of `logging`; `info` for anything else."""
    found = getattr(severity, "value", severity)
    if isinstance(found, str):
        word = found.lower()
        return word if word in LEVELS else _OTHER_WORDS.get(word, "info")
    if isinstance(found, int | float):
        return next((name for name, least in reversed(list(LEVELS.items())) if found >= least), "debug")
    return "info"


def knows_severity(severity: object) -> bool:
    """Whether `severity_of` has understood what it was given."""
    found = getattr(severity, "value", severity)
    if isinstance(found, str):
        return found.lower() in LEVELS or found.lower() in _OTHER_WORDS
    return isinstance(found, int | float)


# Checking: for faces whose originals raise -------------------------------------------------------------------


def check_severity(severity: object) -> str:
    """Take a member of Severity or its lower-case name.

    Raises:
        ValueError: It is neither.
    """
    found = getattr(severity, "value", severity)
    if not isinstance(found, str) or found not in LEVELS:
        raise ValueError(f"severity must be one of {', '.join(LEVELS)}, not {severity!r}")
    return found


def check_data(data: Mapping[str, Datum], *, whole: bool = False) -> Mapping[str, Datum]:
    """Take plain values; what needs no change is given back as it is.

    Args:
        data: Them.
        whole: Whether a text beyond `LONGEST_TEXT` stays as it is; it is cut otherwise.

    Raises:
        TypeError: A value is no str, float, int or bool, or a name no str.
        ValueError: A whole number needs more than 64 bits.
    """
    longest = _ANY_LENGTH if whole else LONGEST_TEXT
    if _is_plain(data, longest):
        return data
    return {check_key(name): check_datum(name, value, longest) for name, value in data.items()}


def _is_plain(data: Mapping[Any, Any], longest: int) -> bool:
    for name, value in data.items():
        kind = type(value)
        if type(name) is not str or not (
            kind is float
            or kind is bool
            or (kind is int and _LEAST <= value <= _MOST)
            or (kind is str and len(value) <= longest)
        ):
            return False
    return True


def check_key(name: str) -> str:
    """Take the name of a datum.

    Raises:
        TypeError: It is no text.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a datum must be str, not {type(name).__name__}: {name!r}")
    return str.__str__(name)


def check_datum(name: str, value: Datum, longest: int = LONGEST_TEXT) -> Datum:
    """Take one plain value, as the plain type; a text of at most so many characters.

    Raises:
        TypeError: It is no str, float, int or bool.
        ValueError: It is a whole number of more than 64 bits.
    """
    if not isinstance(value, bool | int | float | str):
        raise TypeError(
            f"the datum {name!r} must be str, float, int or bool, not {type(value).__name__};"
            " convert it where the event is logged"
        )
    if isinstance(value, str):
        return str.__str__(value)[:longest]
    if type(value) is not bool and isinstance(value, int) and not _LEAST <= value <= _MOST:
        raise ValueError(
            f"the datum {name!r} must fit into 64 bits, not {value!r:.60}; log it as text or float"
        )
    return _as_plain(value)


def check_text(field: str, text: str | None) -> str | None:
    """Take text or None, cut to `LONGEST_TEXT`.

    Raises:
        TypeError: It is neither.
    """
    if text is None or (type(text) is str and len(text) <= LONGEST_TEXT):
        return text
    if not isinstance(text, str):
        raise TypeError(f"{field} must be str or None, not {type(text).__name__}")
    return str.__str__(text)[:LONGEST_TEXT]


def check_type(type_: str) -> str:
    """Take the type of an event.

    Raises:
        TypeError: It is no text.
        ValueError: It is empty.
    """
    if not isinstance(type_, str):
        raise TypeError(f"the type of an event must be str, not {type(type_).__name__}")
    if not type_:
        raise ValueError(
            "the type of an event must not be empty: say what happened, such as 'checkpoint.saved'"
        )
    return str.__str__(type_)[:LONGEST_TYPE]


def check_timestamp(timestamp: object) -> float:
    """Take Unix time, or a datetime: an aware one as the instant it is, a naive one as local time.

    Raises:
        TypeError: It is neither.
        ValueError: It is not finite, or beyond what the clock can be.
    """
    if isinstance(timestamp, int | float) and not isinstance(timestamp, bool):
        seconds = float(timestamp)
    else:
        method = getattr(timestamp, "timestamp", None)
        if not callable(method):
            raise TypeError(
                f"timestamp must be Unix time in seconds or a datetime, not {type(timestamp).__name__}"
            )
        try:
            seconds = method()
        except (OverflowError, OSError) as error:
            raise ValueError(f"timestamp {timestamp!r} is out of range: {error}") from error
    if not isfinite(seconds):
        raise ValueError(f"timestamp must be finite, not {timestamp!r}")
    return seconds


def check_parents(parent_ids: Iterable[str]) -> tuple[str, ...]:
    """Take the ids of the events that led to one.

    Raises:
        TypeError: It is no collection of texts.
    """
    parents = tuple(parent_ids)
    if isinstance(parent_ids, str) or not all(isinstance(parent, str) for parent in parents):
        raise TypeError(f"parent_ids must be a collection of ids, which are str, not {parent_ids!r}")
    return parents
