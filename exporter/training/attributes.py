"""Attributes and timestamps of spans and events, compatible with the classes of one-logger.

A change of a collection is a single operation in C, so that another thread sees the collection before or after the change.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from exporter.errors import OneLoggerError
from exporter.recording.conversion import AttributeValue as AttributeValue  # noqa: PLC0414  # part of this module's public names
from exporter.recording.conversion import safe_repr, to_attribute, to_name
from exporter.recording.signal_safety import is_from_signal_handler
from exporter.training.misuse import report

SpanName = enum.Enum | str
EventName = enum.Enum | str

MAX_FUTURE_SECONDS = 600.0
"""Tolerance for times in the future, as in one-logger, because the clocks of a cluster's nodes differ."""


class StrEnum(str, enum.Enum):
    """Enumeration whose members are strings, like `enum.StrEnum` of Python 3.11."""

    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]  # the same function with a positional argument
    __hash__ = str.__hash__


def assert_that(condition: object, message: str) -> None:
    """Raise `OneLoggerError` unless the condition holds."""
    if not condition:
        raise OneLoggerError(message)


@dataclass(frozen=True, slots=True)
class TracingTimestamp:
    """Timestamp on two clocks: wall time (Unix seconds), and `time.perf_counter` for durations."""

    seconds_since_epoch: float
    perf_counter_seconds: float

    @property
    def milliseconds_since_epoch(self) -> int:
        """Unix time in whole milliseconds, rounded down; 0 if not finite."""
        seconds = self.seconds_since_epoch
        return int(seconds * 1000) if math.isfinite(seconds) else 0

    @classmethod
    def now(cls) -> TracingTimestamp:
        """Return the current time of both clocks."""
        return cls(time.time(), time.perf_counter())

    @classmethod
    def for_timestamp(
        cls,
        timestamp_sec: float,
        perf_counter: float | None = None,
        validate_timestamp: bool = True,
    ) -> TracingTimestamp:
        """Return the timestamp of a Unix time. *perf_counter* is the performance counter at that time.

        Without *perf_counter*, the performance counter is estimated from the current time of both clocks. The current time replaces a
        time that is not finite. If *validate_timestamp* is true, it also replaces a time more than ten minutes ahead.
        """
        wall = time.time()
        if not math.isfinite(timestamp_sec) or (
            validate_timestamp and timestamp_sec > wall + MAX_FUTURE_SECONDS
        ):
            timestamp_sec, perf_counter = wall, None
        if perf_counter is None:
            perf_counter = time.perf_counter() - (wall - timestamp_sec)
        return cls(timestamp_sec, perf_counter)

    def to_json(self) -> dict[str, float]:
        """Return both clocks as a dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TracingTimestamp:
        """Return the timestamp of a `to_json` dictionary. Raises OneLoggerError if a clock is missing."""
        names = ("seconds_since_epoch", "perf_counter_seconds")
        is_complete = data and all(name in data for name in names)
        assert_that(is_complete, f"TracingTimestamp must have {' and '.join(names)}: {data}")
        return cls(*(data[name] for name in names))


def to_timestamp(value: object) -> TracingTimestamp:
    """Return a timestamp unchanged, and the current time for any other object. An object other than None is reported as misuse."""
    if type(value) is TracingTimestamp:
        return value
    if value is not None:
        report("TracingTimestamp", "no_timestamp", f"a TracingTimestamp, not {safe_repr(value)}")
    return TracingTimestamp.now()


@dataclass(slots=True)
class Attribute:
    """Attribute of a span or event. The constructor converts the name to a str and the value to a plain value."""

    name: str
    value: Any

    def __post_init__(self) -> None:
        self.name = to_name(self.name)
        self.value = to_attribute(self.value)

    def __hash__(self) -> int:
        return hash(self.name)


class Attributes(dict[str, Attribute]):
    """Attributes of a span or event, by name."""

    def __init__(self, dictionary: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        for name, value in (dictionary or {}).items():
            self.add_attribute(value if type(value) is Attribute else Attribute(name, value))

    def get_bool_value(self, attribute_name: str) -> bool | None:
        """Return a boolean, or None if absent. Raises OneLoggerError for other types."""
        return self._checked_value(attribute_name, (bool,), "a boolean")  # type: ignore[no-any-return]  # as checked

    def get_int_value(self, attribute_name: str) -> int | None:
        """Return an integer or a bool, or None if absent. Raises OneLoggerError for other types."""
        return self._checked_value(attribute_name, (int,), "an integer")  # type: ignore[no-any-return]  # as checked

    def get_float_value(self, attribute_name: str) -> float | None:
        """Return an integer, float or bool, or None if absent. Raises OneLoggerError for other types."""
        return self._checked_value(attribute_name, (int, float), "a float")  # type: ignore[no-any-return]  # as checked

    def get_str_value(self, attribute_name: str) -> str | None:
        """Return a string, or None if absent. Raises OneLoggerError for other types."""
        return self._checked_value(attribute_name, (str,), "a string")  # type: ignore[no-any-return]  # as checked

    def _checked_value(self, name: str, kinds: tuple[type, ...], expected: str) -> Any:
        attribute = self.get(name)
        if attribute is None:
            return None
        assert_that(
            isinstance(attribute.value, kinds), f"Attribute {name} must be {expected}. Got {attribute.value}."
        )
        return attribute.value

    def add(self, name: str, value: AttributeValue) -> Attributes:
        """Set an attribute. Return this collection."""
        self.add_attribute(Attribute(name, value))
        return self

    def add_attribute(self, attribute: Attribute) -> Attribute:
        """Set and return an attribute."""
        self[attribute.name] = attribute
        return attribute

    def add_attributes(self, other_attributes: Attributes) -> None:
        """Set attributes from another mapping."""
        self.update(Attributes.of(other_attributes))

    @classmethod
    def of(cls, value: object) -> Attributes:
        """Return an object of this class unchanged, and the items of another mapping as an object of this class.

        For None, the result has no attributes. Any other object is reported as misuse, and the result has no attributes either.
        """
        if issubclass(type(value), Attributes):
            return value  # type: ignore[return-value]  # a subclass, as checked by `issubclass`
        try:
            if value is None or isinstance(value, Mapping):
                return cls(value)
        except Exception as error:  # the mapping may be of a class of the job
            if is_from_signal_handler(error):
                raise
        report("Attributes", "no_attributes", f"Attributes, not {safe_repr(value)}")
        return cls()

    def copied(self) -> Attributes:
        """Return a copy of the same class. Other threads may add attributes during the call."""
        return self.merge(self)

    def to_json(self) -> dict[str, Any]:
        """Return the values by name."""
        return {attribute.name: attribute.value for attribute in self.values()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Attributes:
        """Return the attributes of a `to_json` dictionary."""
        return cls(data)

    @classmethod
    def merge(cls, attributes: Attributes | None = None, other: Attributes | None = None) -> Attributes:
        """Return a new collection with the attributes of both. If both have a name, *other* takes precedence."""
        merged = cls()
        merged.update(attributes or {})  # a single operation in C
        merged.update(other or {})
        return merged
