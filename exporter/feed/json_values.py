"""Conversion of JSON values to the types of the feed contract, with limits of texts and collections.

Used in the sidecar. A converter returns a value of its type, or raises `FeedFormatError` or one of the errors that `decoder` converts
to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from math import isfinite
from types import NoneType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from exporter.errors import FeedFormatError
from exporter.feed.encoder import MAX_COUNT
from exporter.recording.values import Aggregation

MAX_TEXT_CHARACTERS = 4096
"""Maximum number of characters of a text."""
MAX_ITEMS = 5000
"""Maximum number of items of a list or mapping, except lists of Stats. The longest list of a writer has 2,100: the phases of a
second."""

Convert = Callable[[Any], Any]

_AGGREGATIONS = {aggregation.value: aggregation for aggregation in Aggregation}


def refuse(message: str) -> NoReturn:
    """Raise `FeedFormatError` for invalid content."""
    raise FeedFormatError(message, reason="content")


def to_object(value: object) -> dict[str, Any]:
    """Return *value* if the value is a JSON object."""
    return value if type(value) is dict else refuse(f"expected an object, found {type(value).__name__}")


def to_list(value: object) -> list[Any]:
    """Return *value* if the value is a JSON list, of any length."""
    return value if type(value) is list else refuse(f"expected a list, found {type(value).__name__}")


def to_count(value: object) -> int:
    """Return *value* if the value is an integer from 0 to `MAX_COUNT`. A Boolean is refused, although it is an `int` in Python."""
    return _integer(value) if type(value) is int and value >= 0 else refuse("not a non-negative integer")


def to_number(value: object) -> float:
    """Return *value* as a float if the value is a finite number. A Boolean is refused."""
    if (type(value) is not float and type(value) is not int) or not isfinite(value):
        refuse("not a finite number")
    return float(value)


def check_text(text: str, maximum: int, subject: str) -> None:
    """Raise `FeedFormatError` if a text is longer than *maximum* characters."""
    if len(text) > maximum:
        refuse(f"{subject} has {len(text)} characters; at most {maximum} are allowed")


def check_size(count: int, maximum: int, unit: str) -> None:
    """Raise `FeedFormatError` if *count* is above *maximum*."""
    if count > maximum:
        refuse(f"{count} {unit}; at most {maximum} are allowed")


def converter(hint: Any) -> Convert:
    """Return the function that converts a JSON value to a type of the contract."""
    arguments, origin = get_args(hint), get_origin(hint)
    if NoneType in arguments:
        convert = converter(next(argument for argument in arguments if argument is not NoneType))
        return lambda body: None if body is None else convert(body)
    if isinstance(hint, type) and issubclass(hint, tuple):  # a NamedTuple
        item_converters = tuple(field_converters(hint).values())
        return lambda body: hint(
            *[convert_item(value) for convert_item, value in zip(item_converters, to_list(body), strict=True)]
        )
    if origin is tuple and arguments[-1] is Ellipsis:
        convert = converter(arguments[0])
        return lambda body: tuple(map(convert, _short_list(body)))
    if origin is tuple:
        converters = tuple(map(converter, arguments))
        return lambda body: tuple(
            [convert_item(value) for convert_item, value in zip(converters, to_list(body), strict=True)]
        )
    if origin is frozenset:
        return lambda body: frozenset(
            _AGGREGATIONS[name] for name in _short_list(body) if name in _AGGREGATIONS
        )
    if arguments:
        # A mapping by name, by aggregation (unknown aggregations are ignored), or by a pair, as rows.
        convert = to_count if arguments[1] is int else converter(arguments[1])
        if arguments[0] is str:
            return lambda body: {_text(key): convert(value) for key, value in _short_object(body).items()}
        if arguments[0] is Aggregation:
            return lambda body: {
                aggregation: convert(value)
                for name, value in _short_object(body).items()
                if (aggregation := _AGGREGATIONS.get(name)) is not None
            }
        return lambda body: {
            (_text(first), _text(second)): convert(value) for first, second, value in _short_list(body)
        }
    if is_dataclass(hint):
        converter_by_field = field_converters(hint)
        dataclass_type: Any = hint
        return lambda body: dataclass_type(**convert_fields(to_object(body), converter_by_field))
    converter_by_type: dict[object, Convert] = {
        float: to_number,
        int: _integer,
        str: _text,
        bool: _boolean,
    }
    return converter_by_type[hint]


def field_converters(contract_type: Any, *omitted: str) -> dict[str, Convert]:
    """Return a converter for each field of a dataclass or named tuple, except the omitted fields."""
    hints = get_type_hints(contract_type)
    return {name: converter(hint) for name, hint in hints.items() if name not in omitted}


def convert_fields(body: Mapping[str, Any], converter_by_field: Mapping[str, Convert]) -> dict[str, Any]:
    """Return the converted values of the fields that *body* has. Unknown keys are ignored."""
    return {name: convert(body[name]) for name, convert in converter_by_field.items() if name in body}


def _short_list(value: object) -> list[Any]:
    """Return *value* if the value is a JSON list of at most `MAX_ITEMS` items."""
    items = to_list(value)
    check_size(len(items), MAX_ITEMS, "items")
    return items


def _short_object(value: object) -> dict[str, Any]:
    """Return *value* if the value is a JSON object of at most `MAX_ITEMS` keys."""
    items = to_object(value)
    check_size(len(items), MAX_ITEMS, "keys")
    return items


def _boolean(value: object) -> bool:
    return value if type(value) is bool else refuse("not a Boolean")


def _text(value: object) -> str:
    if type(value) is not str or len(value) > MAX_TEXT_CHARACTERS or "\0" in value:
        refuse(f"not a text of at most {MAX_TEXT_CHARACTERS} characters without NUL")
    value.encode()  # raises for a lone surrogate
    return value


def _integer(value: object) -> int:
    if type(value) is not int or not -MAX_COUNT <= value <= MAX_COUNT:
        refuse("not a 64-bit integer")
    return value
