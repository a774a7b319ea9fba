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
        return value and "<secret>"  # an empty text is not a secret: it says that nothing is set
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
        _, value_hint = get_args(base)
        return {key: to_plain(value_hint, inner) for key, inner in value.items()}
    if notation is not None:
        return notation.format(value)
    if isinstance(value, frozenset | tuple):
        item_hint, *_ = get_args(base)
        # The order of a set varies from run to run. The members of an enumeration have an order.
        items = sorted(value, key=list(item_hint).index) if isinstance(value, frozenset) else value
        return [to_plain(item_hint, item) for item in items]
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def dump(instance: Any) -> str:
    """Return an instance of a dataclass as YAML. Except for secrets, `load` returns an equal instance."""
    data = to_plain(type(instance), instance)
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=110)
