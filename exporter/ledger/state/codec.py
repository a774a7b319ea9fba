"""Conversion of dataclasses to JSON and back.

Unknown keys are ignored, and a missing key leaves the default of its field, so that a release can read the state of earlier and
later releases. A missing key of a field without a default is an error. A class may restrict the saved fields with `SAVED_FIELDS`. If
a field was renamed, `JSON_KEYS` contains the key that all releases use.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Any, NoReturn, TypeVar, Union, cast, get_args, get_origin, get_type_hints

DecodedT = TypeVar("DecodedT")

MAX_ERROR_CHARACTERS = 200
"""Maximum length of an error's text in a message, because the text may contain a value of the file."""
MAX_VALUE_CHARACTERS = 40
"""Maximum length of a rejected value in a message."""


def to_line(value: object) -> bytes:
    """Return a dataclass as a line of JSON. Raises ValueError for NaN and infinity."""
    return json.dumps(to_json(value), separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def from_line(cls: type[DecodedT], line: bytes) -> DecodedT:
    """Return the value of a class from its JSON. Raises ValueError for invalid JSON and for values of other types."""
    with decoding():
        return cast("DecodedT", from_json(cls, parse(line)))


def parse(content: bytes) -> Any:
    """Return parsed JSON. Raises ValueError, also for deep nesting and for the constants NaN and Infinity."""
    try:
        return json.loads(content, parse_constant=_reject)
    except RecursionError as error:
        raise ValueError("the content is nested too deeply") from error


@contextmanager
def decoding() -> Iterator[None]:
    """Convert the errors that invalid content causes to ValueError."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {str(error)[:MAX_ERROR_CHARACTERS]}") from error


def to_json(value: Any) -> Any:
    """Return a value as JSON types: a dataclass becomes an object, and a mapping with keys other than strings a list of pairs."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: to_json(item) for key, item in value.items()}
        return [[to_json(key), to_json(item)] for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return {field.key: to_json(getattr(value, field.name)) for field in _saved_fields(value.__class__)}


def from_json(annotation: Any, json_value: Any) -> Any:
    """Return the value of an annotated type from JSON types, the inverse of `to_json`.

    Of unions, only `T | None` is supported. A float may be written as an integer; no other value is converted to a different
    scalar type, so a boolean is not an integer. Raises ValueError, or an error that `decoding` converts to ValueError.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in {Union, UnionType}:
        inner_annotation = next(argument for argument in arguments if argument is not NoneType)
        return None if json_value is None else from_json(inner_annotation, json_value)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return tuple(
            [from_json(argument, value) for argument, value in zip(arguments, json_value, strict=True)]
        )
    if origin in {list, tuple}:
        return origin([from_json(arguments[0], item) for item in json_value])
    if origin is not None:  # a mapping
        pairs = json_value.items() if isinstance(json_value, dict) else json_value
        return {from_json(arguments[0], key): from_json(arguments[1], value) for key, value in pairs}
    if isinstance(annotation, type) and issubclass(annotation, tuple):  # a NamedTuple
        item_annotations = get_type_hints(annotation).values()
        return annotation(
            *[from_json(item, value) for item, value in zip(item_annotations, json_value, strict=True)]
        )
    if annotation is float:
        return (
            float(json_value)
            if type(json_value) in {int, float} and isfinite(json_value)
            else _reject(json_value)
        )
    if annotation in {str, int, bool}:
        return json_value if type(json_value) is annotation else _reject(json_value)
    if issubclass(annotation, enum.Enum):
        return annotation(json_value)
    if type(json_value) is list:  # older releases saved some of the dataclasses as lists
        json_value = {
            field.key: value for field, value in zip(_saved_fields(annotation), json_value, strict=False)
        }
    if type(json_value) is not dict:
        _reject(json_value)
    present_fields = [field for field in _saved_fields(annotation) if field.key in json_value]
    return annotation(**{field.name: _field_value(field, json_value[field.key]) for field in present_fields})


def _field_value(field: _SavedField, json_value: Any) -> Any:
    """Return the value of a field. A ValueError names the key."""
    try:
        return from_json(field.annotation, json_value)
    except ValueError as error:
        raise ValueError(f"{field.key}: {error}") from error


def _reject(value: object) -> NoReturn:
    """Raise ValueError for a value of the wrong type, or out of range."""
    raise ValueError(f"unexpected value {str(value)[:MAX_VALUE_CHARACTERS]!r}")


@dataclass(frozen=True, slots=True)
class _SavedField:
    """Field of a dataclass, with its key and type."""

    name: str
    key: str  # in JSON
    annotation: Any


@cache
def _saved_fields(cls: Any) -> tuple[_SavedField, ...]:
    """Return the fields of a dataclass in `SAVED_FIELDS`, or all fields if the class has no such attribute."""
    annotations, keys = get_type_hints(cls), getattr(cls, "JSON_KEYS", {})
    names = getattr(cls, "SAVED_FIELDS", [field.name for field in fields(cls)])
    return tuple([_SavedField(name, keys.get(name, name), annotations[name]) for name in names])
