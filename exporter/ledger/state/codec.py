"""Dataclasses to JSON and back.

Unknown fields are ignored and missing fields have their defaults, so releases can exchange state.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Any, NoReturn, TypeVar, Union, cast, get_args, get_origin, get_type_hints

Decoded = TypeVar("Decoded")


def dumps(value: object) -> bytes:
    """Return a dataclass as a line of JSON."""
    return json.dumps(to_json(value), separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def loads(kind: type[Decoded], content: bytes) -> Decoded:
    """Return a value of a type from JSON; raises ValueError for content that `dumps` does not write."""
    with decoding():
        return cast("Decoded", from_json(kind, parse(content)))


def parse(content: bytes) -> Any:
    """Return parsed JSON; raises ValueError, also for deep nesting and for numbers that are not finite."""
    try:
        return json.loads(content, parse_constant=_reject)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


@contextmanager
def decoding() -> Iterator[None]:
    """Turn every error of foreign content into ValueError."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {str(error)[:200]}") from error


def to_json(value: Any) -> Any:
    """Return a value as JSON types; a mapping with keys other than strings becomes a list of pairs."""
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
    return {name: to_json(getattr(value, name)) for name in _hints(value.__class__)}


def from_json(kind: Any, body: Any) -> Any:
    """Return JSON types as a value of a type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in {Union, UnionType}:  # None and a second type
        inner = next(argument for argument in arguments if argument is not NoneType)
        return None if body is None else from_json(inner, body)
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
        body = dict(zip(_hints(kind), body, strict=False))
    if type(body) is not dict:
        _reject(body)
    return kind(**{name: from_json(hint, body[name]) for name, hint in _hints(kind).items() if name in body})


def _reject(value: object) -> NoReturn:
    raise ValueError(f"unexpected value {str(value)[:40]!r}")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Return the types of the saved fields of a dataclass: all fields, or the fields in `SAVED`."""
    hints = get_type_hints(kind)
    return {name: hints[name] for name in getattr(kind, "SAVED", [field.name for field in fields(kind)])}
