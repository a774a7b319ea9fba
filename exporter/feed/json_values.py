"""Conversion of JSON values to the contract's types, with limits on every text and collection.

Runs in the sidecar. Each converter returns a value of a single type or raises `FeedFormatError`.
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

MAX_TEXT = 4096
"""Characters of any text."""
MOST_ITEMS = 5000
"""Items of any list or mapping of the contract but the lists of Stats: the longest, a second of phases, has 2,100."""

Convert = Callable[[Any], Any]

_AGGREGATIONS = {each.value: each for each in Aggregation}


def refuse(message: str) -> NoReturn:
    """Raise the error for content that no writer makes."""
    raise FeedFormatError(message, reason="content")


def to_object(found: object) -> dict[str, Any]:
    """Return a JSON object."""
    return found if type(found) is dict else refuse(f"{type(found).__name__} where an object belongs")


def to_list(found: object) -> list[Any]:
    """Return a JSON list of any length."""
    return found if type(found) is list else refuse(f"{type(found).__name__} where a list belongs")


def to_count(found: object) -> int:
    """Return a whole number from 0."""
    return _whole(found) if type(found) is int and found >= 0 else refuse("not a whole number from 0")


def to_number(found: object) -> float:
    """Return a finite number."""
    if (type(found) is not float and type(found) is not int) or not isfinite(found):
        refuse("not a finite number")
    return float(found)


def check_text(text: str, longest: int, what: str) -> None:
    """Raise `FeedFormatError` for a text that is longer than its writer allows."""
    if len(text) > longest:
        refuse(f"{what} of {len(text)} characters, of which {longest} are allowed")


def check_size(items: int, most: int, what: str) -> None:
    """Raise `FeedFormatError` for more items than their writer allows."""
    if items > most:
        refuse(f"{items} {what}, of which {most} are allowed")


def converter(hint: Any) -> Convert:
    """Return the function that converts a JSON value to a type of the contract."""
    inner, origin = get_args(hint), get_origin(hint)
    if NoneType in inner:
        convert = converter(next(each for each in inner if each is not NoneType))
        return lambda found: None if found is None else convert(found)
    if origin is tuple and inner[-1] is Ellipsis:
        convert = converter(inner[0])
        return lambda found: tuple(map(convert, _short_list(found)))
    if origin is tuple:
        converts = tuple(map(converter, inner))
        return lambda found: tuple(
            [each(value) for each, value in zip(converts, to_list(found), strict=True)]
        )
    if origin is frozenset:
        return lambda found: frozenset(
            _AGGREGATIONS[name] for name in _short_list(found) if name in _AGGREGATIONS
        )
    if inner:  # a mapping by name, by aggregation (without those of a later version), or by a pair, in rows
        convert = to_count if inner[1] is int else converter(inner[1])
        if inner[0] is str:
            return lambda found: {_text(key): convert(value) for key, value in _short_object(found).items()}
        if inner[0] is Aggregation:
            return lambda found: {
                known: convert(value)
                for name, value in _short_object(found).items()
                if (known := _AGGREGATIONS.get(name)) is not None
            }
        return lambda found: {
            (_text(one), _text(two)): convert(value) for one, two, value in _short_list(found)
        }
    if is_dataclass(hint):
        table = converters_of(hint)
        make: Any = hint
        return lambda found: make(**convert_fields(to_object(found), table))
    by_type: dict[object, Convert] = {float: to_number, int: _whole, str: _text, bool: _flag}
    return by_type[hint]


def converters_of(of: Any, *without: str) -> dict[str, Convert]:
    """Return a converter for each field of a dataclass."""
    return {name: converter(hint) for name, hint in get_type_hints(of).items() if name not in without}


def convert_fields(body: Mapping[str, Any], table: Mapping[str, Convert]) -> dict[str, Any]:
    """Return the known fields; missing fields keep the default of the contract, unknown keys are ignored."""
    return {name: convert(body[name]) for name, convert in table.items() if name in body}


def _short_list(found: object) -> list[Any]:
    items = to_list(found)
    check_size(len(items), MOST_ITEMS, "items")
    return items


def _short_object(found: object) -> dict[str, Any]:
    items = to_object(found)
    check_size(len(items), MOST_ITEMS, "keys")
    return items


def _flag(found: object) -> bool:
    return found if type(found) is bool else refuse("neither true nor false")


def _text(found: object) -> str:
    if type(found) is not str or len(found) > MAX_TEXT or "\0" in found:
        refuse(f"not a text of at most {MAX_TEXT} characters without NUL")
    found.encode()  # half of a surrogate pair raises
    return found


def _whole(found: object) -> int:
    if type(found) is not int or not -MAX_COUNT <= found <= MAX_COUNT:
        refuse("not a whole number of 64 bits")
    return found
