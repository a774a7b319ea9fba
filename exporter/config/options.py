"""Options of configuration files: dataclass fields with documentation, and notations of values."""

from __future__ import annotations

import dataclasses
import enum
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Notation:
    """Textual notation of a value, with `parse(format(value)) == value`."""

    expected: str  # the allowed values in words, such as "a duration such as 15s"
    pattern: str  # of the whole text, in the dialect of JSON Schema
    convert: Callable[[str], Any] = str  # raises ValueError
    format: Callable[[Any], str] = str

    def parse(self, text: str) -> Any:
        """Parse a text. Raises ValueError for an invalid notation."""
        if re.fullmatch(self.pattern, text) is None:
            raise ValueError(text)
        return self.convert(text)


@dataclass(frozen=True, slots=True)
class Range:
    """Inclusive bounds of a number. None leaves a side open."""

    minimum: float | None = None
    maximum: float | None = None

    def contains(self, value: float) -> bool:
        """Return True if a value is within the bounds."""
        is_below = self.minimum is not None and value < self.minimum
        is_above = self.maximum is not None and value > self.maximum
        return not (is_below or is_above)


@dataclass(frozen=True, slots=True)
class Secret:
    """Annotation of a value that messages and the printed configuration must not contain."""


_MILLISECONDS_BY_UNIT = {"w": 604_800_000, "d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}
# Each unit at most once, from the longest to the shortest, as in Prometheus. Nine digits keep the sum exact in a float.
_DURATION_PATTERN = rf"^(0|(?=[0-9]){''.join(f'([0-9]{{1,9}}{unit})?' for unit in _MILLISECONDS_BY_UNIT)})$"


def _seconds(text: str) -> float:
    """Return the seconds of a text that matches the pattern of durations."""
    # The sum of whole milliseconds makes 1s100ms equal to 1.1.
    parts = re.findall(r"([0-9]+)(ms|[wdhms])", text)
    return sum(int(count) * _MILLISECONDS_BY_UNIT[unit] for count, unit in parts) / 1000


def format_duration(seconds: float) -> str:
    """Return the shortest text that `parse_duration` parses to the same duration, with a resolution of 1 ms."""
    remaining_milliseconds = round(seconds * 1000)
    text = ""
    for unit, unit_milliseconds in _MILLISECONDS_BY_UNIT.items():
        count, remaining_milliseconds = divmod(remaining_milliseconds, unit_milliseconds)
        text += f"{count}{unit}" if count else ""
    return text or "0s"


_DURATION_NOTATION = Notation(
    "a duration such as 500ms, 15s, 1m30s or 1h", _DURATION_PATTERN, _seconds, format_duration
)
parse_duration: Callable[[str], float] = _DURATION_NOTATION.parse

Duration = Annotated[float, _DURATION_NOTATION]
"""Duration in seconds, written with units."""

Glob = Annotated[str, Notation("a pattern such as training.* (without spaces)", r"^\S{1,200}$")]
"""Shell-style pattern: `*`, `?`, `[…]`."""

Ratio = Annotated[float, Range(0, 1)]
"""Share from 0 to 1."""


# Options of a dataclass --------------------------------------------------------------------------------


_Default = enum.Enum("_Default", "REQUIRED UNCHANGED")
REQUIRED: Any = _Default.REQUIRED
"""Marker of a missing default, of an option that must be set, or of a missing example."""
UNCHANGED: Any = _Default.UNCHANGED
"""Default of an option that changes nothing unless it is set. None can be a setting, such as no time limit."""


def option(default: Any, help: str, *, example: Any = REQUIRED, restart: bool = False) -> Any:
    """Return a documented dataclass field. `REQUIRED` means no default or no example.

    The example replaces an empty default in the documentation. With `restart`, a change takes effect at the next start.
    """
    default_argument = {} if default is REQUIRED else {"default": default}
    return dataclasses.field(
        **default_argument, metadata={"help": help, "example": example, "restart": restart}
    )


@dataclass(frozen=True, slots=True)
class Option:
    """Key of a mapping, as a dataclass field defines it (see `option`)."""

    key: str  # as written in YAML
    name: str  # the dataclass's field
    hint: Any  # type with annotations
    default: Any
    help: str
    example: Any = REQUIRED
    restart: bool = False


def options_of(cls: type, instance: object = None) -> tuple[Option, ...]:
    """Return the options of a dataclass in the order of its fields. The values of an *instance* replace the defaults."""
    hints = typing.get_type_hints(cls, include_extras=True)
    options = []
    for field in dataclasses.fields(cls):
        default: Any = REQUIRED
        if isinstance(instance, cls):
            default = getattr(instance, field.name)
        elif field.default is not dataclasses.MISSING:
            default = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        metadata = field.metadata
        options.append(
            Option(
                key=metadata.get("key", field.name),
                name=field.name,
                hint=hints[field.name],
                default=default,
                help=metadata.get("help", ""),
                example=metadata.get("example", REQUIRED),
                restart=metadata.get("restart", False),
            )
        )
    return tuple(options)


def unwrap(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the type of a hint without its annotations, and the annotations."""
    if get_origin(hint) is Annotated:
        base, *annotations = get_args(hint)
        return base, tuple(annotations)
    return hint, ()


def annotation_of(hint: Any, annotation_class: type[_T]) -> _T | None:
    """Return the annotation of a class, such as `Range`, or None."""
    return next(
        (annotation for annotation in unwrap(hint)[1] if isinstance(annotation, annotation_class)), None
    )


def is_union(hint: Any) -> bool:
    """Return True if a type is a union, in either spelling."""
    return get_origin(hint) in (Union, types.UnionType)
