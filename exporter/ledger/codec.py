"""The codec of the state files: dataclasses to JSON and back.

Runs in the sidecar; pure functions. The keys of the JSON are the names of the fields, so that a person can read a state
file. A key that is not known is passed over, a missing one has its default: so versions may differ. The store's checksum
vouches for the content; what is no JSON, or has not the shape of the dataclass, is a `ValueError`.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

NOT_KEPT = {"kept": False}
"""Metadata of a field that is not written."""


def dumps(value: object) -> bytes:
    """Write a dataclass."""
    return json.dumps(to_json(value), separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def loads(kind: Any, content: bytes) -> Any:
    """Read a value of a type back.

    Raises:
        ValueError: It is not what `dumps` writes.
    """
    try:
        return from_json(kind, json.loads(content))
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def to_json(value: Any) -> Any:
    """Turn a value into what `json` writes; a mapping whose keys are no text becomes a list of pairs."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: to_json(each) for key, each in value.items()}
        return [[to_json(key), to_json(each)] for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    return {name: to_json(getattr(value, name)) for name in _hints(value.__class__)}


def from_json(kind: Any, found: Any) -> Any:
    """Turn what `json` has read into a value of a type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in {Union, UnionType}:  # of None and one other type
        other = next(each for each in arguments if each is not NoneType)
        return None if found is None else from_json(other, found)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return tuple([from_json(each, value) for each, value in zip(arguments, found, strict=True)])
    if origin in {list, tuple}:
        return origin([from_json(arguments[0], each) for each in found])
    if origin is not None:  # a mapping
        pairs = found.items() if isinstance(found, dict) else found
        return {from_json(arguments[0], key): from_json(arguments[1], value) for key, value in pairs}
    if kind in {str, int, float, bool}:
        return kind(found)
    return kind(
        **{name: from_json(hint, found[name]) for name, hint in _hints(kind).items() if name in found}
    )


@cache
def _hints(kind: Hashable) -> dict[str, Any]:
    """Give the types of the fields of a dataclass that are written."""
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind) if each.metadata.get("kept", True)}  # type: ignore[arg-type]
