"""Values that a job passes: numbers and texts of any library, names, moments, and the attributes of spans and events.

Used by any thread; a change of a collection is one step in C, so another thread sees it whole or not at all. Nothing here
raises for a value that cannot be told, runs more of the job's code than a conversion, or waits for a device.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from operator import index
from typing import Any

from exporter.errors import OneLoggerError
from exporter.training.metrics import report

AttributeValue = str | bool | int | float | list[str] | list[bool] | list[int] | list[float]
SpanName = enum.Enum | str
EventName = enum.Enum | str

AHEAD_SECONDS = 600.0
"""How far ahead of now a time that a job gives is believed, as in one-logger: clocks of a cluster differ."""
LONGEST_SHOWN = 500
DEEPEST = 4
"""Collections inside of each other that are told; one may contain itself."""
_PLAIN = frozenset({str, int, float, bool, type(None)})
_PRINTED = _PLAIN | {bytes}


class Name(str, enum.Enum):
    """A member that is its value: equal to it, hashed and printed like it (StrEnum came with Python 3.11)."""

    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]  # the same, with its argument by position
    __hash__ = str.__hash__


def name_of(name: object) -> str:
    """Give the text of a name: an enum's value, a string itself, of anything else its type; never raises."""
    if type(name) is str:
        return name
    found = name.value if isinstance(name, enum.Enum) else name
    return str.__str__(found) if isinstance(found, str) else f"<{type(found).__name__}>"


class Unusable:
    """What a job has passed where a number or a text belongs, and is neither; `text` is how it is shown."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


def shown(value: object) -> str:
    """Print a value for a message, without running the job's code; of what is no text, number or error, its type."""
    if type(value) is Unusable:
        return value.text
    try:
        if isinstance(value, BaseException):
            return f"{type(value).__name__}: {value}"[:LONGEST_SHOWN]
        items: Iterable[object] = (value,)
        if type(value) in {list, tuple, set, frozenset}:
            items = list(value)  # type: ignore[call-overload]  # one of these
        elif type(value) is dict:
            items = [*value, *value.values()]
        if all(type(item) in _PRINTED or isinstance(item, enum.Enum) for item in items):
            return repr(value)[:LONGEST_SHOWN]
    except Exception:  # noqa: BLE001  # the job's own `__str__`; or a whole number of too many digits
        return type(value).__name__ if isinstance(value, BaseException) else f"<{type(value).__name__}>"
    return f"<{type(value).__name__}>"


def taken(value: object) -> object:
    """Take a number or a text of any library: a str, int, float or bool of the same value, None, else `Unusable`."""
    if type(value) in _PLAIN:
        return value
    try:
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            return int.__int__(value)
        if isinstance(value, float):
            return float.__float__(value)
        if not is_tensor(value) or getattr(value.device, "type", "") == "cpu":  # type: ignore[attr-defined]
            try:
                return int(index(value))  # type: ignore[arg-type]  # anything may come
            except TypeError:  # it is no whole number
                return float(value)  # type: ignore[arg-type]  # likewise
    except Exception:  # noqa: BLE001  # the code of whoever made it
        return Unusable(shown(value))
    return Unusable(shown(value))  # its value would have to be waited for


def is_tensor(value: object) -> bool:
    """Tell whether it lives on a device as torch's tensors do, so that its value may have to be waited for."""
    try:
        return type(getattr(value, "device", "")) is not str  # numpy's says "cpu"
    except Exception:  # noqa: BLE001  # the code of whoever made it
        return True


def plain_value(value: object, depth: int = 0) -> Any:
    """Make what an attribute may hold of any value; never raises, never waits for a device.

    A str, bool, int or float, a homogeneous list of one of them, or None. Numbers of numpy become Python's; a mixed list
    becomes one of texts, a dictionary a list of `key:value`; of an object that lives on a device only its type is told.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    try:
        if isinstance(value, enum.Enum):
            return plain_value(value.value, depth)
        if depth > DEEPEST and isinstance(value, (list, tuple, set, frozenset, Mapping)):
            return f"<{kind.__name__}>"
        if isinstance(value, (list, tuple, set, frozenset)):
            items = [plain_value(item, depth + 1) for item in value]
            kinds = {type(item) for item in items}
            if len(kinds) <= 1 and not kinds & {list, type(None)}:
                return items
            return [float(item) if kinds == {int, float} else str(item) for item in items]
        if isinstance(value, Mapping):
            pairs = dict(value).items()
            return [f"{plain_value(key, depth + 1)}:{plain_value(item, depth + 1)}" for key, item in pairs]
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


def assert_that(condition: object, message: str) -> None:
    """Raise `OneLoggerError` unless the condition holds."""
    if not condition:
        raise OneLoggerError(message)


@dataclass(frozen=True, slots=True)
class TracingTimestamp:
    """A moment on two clocks: the wall's (Unix seconds), and `time.perf_counter`'s for durations."""

    seconds_since_epoch: float
    perf_counter_seconds: float

    @property
    def milliseconds_since_epoch(self) -> int:
        """Unix time in whole milliseconds, rounded down; 0 of what is not finite."""
        seconds = self.seconds_since_epoch
        return int(seconds * 1000) if math.isfinite(seconds) else 0

    @classmethod
    def now(cls) -> TracingTimestamp:
        """Take both clocks."""
        return cls(time.time(), time.perf_counter())

    @classmethod
    def for_timestamp(
        cls,
        timestamp_sec: float,
        perf_counter: float | None = None,
        validate_timestamp: bool = True,
    ) -> TracingTimestamp:
        """Make one of a Unix time that was noted elsewhere, of any age, and of the performance counter then, if known.

        What is not finite, or lies more than ten minutes ahead (unless that is not validated), becomes now.
        """
        wall = time.time()
        if not math.isfinite(timestamp_sec) or (validate_timestamp and timestamp_sec > wall + AHEAD_SECONDS):
            timestamp_sec, perf_counter = wall, None
        if perf_counter is None:
            perf_counter = time.perf_counter() - (wall - timestamp_sec)
        return cls(timestamp_sec, perf_counter)

    def to_json(self) -> dict[str, float]:
        """Give both as a dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TracingTimestamp:
        """Read back what `to_json` gave; `OneLoggerError` where one of the two is missing."""
        names = ("seconds_since_epoch", "perf_counter_seconds")
        complete = data and all(name in data for name in names)
        assert_that(complete, f"TracingTimestamp must have {' and '.join(names)}: {data}")
        return cls(*(data[name] for name in names))


def moment(given: object) -> TracingTimestamp:
    """Take what a job passes as a time; None, and anything that is none, is now."""
    if isinstance(given, TracingTimestamp):
        return given
    if given is not None:
        report("TracingTimestamp", "no_timestamp", f"a TracingTimestamp, not {shown(given)}")
    return TracingTimestamp.now()


@dataclass(slots=True)
class Attribute:
    """A name and one value."""

    name: str
    value: Any

    def __post_init__(self) -> None:
        self.name = name_of(self.name)
        self.value = plain_value(self.value)

    def __hash__(self) -> int:
        return hash(self.name)


def _getter(kinds: tuple[type, ...], what: str) -> Any:
    """Make the method that gives a value of a kind."""

    def value(self: Attributes, attribute_name: str) -> Any:
        found = self.get(attribute_name)
        if found is None:
            return None
        problem = f"Attribute {attribute_name} must be {what}. Got {found.value}."
        assert_that(isinstance(found.value, kinds), problem)
        return found.value

    value.__doc__ = f"Give {what}; None where it is absent; `OneLoggerError` where it is something else."
    return value


class Attributes(dict[str, Attribute]):
    """The attributes of one span or event, by name."""

    get_bool_value = _getter((bool,), "a boolean")
    get_int_value = _getter((int,), "an integer")
    get_float_value = _getter((int, float), "a float")
    get_str_value = _getter((str,), "a string")

    def __init__(self, dictionary: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        for name, value in (dictionary or {}).items():
            self.add_attribute(value if isinstance(value, Attribute) else Attribute(name, value))

    def add(self, name: str, value: AttributeValue) -> Attributes:
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
        """Take what a job passes as attributes: a collection as it is, a mapping; all but None is else a misuse."""
        if isinstance(given, Attributes):
            return given
        try:
            if given is None or isinstance(given, Mapping):
                return cls(given)
            report("Attributes", "no_attributes", f"Attributes, not {shown(given)}")
        except Exception:  # noqa: BLE001, S110  # a mapping of the job's own
            pass
        return cls()

    def copied(self) -> Attributes:
        """Copy it, of the same class; safe while another thread adds to it."""
        return self.merge(self)

    def to_json(self) -> dict[str, Any]:
        """Give name → value."""
        return {attribute.name: attribute.value for attribute in self.values()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Attributes:
        """Read back what `to_json` gave."""
        return cls(data)

    @classmethod
    def merge(cls, attributes: Attributes | None = None, other: Attributes | None = None) -> Attributes:
        """Join two into a new one of this class; where both have a name, the second's counts."""
        merged = cls()
        merged.update(attributes or {})  # one step in C
        merged.update(other or {})
        return merged
