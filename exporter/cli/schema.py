"""The configuration as YAML, and as JSON Schema; both are made from its definitions.

Used in the sidecar for `/config`, whose text the loader reads back. While developing,
`python -m exporter.cli.schema [DIRECTORY]` writes `config.schema.json` and `config.example.yaml`; a test holds the
committed files to be the same. An editor with a YAML language server completes and checks a configuration by the
schema; what JSON Schema cannot say (the range of a duration) is in the descriptions.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import sys
import textwrap
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from exporter.cli.configuration import UNCHANGED, Configuration
from exporter.config.loader import choices, limits
from exporter.config.nodes import quote
from exporter.config.options import (
    REQUIRED,
    Hidden,
    Keys,
    Notation,
    Option,
    Range,
    is_union,
    options_of,
    unwrap,
)

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


_WIDTH = 110


def render(configuration: Configuration, *, comments: bool) -> str:
    """A configuration as YAML.

    Args:
        configuration: What to show.
        comments: Whether each option's help stands above it, and a list that may hold mappings shows one.
    """
    options = options_of(Configuration, configuration)
    return "".join(f"{line}\n" for line in _Renderer(comments=comments).mapping(options, ""))


def describe(option: Option) -> str:
    """The help, with what is allowed where type and default leave a question."""
    text = option.help
    base, _ = unwrap(option.hint)
    for member in get_args(base) if is_union(base) else (option.hint,):
        kind, _ = unwrap(member)
        item = get_args(kind)[0] if get_origin(kind) is frozenset else kind
        allowed = choices(item)
        if allowed is not None:
            text += (
                f" ({'any' if item is not kind else 'one'} of {', '.join(str(word) for word, _ in allowed)})"
            )
        elif limits(member):
            text += f" ({limits(member)})"
    return f"{text} Needs a restart." if option.restart else text


def plain(hint: Any, value: Any) -> Any:
    """A value as YAML and JSON hold it."""
    base, marks = unwrap(hint)
    if value is None:
        return None
    if is_union(base):
        return plain(next(member for member in get_args(base) if member is not NoneType), value)
    notation = next((mark for mark in marks if isinstance(mark, Notation)), None)
    if notation is not None:
        return notation.format(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, frozenset):
        order = list(get_args(base)[0])
        return [plain(get_args(base)[0], item) for item in sorted(value, key=order.index)]
    if isinstance(value, tuple):
        return [plain(get_args(base)[0], item) for item in value]
    return str(value) if isinstance(value, Path) else value


class _Renderer:
    """Lines of YAML for options and their values."""

    def __init__(self, *, comments: bool) -> None:
        self._comments = comments
        self._told: set[str] = set()  # all collectors share three options, whose help is shown once

    def mapping(self, options: Iterable[Option], indent: str) -> Iterator[str]:
        """Lines of a mapping's entries; each option's default is its value."""
        for option in options:
            base, marks = unwrap(option.hint)
            if option.default is UNCHANGED:
                continue
            if self._comments and not indent:
                yield ""
            yield from self._help(option, indent)
            keys = next((mark for mark in marks if isinstance(mark, Keys)), None)
            if dataclasses.is_dataclass(base):
                yield f"{indent}{option.key}:"
                yield from self.mapping(options_of(typing.cast("type", base), option.default), f"{indent}  ")
            elif keys is not None:
                yield f"{indent}{option.key}:"
                for name, value in option.default.items():
                    yield from self._lines_of_help(keys.help.get(name, ""), f"{indent}  ")
                    yield f"{indent}  {name}:"
                    yield from self.mapping(options_of(type(value), value), f"{indent}    ")
            elif _item_class(base) is not None:
                yield from self._list(option, typing.cast("type", _item_class(base)), indent)
            else:
                secret = Hidden() in marks and option.default
                yield f"{indent}{option.key}: {'<secret>' if secret else _flow(plain(option.hint, option.default))}"

    def _list(self, option: Option, item: type, indent: str) -> Iterator[str]:
        """A list of mappings; where it is empty, with one entry as a comment."""
        yield f"{indent}{option.key}:{'' if option.default else ' []'}"
        for value in option.default:
            yield from _as_item(self.mapping(options_of(item, value), ""), f"{indent}  ")
        if self._comments and not option.default:
            shown = [dataclasses.replace(entry, default=entry.example) for entry in options_of(item)]
            yield f"{indent}# {option.key}:"
            for line in _as_item(self.mapping(shown, "\t"), f"{indent}  "):
                yield f"{indent}# {line}"

    def _help(self, option: Option, indent: str) -> Iterator[str]:
        yield from self._lines_of_help(describe(option), indent)

    def _lines_of_help(self, text: str, indent: str) -> Iterator[str]:
        if not self._comments or text in self._told:
            return
        self._told.add(text)
        width = _WIDTH - len(indent) - 2
        for line in textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False):
            yield f"{indent}# {line}"


def _as_item(lines: Iterable[str], indent: str) -> Iterator[str]:
    """A mapping's lines as an entry of a list; the dash stands before the first key, not before its comment."""
    lead = "- "
    for line in lines:
        text = line.lstrip("\t")
        if text.startswith("#"):
            yield f"{indent}{'' if lead == '- ' else lead}{text}"
        else:
            yield f"{indent}{lead}{text}"
            lead = "  "


def _item_class(base: Any) -> type | None:
    """The dataclass of a list's entries; None for lists of scalars, and for what is no list."""
    item = get_args(base)[0] if get_origin(base) in (tuple, list) else None
    return item if dataclasses.is_dataclass(item) and isinstance(item, type) else None


def _flow(value: Any) -> str:
    """A value on one line of YAML, which YAML 1.1 and 1.2 read alike."""
    if isinstance(value, list):
        return f"[{', '.join(_flow(item) for item in value)}]"
    if isinstance(value, str):
        harmless = re.fullmatch(r"[a-z/][A-Za-z0-9/_.-]*|[0-9]+[A-Za-z]+([0-9]+[a-z]+)*", value)
        return value if harmless and value not in _WORDS else quote(value, limit=len(value))
    return json.dumps(value)


_WORDS = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})


def main(arguments: list[str]) -> int:
    """Write both files."""
    directory = Path(arguments[0] if arguments else ".")
    (directory / SCHEMA_FILE).write_text(json.dumps(schema(), indent=2) + "\n", encoding="utf-8")
    (directory / EXAMPLE_FILE).write_text(example(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
