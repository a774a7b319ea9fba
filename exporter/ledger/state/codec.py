"""Conversion of dataclasses to JSON and back.

Unknown keys are ignored, and fields without a key have their defaults, so that a release can read the state of earlier and later
releases. A class may restrict the saved fields with `SAVED_FIELDS`. If a field was renamed, `JSON_KEYS` contains the key that all
releases use.
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


def dumps(value: object) -> bytes:
    """Return a dataclass as a line of JSON."""
    return json.dumps(to_json(value), separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def loads(kind: type[DecodedT], content: bytes) -> DecodedT:
    """Return the value of a type from its JSON. Raises ValueError for invalid JSON and for values of other types."""
    with decoding():
        return cast("DecodedT", from_json(kind, parse(content)))


def parse(content: bytes) -> Any:
    """Return parsed JSON. Raises ValueError, also for deep nesting and for numbers that are not finite."""
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
        raise ValueError(f"{type(error).__name__}: {str(error)[:200]}") from error


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


def from_json(kind: Any, body: Any) -> Any:
    """Return the value of a type from JSON types, the inverse of `to_json`. Raises the errors that `decoding` converts."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in {Union, UnionType}:  # of a type and None
        inner_kind = next(argument for argument in arguments if argument is not NoneType)
        return None if body is None else from_json(inner_kind, body)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return tuple([from_json(argument, value) for argument, value in zip(arguments, body, strict=True)])
    if origin in {list, tuple}:
        return origin([from_json(arguments[0], item) for item in body])
    if origin is not None:  # a mapping
        pairs = body.items() if isinstance(body, dict) else body
        return {from_json(arguments[0], key): from_json(arguments[1], value) for key, value in pairs}
    if kind is float:
        return float(body) if type(body) in {int, float} and isfinite(body) else _reject(body)
    if kind in {str, int, bool}:
        return body if type(body) is kind else _reject(body)
    if issubclass(kind, enum.Enum):
        return kind(body)
    if type(body) is list:  # older releases saved some of the dataclasses as lists
        body = {field.key: value for field, value in zip(_saved_fields(kind), body, strict=False)}
    if type(body) is not dict:
        _reject(body)
    present_fields = [field for field in _saved_fields(kind) if field.key in body]
    return kind(**{field.name: from_json(field.hint, body[field.key]) for field in present_fields})


def _reject(value: object) -> NoReturn:
    raise ValueError(f"unexpected value {str(value)[:40]!r}")


@dataclass(frozen=True, slots=True)
class _SavedField:
    name: str
    key: str  # in JSON
    hint: Any


@cache
def _saved_fields(kind: Any) -> tuple[_SavedField, ...]:
    """Return the fields of a dataclass in `SAVED_FIELDS`, or all fields if the class has no such attribute."""
    hints, keys = get_type_hints(kind), getattr(kind, "JSON_KEYS", {})
    names = getattr(kind, "SAVED_FIELDS", [field.name for field in fields(kind)])
    return tuple([_SavedField(name, keys.get(name, name), hints[name]) for name in names])
