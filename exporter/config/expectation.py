"""Descriptions of the allowed values of a type, for error messages and the documentation."""

from __future__ import annotations

import dataclasses
import difflib
import enum
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from exporter.config.options import Notation, Range, annotation_of, is_union, unwrap

MAX_COMPARED_CHARACTERS = 100
"""Number of characters of a text that are compared with the allowed texts. The time of a comparison grows with the square of this number."""

_NOUNS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a path"}
"""Description of the values of each scalar type."""


def suggest(text: str, allowed_texts: Iterable[str]) -> str:
    """Return `did you mean "…"?` if an allowed text is similar. Otherwise, return the list of allowed texts, or a notice if there are none."""
    candidates = list(allowed_texts)
    matches = difflib.get_close_matches(text[:MAX_COMPARED_CHARACTERS], candidates, n=1)
    if matches:
        return f'did you mean "{matches[0]}"?'
    return f"expected one of {', '.join(candidates)}" if candidates else "nothing is allowed here"


def expectation(hint: Any) -> str:
    """Describe the allowed values of a type, such as `a whole number from 1 to 8`."""
    base, _ = unwrap(hint)
    if is_union(base):
        return " or ".join(expectation(member) for member in get_args(base))
    allowed_values = choices(base)
    if allowed_values:
        return f"one of {', '.join(map(str, allowed_values))}"
    if node_kind(base) is not yaml.ScalarNode:
        return "a mapping" if node_kind(base) is yaml.MappingNode else "a list"
    notation = annotation_of(hint, Notation)
    noun = notation.expected if notation else _NOUNS.get(base, "null")
    return f"{noun} {limits(hint)}".rstrip()


def limits(hint: Any) -> str:
    """Describe the range of a type in the notation of the file. Returns "" for a type without a range."""
    notation, bounds = annotation_of(hint, Notation), annotation_of(hint, Range) or Range()
    format_value: Callable[[Any], str] = notation.format if notation else "{:.15g}".format
    if bounds.minimum is not None and bounds.maximum is not None:
        return f"from {format_value(bounds.minimum)} to {format_value(bounds.maximum)}"
    if bounds.minimum is not None:
        return f"of at least {format_value(bounds.minimum)}"
    return "" if bounds.maximum is None else f"of at most {format_value(bounds.maximum)}"


def choices(base: Any) -> dict[Any, Any]:
    """Return the values of an enumeration or literal by their notation, or an empty mapping for other types."""
    if get_origin(base) is Literal:
        return {text: text for text in get_args(base)}
    if isinstance(base, type) and issubclass(base, enum.Enum):
        return {member.value: member for member in base}
    return {}


def node_kind(base: Any) -> type[yaml.Node]:
    """Return the class of the YAML node in which a value of the type is written."""
    if dataclasses.is_dataclass(base) or get_origin(base) in (dict, Mapping):
        return yaml.MappingNode
    return yaml.SequenceNode if get_origin(base) in (tuple, list, frozenset) else yaml.ScalarNode
