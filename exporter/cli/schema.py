"""`config.schema.json` and `config.example.yaml`, generated from the definitions of the configuration.

`python -m exporter.cli.schema [DIRECTORY]` writes both, by default into the working directory; a test holds the
committed files to be the same. Used while developing, never by a running exporter. An editor with a YAML
language server completes and checks a configuration by the schema; what JSON Schema cannot say (the range of a
duration) is in the descriptions, and `--config.check` is the whole truth.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import sys
import typing
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from exporter.cli.configuration import UNCHANGED, Configuration
from exporter.cli.rendering import describe, plain, render
from exporter.config.options import REQUIRED, Keys, Notation, Option, Range, is_union, options_of, unwrap

SCHEMA_FILE = "config.schema.json"
EXAMPLE_FILE = "config.example.yaml"

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string", NoneType: "null"}


def schema() -> dict[str, Any]:
    """The configuration as JSON Schema, draft 2020-12."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of training-exporter",
        "description": f"Generated from exporter/cli/configuration.py; {EXAMPLE_FILE} shows every option.",
        **_mapping_schema(options_of(Configuration)),
    }


def example() -> str:
    """A configuration with every option at its default, each with its help as a comment."""
    head = (
        f"# yaml-language-server: $schema={SCHEMA_FILE}",
        "#",
        "# Every option of training-exporter with its default: this file changes nothing. The exporter works",
        "# without a configuration; yours holds only what is to be different. `--config.check` finds its mistakes.",
    )
    return "\n".join(head) + "\n" + render(Configuration(), comments=True)


def _mapping_schema(options: tuple[Option, ...]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "type": "object",
        "additionalProperties": False,
        "properties": {option.key: _option_schema(option) for option in options},
    }
    required = [option.key for option in options if option.default is REQUIRED]
    return made | ({"required": required} if required else {})


def _option_schema(option: Option) -> dict[str, Any]:
    about = describe(option)
    made = {"description": about} | _schema(option.hint, option.default)
    if option.default not in (REQUIRED, UNCHANGED) and made.get("type") != "object":
        made["default"] = plain(option.hint, option.default)
    return made


def _schema(hint: Any, default: Any) -> dict[str, Any]:
    base, marks = unwrap(hint)
    if is_union(base):
        return {"anyOf": [_schema(member, default) for member in get_args(base)]}
    keys = next((mark for mark in marks if isinstance(mark, Keys)), None)
    if keys is not None:
        options = (
            Option(name, name, type(value), value, keys.help.get(name, ""))
            for name, value in keys.defaults.items()
        )
        return _mapping_schema(tuple(options))
    if dataclasses.is_dataclass(base):
        return _mapping_schema(options_of(typing.cast("type", base), default))
    notation = next((mark for mark in marks if isinstance(mark, Notation)), None)
    if notation is not None:
        text = {"type": "string", "pattern": notation.pattern}
        bare_zero = base in (int, float) and re.fullmatch(notation.pattern, "0")
        return {"anyOf": [text, {"const": 0}]} if bare_zero else text
    if get_origin(base) is Literal:
        return {"enum": list(get_args(base))}
    if isinstance(base, type) and issubclass(base, enum.Enum):
        return {"enum": [member.value for member in base]}
    if get_origin(base) in (tuple, frozenset):
        unique = {"uniqueItems": True} if get_origin(base) is frozenset else {}
        return {"type": "array", "items": _schema(get_args(base)[0], REQUIRED)} | unique
    made: dict[str, Any] = {"type": _TYPES[base]}
    for mark in marks:
        if isinstance(mark, Range):
            made |= {"minimum": mark.minimum} if mark.minimum is not None else {}
            made |= {"maximum": mark.maximum} if mark.maximum is not None else {}
    return made


def main(arguments: list[str]) -> int:
    """Write both files."""
    directory = Path(arguments[0] if arguments else ".")
    (directory / SCHEMA_FILE).write_text(json.dumps(schema(), indent=2) + "\n", encoding="utf-8")
    (directory / EXAMPLE_FILE).write_text(example(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
