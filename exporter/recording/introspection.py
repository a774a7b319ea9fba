"""Inspection of foreign objects: items, sizes, class attributes.

Classes are compared with `type`, because `isinstance` calls the object's own `__class__`. The functions run no code of a metaclass or
of a subclass of a built-in container. They do call `items` and `__len__` of other containers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Any

MAX_ITEMS = 1000
"""Maximum number of items that are read from a container."""


def items_of(value: Any, value_type: type) -> list[Any] | None:
    """Return the first items of a list, tuple, set or deque, or None for another class."""
    base: Any
    for base in (list, tuple, set, frozenset, deque):
        if issubclass(value_type, base):
            # A single call into C, which other threads do not interrupt.
            return list(islice(base.__iter__(value), MAX_ITEMS))
    return None


def pairs_of(value: Any, value_type: type) -> list[tuple[Any, Any]] | None:
    """Return the first pairs of a dict or another mapping, or None for another class."""
    if issubclass(value_type, dict):
        return list(islice(dict.items(value), MAX_ITEMS))
    return list(islice(value.items(), MAX_ITEMS)) if issubclass(value_type, Mapping) else None


def size_of(value: Any, value_type: type) -> int:
    """Return the number of items of a container, or 0 for an object without `__len__`."""
    base: Any
    for base in (list, tuple, set, frozenset, deque, dict):
        if issubclass(value_type, base):
            return int(base.__len__(value))
    return len(value) if class_attribute(value_type, "__len__") is not None else 0


def first_bytes(value: Any, count: int) -> bytes:
    """Return the first *count* bytes of a bytes or bytearray object."""
    base = bytes if issubclass(type(value), bytes) else bytearray
    return bytes(base.__getitem__(value, slice(count)))


def class_attribute(value_type: type, name: str) -> Any:
    """Return an attribute of a class without running code of a metaclass, or None without the attribute."""
    try:
        return type.__getattribute__(value_type, name)
    except AttributeError:
        return None


def name_of_class(value_type: type) -> str:
    """Return the name of a class without running code of a metaclass."""
    return str(type.__dict__["__name__"].__get__(value_type))


def module_of_class(value_type: type) -> str:
    """Return the name of the module of a class, or an empty text if it is not a str."""
    name = class_attribute(value_type, "__module__")
    return name if type(name) is str else ""
