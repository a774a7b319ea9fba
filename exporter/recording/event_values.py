"""Events and their values: severities, conversion and validation.

`exporter.log` converts its arguments with `find_severity` and `convert_data`, which accept invalid values. The functions `check_…`
raise for invalid values, like the originals of the compatibility modules that call them. `exporter.log` catches the exceptions of the
checks that it calls.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import isfinite
from typing import Any

from exporter.recording.conversion import (
    INT64_LIMIT,
    MAX_CONVERTED_CHARACTERS,
    Datum,
    safe_repr,
    to_datum,
    to_scalar,
    to_str,
)
from exporter.recording.value_class import Value
from exporter.recording.values import ProcessIdentity

MAX_EVENT_NAME_CHARACTERS = 512
"""Maximum length of the type of an event, of the names of its data, and of its ids of a span and of parents. Longer texts are cut."""
MAX_PARENTS = 100
"""Maximum number of parents of an event. Further ids are not read, because an iterator may never end."""
_UNLIMITED_CHARACTERS = 1 << 62
UNNAMED_TYPE = "unnamed"
"""Type of an event whose type is empty."""


class Severity(str, enum.Enum):
    """Severity of an event. A member equals its lower-case name, so `severity="warning"` works too."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


LEVEL_BY_SEVERITY = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
"""Level of `logging` for each severity."""
_SEVERITY_BY_ALIAS = {
    alias: severity
    for severity, aliases in {
        "debug": ("trace", "verbose", "notset"),
        "info": ("notice", "information", "success"),
        "warning": ("warn",),
        "error": ("err", "exception", "severe"),
        "critical": ("fatal", "crit", "alert", "emergency", "emerg", "panic"),
    }.items()
    for alias in (severity, *aliases)
}


class _PayloadCarrier:
    """Slot of an event's payload. It is not a dataclass field, so that copies, JSON and pickles omit the payload."""

    __slots__ = ("_payload",)
    _payload: object


@dataclass(frozen=True, slots=True)
class Event(Value, _PayloadCarrier):
    """Immutable event, as delivered to handlers."""

    type: str  # such as `checkpoint.saved`; also a label value
    message: str | None = None  # text for humans
    severity: str = "info"  # value of a `Severity`
    data: Mapping[str, Datum] = field(default_factory=dict, hash=False)  # values by name
    timestamp: float = 0.0  # Unix time of the event
    logged_at: float = 0.0  # Unix time of the logging call
    monotonic_ns: int = 0  # monotonic time of the logging call
    id: str = ""  # 16 random hexadecimal digits
    span_id: str | None = None  # id of the event's span
    parent_ids: tuple[str, ...] = ()  # ids of the events that caused the event
    rank: int | None = None  # global rank of the process; None without a rank
    run: str = ""  # name of the run

    @property
    def payload(self) -> object:
        """Object passed to `log(..., payload=object)`; None without such an object, and in copies that `with_payload` has not made."""
        return getattr(self, "_payload", None)

    def with_payload(self, payload: object) -> Event:
        """Return a copy of the event with a payload."""
        event = self.replace()
        object.__setattr__(event, "_payload", payload)
        return event


@dataclass(slots=True)
class RawEvent:
    """Logged event, which is converted to an `Event` for handlers and `recent`. The class is not frozen, which saves 1 µs per event."""

    type: str
    message: str | None
    severity: str
    data: Mapping[str, Datum]
    timestamp: float
    logged_at: float
    monotonic_ns: int
    span_id: str | None = None
    parent_ids: tuple[str, ...] = ()

    def to_event(self, id: str, identity: ProcessIdentity) -> Event:
        """Return the event with an id, and with the rank and the run of a process."""
        return Event(
            type=self.type,
            message=self.message,
            severity=self.severity,
            data=self.data,
            timestamp=self.timestamp,
            logged_at=self.logged_at,
            monotonic_ns=self.monotonic_ns,
            id=id,
            span_id=self.span_id,
            parent_ids=self.parent_ids,
            rank=identity.rank,
            run=identity.run,
        )


# Conversion of the arguments of `exporter.log` --------------------------------------------------------------------


def find_severity(severity: object) -> str | None:
    """Return the severity for a name, an alias or a level of `logging`, or None for other values.

    A number is rounded down to a level; a number below 10, and NaN, give `debug`.
    """
    value = getattr(severity, "value", severity)
    if isinstance(value, str):
        return _SEVERITY_BY_ALIAS.get(value.lower())
    if isinstance(value, int | float):
        return next((name for name, level in reversed(LEVEL_BY_SEVERITY.items()) if value >= level), "debug")
    return None


def convert_data(data: Mapping[str, object], refuse: Callable[[str], object]) -> Mapping[str, Datum]:
    """Return the data as plain values. Returns the same object if all values are plain.

    None is omitted. Values that cannot be converted are omitted too, and *refuse* is called with the name of each of them.
    """
    if _is_plain(data, MAX_EVENT_NAME_CHARACTERS, MAX_CONVERTED_CHARACTERS):
        return data  # type: ignore[return-value]  # checked by `_is_plain`
    plain_data: dict[str, Datum] = {}
    for name, value in data.items():
        if value is None:
            continue
        datum = to_datum(value)
        if datum is None:
            refuse(to_str(name, MAX_EVENT_NAME_CHARACTERS))
        else:
            plain_data[to_str(name, MAX_EVENT_NAME_CHARACTERS)] = datum
    return plain_data


# Validation for compatibility modules whose originals raise -------------------------------------------------------


def check_severity(severity: object) -> str:
    """Return the lower-case name of a severity, given as a `Severity` or as this name. Raises ValueError for other values."""
    value = getattr(severity, "value", severity)
    if not isinstance(value, str) or value not in LEVEL_BY_SEVERITY:
        raise ValueError(f"severity must be one of {', '.join(LEVEL_BY_SEVERITY)}, not {severity!r}")
    return value


def check_data(data: Mapping[str, Datum], *, keep_full_texts: bool = False) -> Mapping[str, Datum]:
    """Return the data as plain values.

    Without *keep_full_texts*, texts are cut to `MAX_CONVERTED_CHARACTERS` and names to `MAX_EVENT_NAME_CHARACTERS`. Returns the same
    object if nothing changes.

    Raises:
        TypeError: A value is not a str, float, int or bool, or a name is not a str.
        ValueError: An int has more than 64 bits.
    """
    max_name_characters = _UNLIMITED_CHARACTERS if keep_full_texts else MAX_EVENT_NAME_CHARACTERS
    max_text_characters = _UNLIMITED_CHARACTERS if keep_full_texts else MAX_CONVERTED_CHARACTERS
    if _is_plain(data, max_name_characters, max_text_characters):
        return data
    plain_data: dict[str, Any] = {}
    for name, value in data.items():
        if not isinstance(name, str) or not isinstance(value, bool | int | float | str):
            raise TypeError(
                f"names of data must be str, and values str, float, int or bool, not {type(value).__name__} for {name!r}"
            )
        if isinstance(value, int) and not -INT64_LIMIT <= value < INT64_LIMIT:
            raise ValueError(f"the datum {name!r} must fit into 64 bits, not {value!r:.60}")
        scalar = to_scalar(value)
        plain_data[str.__str__(name)[:max_name_characters]] = (
            str.__str__(value)[:max_text_characters] if isinstance(value, str) else scalar
        )
    return plain_data


def _is_plain(data: Mapping[Any, Any], max_name_characters: int, max_text_characters: int) -> bool:
    """Return True if all names and values are plain and within the limits, as in most calls, so that nothing is converted."""
    for name, value in data.items():
        value_type = type(value)
        if (type(name) is not str or len(name) > max_name_characters) or not (
            value_type is float
            or value_type is bool
            or (value_type is int and -INT64_LIMIT <= value < INT64_LIMIT)
            or (value_type is str and len(value) <= max_text_characters)
        ):
            return False
    return True


def check_type(type_: str) -> str:
    """Return the type of an event, cut to `MAX_EVENT_NAME_CHARACTERS`. Raises TypeError or ValueError unless it is a non-empty str."""
    if not isinstance(type_, str):
        raise TypeError(f"the type of an event must be str, not {type(type_).__name__}")
    if not type_:
        raise ValueError("the type of an event must not be empty; name the event, such as 'checkpoint.saved'")
    return str.__str__(type_)[:MAX_EVENT_NAME_CHARACTERS]


def check_timestamp(timestamp: Any) -> float:
    """Return a number or a datetime as Unix time; a naive datetime is local time. Raises TypeError or ValueError for other values."""
    try:
        seconds = timestamp.timestamp() if hasattr(timestamp, "timestamp") else timestamp
        if isinstance(seconds, int | float) and not isinstance(seconds, bool) and isfinite(seconds):
            return float(seconds)
    except (OverflowError, OSError):
        pass
    is_number = isinstance(timestamp, int | float) and not isinstance(timestamp, bool)
    error_class = ValueError if is_number or hasattr(timestamp, "timestamp") else TypeError
    raise error_class(
        f"timestamp must be a finite Unix time in seconds or a datetime, not {safe_repr(timestamp)}"
    )


def check_parents(parent_ids: Iterable[str]) -> tuple[str, ...]:
    """Return the first `MAX_PARENTS` ids of the events that caused an event. Raises TypeError unless they are a collection of str."""
    parents = tuple(islice(parent_ids, MAX_PARENTS))
    if isinstance(parent_ids, str) or not all(isinstance(parent, str) for parent in parents):
        raise TypeError(f"parent_ids must be a collection of ids, which are str, not {safe_repr(parent_ids)}")
    return tuple([str.__str__(parent)[:MAX_EVENT_NAME_CHARACTERS] for parent in parents])
