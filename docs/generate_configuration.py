"""Generator of config.schema.json and config.example.yaml from the options of exporter/cli/configuration.py.

    python docs/generate_configuration.py [DIRECTORY]   # `make docs`

The description of an option is its help, followed by the choices or the range of its values, even where JSON Schema repeats them.
"""
# ruff: noqa: INP001 - a script, not a package

from __future__ import annotations

import dataclasses
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import yaml

from exporter.cli.configuration import Configuration
from exporter.config.dump import to_plain
from exporter.config.expectation import choices, limits
from exporter.config.options import (
    REQUIRED,
    UNCHANGED,
    Notation,
    Option,
    Range,
    annotation_of,
    is_union,
    options_of,
    unwrap,
)

ROOT = Path(__file__).resolve().parent.parent
SCHEMA_FILE = "config.schema.json"
EXAMPLE_FILE = "config.example.yaml"

ENTRY_INDENT = "\t"
"""Indent of the lines of a list entry, which `_as_list_entry` removes. It is not empty, because `_lines` puts a blank line before each
option without an indent."""

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string", NoneType: "null"}
_COMMENT_COLUMNS = 110
"""Length at which comments of the example are wrapped."""


def schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the configuration."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of training-exporter",
        "description": f"Generated from exporter/cli/configuration.py; {EXAMPLE_FILE} shows every option.",
        **_mapping_schema(options_of(Configuration)),
    }


def example() -> str:
    """Return a YAML configuration with each option at its default and with its help as a comment.

    A list of mappings is empty by default; a comment shows an entry with the example of each option.
    """
    head = (
        f"# yaml-language-server: $schema={SCHEMA_FILE}",
        "#",
        "# Every option of training-exporter with its default. A configuration file is optional and contains only the",
        "# options that differ from the defaults. `--config.check` reports the mistakes of a file.",
    )
    return "".join(f"{line}\n" for line in (*head, *_lines(options_of(Configuration), "", set())))


def _nested_options(option: Option) -> tuple[Option, ...] | None:
    """Return the options of a mapping, or None if the option is not a mapping."""
    base, _ = unwrap(option.hint)
    is_mapping = isinstance(base, type) and dataclasses.is_dataclass(base)
    return options_of(base, option.default) if is_mapping else None


def _description(option: Option) -> str:
    """Return the help of an option, its choices or its range if it has any, and whether a change needs a restart."""
    text = option.help
    base, _ = unwrap(option.hint)
    for member in get_args(base) if is_union(base) else (option.hint,):
        member_type, _ = unwrap(member)
        element_type = get_args(member_type)[0] if get_origin(member_type) is frozenset else member_type
        if choices(element_type):
            quantifier = "One" if element_type is member_type else "Any"
            text += f" {quantifier} of {', '.join(map(str, choices(element_type)))}."
        elif limits(member):
            text += f" Allowed: {limits(member).removeprefix('of ')}."
    return f"{text} Needs a restart." if option.restart else text


def _mapping_schema(options: tuple[Option, ...]) -> dict[str, Any]:
    mapping_schema: dict[str, Any] = {
        "type": "object",
        "additionalProperties": False,
        "properties": {option.key: _option_schema(option) for option in options},
    }
    required_keys = [option.key for option in options if option.default is REQUIRED]
    return mapping_schema | ({"required": required_keys} if required_keys else {})


def _option_schema(option: Option) -> dict[str, Any]:
    nested_options = _nested_options(option)
    option_schema = {"description": _description(option)}
    option_schema |= _type_schema(option.hint) if nested_options is None else _mapping_schema(nested_options)
    if nested_options is None and option.default not in (REQUIRED, UNCHANGED):
        option_schema["default"] = to_plain(option.hint, option.default)
    return option_schema


def _type_schema(hint: Any) -> dict[str, Any]:
    base, _ = unwrap(hint)
    if is_union(base):
        return {"anyOf": [_type_schema(member) for member in get_args(base)]}
    if dataclasses.is_dataclass(base) and isinstance(base, type):
        return _mapping_schema(options_of(base))
    notation, bounds = annotation_of(hint, Notation), annotation_of(hint, Range) or Range()
    if notation is not None:
        text_schema = {"type": "string", "pattern": notation.pattern}
        bare_zero = base in (int, float) and re.fullmatch(notation.pattern, "0")
        return {"anyOf": [text_schema, {"const": 0}]} if bare_zero else text_schema
    if choices(base):
        return {"enum": list(choices(base))}
    if get_origin(base) in (tuple, frozenset):
        unique = {"uniqueItems": True} if get_origin(base) is frozenset else {}
        return {"type": "array", "items": _type_schema(get_args(base)[0])} | unique
    keywords = {"type": _TYPES[base], "minimum": bounds.minimum, "maximum": bounds.maximum}
    return {keyword: value for keyword, value in keywords.items() if value is not None}


def _lines(options: Iterable[Option], indent: str, seen_comments: set[str]) -> Iterator[str]:
    """Yield the lines of a mapping. Skip comments in *seen_comments*: several collectors have options with the same help."""
    for option in options:
        if not indent:
            yield ""
        yield from _comment(_description(option), indent, seen_comments)
        nested_options, entry_class = _nested_options(option), _entry_class(option.hint)
        if nested_options is not None:
            yield f"{indent}{option.key}:"
            yield from _lines(nested_options, f"{indent}  ", seen_comments)
        elif entry_class is not None:
            examples = [
                dataclasses.replace(entry, default=entry.example) for entry in options_of(entry_class)
            ]
            yield f"{indent}{option.key}: []"
            yield f"{indent}# {option.key}:"
            for line in _as_list_entry(_lines(examples, ENTRY_INDENT, seen_comments), f"{indent}  "):
                yield f"{indent}# {line}"
        else:
            flow = yaml.safe_dump(
                [to_plain(option.hint, option.default)], default_flow_style=True, width=10_000
            )
            yield f"{indent}{option.key}: {flow.strip()[1:-1]}"


def _comment(text: str, indent: str, seen_comments: set[str]) -> Iterator[str]:
    if text not in seen_comments:
        seen_comments.add(text)
        width = _COMMENT_COLUMNS - len(indent) - 2
        for line in textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False):
            yield f"{indent}# {line}"


def _as_list_entry(lines: Iterable[str], indent: str) -> Iterator[str]:
    """Yield the lines of a mapping as an entry of a list. The dash precedes the first key, not the comment above the key."""
    has_key = False
    for line in lines:
        text = line.lstrip(ENTRY_INDENT)
        if text.startswith("#"):
            yield f"{indent}{'  ' if has_key else ''}{text}"
        else:
            yield f"{indent}{'  ' if has_key else '- '}{text}"
            has_key = True


def _entry_class(hint: Any) -> type | None:
    """Return the dataclass of the entries of a list, or None for a list of scalars and for any other type."""
    base, _ = unwrap(hint)
    entry_type = get_args(base)[0] if get_origin(base) is tuple else None
    is_class = dataclasses.is_dataclass(entry_type) and isinstance(entry_type, type)
    return entry_type if is_class else None


def main(arguments: list[str]) -> int:
    """Write the schema and the example. Return the exit status."""
    directory = Path(arguments[0]) if arguments else ROOT
    (directory / SCHEMA_FILE).write_text(json.dumps(schema(), indent=2) + "\n", encoding="utf-8")
    (directory / EXAMPLE_FILE).write_text(example(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
