"""Attributes and moments: what spans and events are made of.

Used in the training process, by any thread; a change of a collection is one step in C, so a reader on another thread
sees it whole or not at all. The classes are one-logger's, name for name. Nothing here raises for a value that cannot
be exported: such a value becomes its text.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real

from exporter.errors import OneLoggerError
from exporter.training.names import name_of
from exporter.training.reports import report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeAlias

    from typing_extensions import Self

    AttributeValue: TypeAlias = str | bool | int | float | list[str] | list[bool] | list[int] | list[float]
else:
    AttributeValue = str | bool | int | float | list


LONGEST_SHOWN = 500
DEEPEST = 4
"""Collections inside of each other that are told; one may contain itself."""
_PRINTED = frozenset({str, int, float, bool, type(None), bytes})

__all__ = [
    "Attribute",
    "AttributeValue",
    "Attributes",
    "OneLoggerError",
    "TracingTimestamp",
    "Unusable",
    "all_are",
    "assert_that",
    "moment",
    "plain_value",
    "shown",
]


def assert_that(condition: object, message: str) -> None:
    """Raise `OneLoggerError` unless the condition holds.

    Raises:
        OneLoggerError: It does not.
    """
    if not condition:
        raise OneLoggerError(message)


def plain_value(value: object) -> Any:
    """Make what an attribute may hold of any value, without running code that could wait for a device; never raises.

    Returns:
        A str, bool, int or float, a homogeneous list of one of them, or None. Numbers of numpy become Python's; a
        mixed list becomes one of texts, a dictionary a list of `key:value`; of an object that lives on a device,
        such as a tensor, only its type is told, since its text would have to be fetched.
    """
    return _plain(value, 0)


def _plain(value: object, depth: int) -> Any:
    kind = type(value)
    if kind is str or kind is int or kind is float or kind is bool or value is None:
        return value
    try:
        if isinstance(value, enum.Enum):
            return _plain(value.value, depth)
        if depth > DEEPEST and isinstance(value, (list, tuple, set, frozenset, Mapping)):
            return f"<{kind.__name__}>"
        if isinstance(value, (list, tuple, set, frozenset)):
            items = [_plain(item, depth + 1) for item in value]
            kinds = {type(item) for item in items}
            if len(kinds) <= 1 and not kinds & {list, type(None)}:
                return items
            if kinds == {int, float}:
                return [float(item) for item in items]
            return [str(item) for item in items]
        if isinstance(value, Mapping):
            return [
                f"{_plain(key, depth + 1)}:{_plain(item, depth + 1)}" for key, item in dict(value).items()
            ]
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, Integral):
            return int(value)
        if isinstance(value, Real):
            return float(value)
        if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():  # its truth values and dates
            return plain_value(value.item())  # type: ignore[attr-defined]  # every scalar of numpy has it
        return f"<{kind.__name__}>" if hasattr(kind, "device") else str(value)
    except Exception:  # noqa: BLE001  # the user's own `__str__`, `__int__`, `__float__`
        return f"<{kind.__name__}>"


def all_are(pairs: Iterable[tuple[object, type | tuple[type, ...]]]) -> bool:
    """Whether the job passed what the signature says; one-logger gives None where it is off, and duck types come as well."""
    return all(isinstance(value, kind) for value, kind in pairs)


def shown(value: object) -> str:
    """Print a value for a message, without running the job's code; never raises, never waits for a device.

    Returns:
        What Python prints of texts, numbers, and short collections of them; of an exception its type and text; of
        anything else its type.
    """
    if isinstance(value, BaseException):
        try:
            return f"{type(value).__name__}: {value}"[:LONGEST_SHOWN]
        except Exception:  # noqa: BLE001  # the user's own `__str__`
            return type(value).__name__
    items: Iterable[object] = (value,)
    if type(value) in {list, tuple, set, frozenset}:
        items = list(value)  # type: ignore[call-overload]  # one of these
    elif type(value) is dict:
        items = [*value, *value.values()]
    if type(value) is Unusable:
        return value.text
    try:
        if all(type(item) in _PRINTED or isinstance(item, enum.Enum) for item in items):
            return repr(value)[:LONGEST_SHOWN]
    except Exception:  # noqa: BLE001  # an enumeration's own `__repr__`; or a whole number of too many digits
        return f"<{type(value).__name__}>"
    return f"<{type(value).__name__}>"


class Unusable:
    """What a job has passed where a number or a text belongs, and is neither.

    Attributes:
        text: How it is shown.
    """

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class TracingTimestamp:
    """A moment on two clocks: the wall's for people, the performance counter's for durations."""

    __slots__ = ("_seconds_since_epoch", "_perf_counter_seconds")

    def __init__(self, seconds_since_epoch: float, perf_counter_seconds: float) -> None:
        self._seconds_since_epoch = seconds_since_epoch
        self._perf_counter_seconds = perf_counter_seconds

    @property
    def seconds_since_epoch(self) -> float:
        """Unix seconds."""
        return self._seconds_since_epoch

    @property
    def milliseconds_since_epoch(self) -> int:
        """Unix time in whole milliseconds, rounded down; 0 of what is not finite."""
        seconds = self._seconds_since_epoch
        return int(seconds * 1000) if math.isfinite(seconds) else 0

    @property
    def perf_counter_seconds(self) -> float:
        """Seconds of `time.perf_counter`, from an unknown origin."""
        return self._perf_counter_seconds

    @classmethod
    def now(
        cls,
        wall_clock: Callable[[], float] = time.time,
        perf_clock: Callable[[], float] = time.perf_counter,
    ) -> Self:
        """Take both clocks."""
        return cls(wall_clock(), perf_clock())

    @classmethod
    def for_timestamp(
        cls,
        timestamp_sec: float,
        perf_counter: float | None = None,
        validate_timestamp: bool = True,
        *,
        wall_clock: Callable[[], float] = time.time,
        perf_clock: Callable[[], float] = time.perf_counter,
    ) -> Self:
        """Make one of a time that was noted elsewhere.

        Args:
            timestamp_sec: Unix seconds; of any age. What lies ahead of now, or is not finite, becomes now.
            perf_counter: Of the same moment, if it was noted too; else it is inferred from the wall clock.
            validate_timestamp: False takes a time that lies ahead as it is.
            wall_clock: Unix seconds.
            perf_clock: Seconds from an unknown origin.
        """
        wall = wall_clock()
        if not math.isfinite(timestamp_sec) or (validate_timestamp and timestamp_sec > wall):
            timestamp_sec, perf_counter = wall, None
        if perf_counter is None:
            perf_counter = perf_clock() - (wall - timestamp_sec)
        return cls(timestamp_sec, perf_counter)

    def to_json(self) -> dict[str, float]:
        """Give both as a dictionary."""
        return {
            "seconds_since_epoch": self._seconds_since_epoch,
            "perf_counter_seconds": self._perf_counter_seconds,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read back what `to_json` gave.

        Raises:
            OneLoggerError: One of the two is missing.
        """
        assert_that(
            data and "seconds_since_epoch" in data and "perf_counter_seconds" in data,
            f"TracingTimestamp must have seconds_since_epoch and perf_counter_seconds: {data}",
        )
        return cls(data["seconds_since_epoch"], data["perf_counter_seconds"])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TracingTimestamp) and (
            self._seconds_since_epoch == other._seconds_since_epoch
            and self._perf_counter_seconds == other._perf_counter_seconds
        )

    def __hash__(self) -> int:
        return hash((self._seconds_since_epoch, self._perf_counter_seconds))

    def __repr__(self) -> str:
        return f"TracingTimestamp({self._seconds_since_epoch!r}, {self._perf_counter_seconds!r})"


def moment(given: object) -> TracingTimestamp:
    """Take what a job passes as a time; None, and anything that is none, is now."""
    if isinstance(given, TracingTimestamp):
        return given
    if given is not None:
        report("TracingTimestamp", "no_timestamp", f"a TracingTimestamp, not {shown(given)}")
    return TracingTimestamp.now()


class Attribute:
    """A name and one value."""

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: AttributeValue) -> None:
        self.name: str = name if type(name) is str else name_of(name)
        self.value: Any = plain_value(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Attribute) and self.name == other.name and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"Attribute(name={self.name!r}, value={self.value!r})"


class Attributes(dict[str, Attribute]):
    """The attributes of one span or event, by name."""

    __slots__ = ()

    def __init__(self, dictionary: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        for name, value in ({} if dictionary is None else dictionary).items():
            if isinstance(value, Attribute):  # of another collection
                self.add_attribute(value)
            else:
                self.add(name, value)

    def add(self, name: str, value: AttributeValue) -> Self:
        """Set one, and give the whole."""
        self.add_attribute(Attribute(name, value))
        return self

    def add_attribute(self, attribute: Attribute) -> Attribute:
        """Set one."""
        self[attribute.name] = attribute
        return attribute

    def add_attributes(self, other_attributes: Attributes) -> None:
        """Set all of another's."""
        self.update(Attributes.of(other_attributes))

    @classmethod
    def of(cls, given: object) -> Attributes:
        """Take what a job passes as attributes: a collection as it is, a mapping of values, None for no attributes.

        Anything else is a misuse, and taken for none.
        """
        if isinstance(given, Attributes):
            return given
        try:
            if given is None or isinstance(given, Mapping):
                return cls(given)
        except Exception:  # noqa: BLE001  # a mapping of the job's own
            return cls()
        report("Attributes", "no_attributes", f"Attributes, not {shown(given)}")
        return cls()

    def copied(self) -> Self:
        """Copy it, of the same class; safe while another thread adds to it."""
        copy = type(self)()
        copy.update(self)  # one step in C
        return copy

    def to_json(self) -> dict[str, Any]:
        """Give name → value."""
        return {attribute.name: attribute.value for attribute in self.values()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read back what `to_json` gave."""
        return cls(data)

    @classmethod
    def merge(cls, attributes: Attributes | None = None, other: Attributes | None = None) -> Self:
        """Join two into a new one of this class; where both have a name, the second's counts."""
        merged = cls()
        merged.update(attributes or {})
        merged.update(other or {})
        return merged

    def get_bool_value(self, attribute_name: str) -> bool | None:
        """Give a truth value; None where it is absent.

        Raises:
            OneLoggerError: It is something else.
        """
        found: bool | None = self._value(attribute_name, (bool,), "a boolean")
        return found

    def get_int_value(self, attribute_name: str) -> int | None:
        """Give an integer; None where it is absent.

        Raises:
            OneLoggerError: It is something else.
        """
        found: int | None = self._value(attribute_name, (int,), "an integer")
        return found

    def get_float_value(self, attribute_name: str) -> float | None:
        """Give a number; None where it is absent.

        Raises:
            OneLoggerError: It is something else.
        """
        found: float | None = self._value(attribute_name, (int, float), "a float")
        return found

    def get_str_value(self, attribute_name: str) -> str | None:
        """Give a text; None where it is absent.

        Raises:
            OneLoggerError: It is something else.
        """
        found: str | None = self._value(attribute_name, (str,), "a string")
        return found

    def _value(self, name: str, kinds: tuple[type, ...], what: str) -> Any:
        found = self.get(name)
        if found is None:
            return None
        assert_that(isinstance(found.value, kinds), f"Attribute {name} must be {what}. Got {found.value}.")
        return found.value
