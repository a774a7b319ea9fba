"""Dataclasses to YAML or JSON data, without secrets."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import yaml

from exporter.config.options import UNCHANGED, Notation, Secret, annotation_of, is_union, options_of, unwrap


def to_plain(hint: Any, value: Any) -> Any:
    """Return a value as plain YAML or JSON data. A secret becomes `<secret>`; options with the value `UNCHANGED` are omitted."""
    base, _ = unwrap(hint)
    notation = annotation_of(hint, Notation)
    if value is None:
        return None
    if annotation_of(hint, Secret):
        return value and "<secret>"
    if is_union(base):
        return to_plain(next(member for member in get_args(base) if member is not NoneType), value)
    if dataclasses.is_dataclass(value):
        options = options_of(type(value), value)
        return {
            option.key: to_plain(option.hint, option.default)
            for option in options
            if option.default is not UNCHANGED
        }
    if isinstance(value, Mapping):
        value_hint = get_args(base)[1]
        return {key: to_plain(value_hint, inner) for key, inner in value.items()}
    if notation is not None:
        return notation.format(value)
    if isinstance(value, frozenset):
        value = tuple(sorted(value, key=list(get_args(base)[0]).index))
    if isinstance(value, tuple):
        return [to_plain(get_args(base)[0], item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def dump(instance: Any) -> str:
    """Return an instance of a dataclass as YAML. Except for secrets, `load` returns an equal instance."""
    data = to_plain(type(instance), instance)
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=110)
