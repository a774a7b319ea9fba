"""Event: something that happened once, with what is known about it.

Used in the training process, where events are logged, and by handlers, which are given them. Standard library
only; the names that every training process loads, so little of that.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite

from exporter.recording.values import Value

Datum = str | float | int | bool
"""What an event may carry."""

LONGEST_TEXT = 32_768
"""Characters of a message or of a datum; what is longer is cut, since a queue of events must stay small."""
LONGEST_TYPE = 512
_ANY_LENGTH = 1 << 62
_MOST = (1 << 63) - 1
_LEAST = -_MOST - 1
_PLAIN = frozenset({str, float, int, bool})


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


def check_severity(severity: str) -> str:
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
    for name, value in data.items():
        kind = type(value)
        if type(name) is str and (
            kind is float
            or kind is bool
            or (kind is int and _LEAST <= value <= _MOST)  # type: ignore[operator]  # an int
            or (kind is str and len(value) <= longest)  # type: ignore[arg-type]  # a str
        ):
            continue
        return {check_key(name): check_datum(name, value, longest) for name, value in data.items()}
    return data


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
    kind = type(value)
    if kind not in _PLAIN:
        # Subclasses, such as numpy's float64 and enums with a value, become what they are at heart.
        if isinstance(value, str):
            value, kind = str.__str__(value), str
        elif isinstance(value, float):
            value, kind = float.__float__(value), float
        elif isinstance(value, int):
            value, kind = int.__int__(value), int
        else:
            raise TypeError(
                f"the datum {name!r} must be str, float, int or bool, not {kind.__name__};"
                " convert it where the event is logged"
            )
    if kind is str:
        return value[:longest]  # type: ignore[index]  # a str
    if kind is int and not _LEAST <= value <= _MOST:  # type: ignore[operator]  # an int
        raise ValueError(
            f"the datum {name!r} must fit into 64 bits, not {value!r:.60}; log it as text or float"
        )
    return value


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
    if isinstance(parent_ids, str):
        raise TypeError("parent_ids must be a collection of ids, not one str")
    parents = tuple(parent_ids)
    for parent in parents:
        if not isinstance(parent, str):
            raise TypeError(f"parent_ids must be str, not {type(parent).__name__}")
    return parents
