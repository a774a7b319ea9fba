"""What a configuration file may hold: the options of a dataclass, and the ways of writing their values.

Used in the sidecar by the dataclasses that define a configuration, by `loader`, which fills them, and by
what is generated from them (JSON Schema, example, documentation). Pure values; no file, no YAML, no threads.

A field's type may be annotated with `Duration`, `Size`, `Glob`, `Ratio`, `Secret`, `Range` or `Keys`. Its
metadata may hold `help` (documentation), `key` (the YAML key, where that cannot be a Python name), `example` (a
value to show) and `restart` (a change takes effect only when the process starts).
"""

from __future__ import annotations

import dataclasses
import enum
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin


@dataclass(frozen=True, slots=True)
class Notation:
    """A way of writing a value as text.

    Attributes:
        expected: What is allowed, in words, with an article.
        pattern: Regular expression of the whole text, in the dialect of JSON Schema.
        parse: Text into value; raises ValueError.
        format: Value into text; `parse(format(value)) == value`.
    """

    expected: str
    pattern: str
    parse: Callable[[str], Any]
    format: Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a number, both inclusive; None leaves a side open."""

    minimum: float | None = None
    maximum: float | None = None

    def holds(self, value: float) -> bool:
        """Whether a value is inside."""
        return (self.minimum is None or value >= self.minimum) and (
            self.maximum is None or value <= self.maximum
        )


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that a mapping may have.

    Attributes:
        defaults: Each key's default: a dataclass instance, which also is its type.
        help: Each key's documentation.
    """

    defaults: Mapping[str, Any]
    help: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hidden:
    """Marks a value that no message may show."""


_UNITS_SECONDS = {"w": 604800.0, "d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_UNITS_BYTES = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
# Each unit once, from the longest to the shortest, as in Prometheus; nine digits keep the float exact.
_DURATION = (
    r"^(0|(?=[0-9])([0-9]{1,9}w)?([0-9]{1,9}d)?([0-9]{1,9}h)?([0-9]{1,9}m)?([0-9]{1,9}s)?([0-9]{1,9}ms)?)$"
)
_SIZE = rf"^(0|[0-9]{{1,9}}({'|'.join(_UNITS_BYTES)}))$"
_GLOB = r"^\S{1,200}$"


def parse_duration(text: str) -> float:
    """Seconds of `500ms`, `15s`, `1m30s`, `1h`.

    Raises:
        ValueError: It is not written so.
    """
    if re.fullmatch(_DURATION, text) is None:
        raise ValueError(text)
    # Summed as whole milliseconds: 1s100ms is 1.1 exactly as a person writes it.
    parts = re.findall(r"([0-9]+)(ms|[wdhms])", text)
    return sum(int(count) * round(_UNITS_SECONDS[unit] * 1000) for count, unit in parts) / 1000


def format_duration(seconds: float) -> str:
    """The shortest text that `parse_duration` reads back, to the millisecond."""
    rest = round(seconds * 1000)
    text = ""
    for unit, length in _UNITS_SECONDS.items():
        count, rest = divmod(rest, round(length * 1000))
        text += f"{count}{unit}" if count else ""
    return text or "0s"


def parse_size(text: str) -> int:
    """Bytes of `512B`, `64KiB`, `10MB`.

    Raises:
        ValueError: It is not written so.
    """
    if re.fullmatch(_SIZE, text) is None:
        raise ValueError(text)
    digits = text.rstrip("BkKMGTi")
    return int(digits) * _UNITS_BYTES.get(text[len(digits) :], 0)


def format_size(count: int) -> str:
    """Text that `parse_size` reads back, in the largest unit that divides the count."""
    for unit, length in sorted(_UNITS_BYTES.items(), key=lambda item: -item[1]):
        if count and count % length == 0:
            return f"{count // length}{unit}"
    return "0B"


def _parse_glob(text: str) -> str:
    if re.fullmatch(_GLOB, text) is None:
        raise ValueError(text)
    return text


Duration = Annotated[
    float,
    Notation("a duration such as 500ms, 15s, 1m30s or 1h", _DURATION, parse_duration, format_duration),
]
"""Seconds, written with units."""

Size = Annotated[int, Notation("a size such as 512B, 64KiB or 10MB", _SIZE, parse_size, format_size)]
"""Bytes, written with a unit."""

Glob = Annotated[str, Notation("a pattern such as training.* (without spaces)", _GLOB, _parse_glob, str)]
"""A shell-style pattern: `*`, `?`, `[…]`."""

Ratio = Annotated[float, Range(0, 1)]
"""A share of one."""

Secret = Annotated[str, Hidden()]
"""Text that no message shows."""


# Options of a dataclass --------------------------------------------------------------------------------


class _Required(enum.Enum):
    REQUIRED = "required"


REQUIRED: Any = _Required.REQUIRED
"""The default of an option that has none."""


@dataclass(frozen=True, slots=True)
class Option:
    """One key of a mapping, as its dataclass defines it.

    Attributes:
        key: As written in YAML.
        name: The dataclass's field.
        hint: Its type, with annotations.
        default: Its default value, or `REQUIRED`.
        help: Its documentation.
        example: A value to show where the default shows nothing; `REQUIRED` for none.
        restart: Whether a change takes effect only when the process starts.
    """

    key: str
    name: str
    hint: Any
    default: Any
    help: str
    example: Any = REQUIRED
    restart: bool = False


def options_of(cls: type, instance: object = None) -> tuple[Option, ...]:
    """The keys that a mapping for `cls` may have, in order.

    Args:
        cls: A dataclass.
        instance: Where it is one of `cls`, its values are the defaults.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    found = []
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        default: Any = REQUIRED
        if isinstance(instance, cls):
            default = getattr(instance, field.name)
        elif field.default is not dataclasses.MISSING:
            default = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        about = field.metadata
        option = Option(
            key=about.get("key", field.name),
            name=field.name,
            hint=hints[field.name],
            default=default,
            help=about.get("help", ""),
            example=about.get("example", REQUIRED),
            restart=about.get("restart", False),
        )
        found.append(option)
    return tuple(found)


def unwrap(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without its annotations, and the annotations."""
    if get_origin(hint) is Annotated:
        base, *marks = get_args(hint)
        return base, tuple(marks)
    return hint, ()


def is_union(hint: Any) -> bool:
    """Whether a type is a union, in either spelling."""
    return get_origin(hint) in (Union, types.UnionType)
