"""The configuration as YAML, and as JSON Schema; both are made from its definitions.

Used in the sidecar for `/config`, whose text the loader reads back. While developing,
`python -m exporter.cli.schema [DIRECTORY]` writes `config.schema.json` and `config.example.yaml`; a test holds the
committed files to be the same. What JSON Schema cannot say (the range of a duration) is in the descriptions.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

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
    mark_of,
    options_of,
    unwrap,
)

SCHEMA_FILE = "config.schema.json"
EXAMPLE_FILE = "config.example.yaml"

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string", NoneType: "null"}
_WIDTH = 110


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


def render(configuration: Configuration, *, comments: bool) -> str:
    """A configuration as YAML; with comments, each option's help and an example of a list's entry stand with it."""
    options = options_of(Configuration, configuration)
    return "".join(f"{line}\n" for line in _lines(options, "", set() if comments else None))


def _options_under(option: Option) -> tuple[Option, ...] | None:
    """The keys of the mapping that an option is, with their values; None where it is none."""
    base, _ = unwrap(option.hint)
    keys = mark_of(option.hint, Keys)
    if keys is not None:
        values = keys.defaults if option.default is REQUIRED else option.default
        return tuple(
            Option(name, name, type(value), value, keys.help.get(name, "")) for name, value in values.items()
        )
    made = isinstance(base, type) and dataclasses.is_dataclass(base)
    return options_of(base, option.default) if made else None


def _described(option: Option) -> str:
    """The help, with what is allowed where type and default leave a question."""
    text = option.help
    base, _ = unwrap(option.hint)
    for member in get_args(base) if is_union(base) else (option.hint,):
        kind, _ = unwrap(member)
        item = get_args(kind)[0] if get_origin(kind) is frozenset else kind
        if choices(item):
            text += f" ({'one' if item is kind else 'any'} of {', '.join(map(str, choices(item)))})"
        elif limits(member):
            text += f" ({limits(member)})"
    return f"{text} Needs a restart." if option.restart else text


def _plain(hint: Any, value: Any) -> Any:
    """A value as YAML and JSON hold it."""
    base, _ = unwrap(hint)
    if value is None:
        return None
    if is_union(base):
        return _plain(next(member for member in get_args(base) if member is not NoneType), value)
    notation = mark_of(hint, Notation)
    if notation is not None:
        return notation.format(value)
    if isinstance(value, frozenset):
        value = tuple(sorted(value, key=list(get_args(base)[0]).index))
    if isinstance(value, tuple):
        return [_plain(get_args(base)[0], item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


# JSON Schema -------------------------------------------------------------------------------------------


def _mapping_schema(options: tuple[Option, ...]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "type": "object",
        "additionalProperties": False,
        "properties": {option.key: _option_schema(option) for option in options},
    }
    required = [option.key for option in options if option.default is REQUIRED]
    return made | ({"required": required} if required else {})


def _option_schema(option: Option) -> dict[str, Any]:
    under = _options_under(option)
    made = {"description": _described(option)}
    made |= _type_schema(option.hint) if under is None else _mapping_schema(under)
    if under is None and option.default not in (REQUIRED, UNCHANGED):
        made["default"] = _plain(option.hint, option.default)
    return made


def _type_schema(hint: Any) -> dict[str, Any]:
    base, _ = unwrap(hint)
    if is_union(base):
        return {"anyOf": [_type_schema(member) for member in get_args(base)]}
    if dataclasses.is_dataclass(base) and isinstance(base, type):
        return _mapping_schema(options_of(base))
    notation, bounds = mark_of(hint, Notation), mark_of(hint, Range) or Range()
    if notation is not None:
        text = {"type": "string", "pattern": notation.pattern}
        bare_zero = base in (int, float) and re.fullmatch(notation.pattern, "0")
        return {"anyOf": [text, {"const": 0}]} if bare_zero else text
    if choices(base):
        return {"enum": list(choices(base))}
    if get_origin(base) in (tuple, frozenset):
        unique = {"uniqueItems": True} if get_origin(base) is frozenset else {}
        return {"type": "array", "items": _type_schema(get_args(base)[0])} | unique
    made = {"type": _TYPES[base], "minimum": bounds.minimum, "maximum": bounds.maximum}
    return {name: value for name, value in made.items() if value is not None}


# YAML --------------------------------------------------------------------------------------------------


def _lines(options: Iterable[Option], indent: str, told: set[str] | None) -> Iterator[str]:
    """Lines of a mapping's entries, each option's default being its value.

    `told` are the comments so far, since all collectors share three; None for no comments.
    """
    for option in options:
        if option.default is UNCHANGED:
            continue
        if told is not None and not indent:
            yield ""
        yield from _comment(_described(option), indent, told)
        under, item = _options_under(option), _item_class(option.hint)
        if under is not None:
            yield f"{indent}{option.key}:"
            yield from _lines(under, f"{indent}  ", told)
        elif item is not None:
            yield f"{indent}{option.key}:{'' if option.default else ' []'}"
            for value in option.default:
                yield from _as_item(_lines(options_of(item, value), "", told), f"{indent}  ")
            if told is not None and not option.default:
                shown = [dataclasses.replace(entry, default=entry.example) for entry in options_of(item)]
                yield f"{indent}# {option.key}:"
                for line in _as_item(_lines(shown, "\t", told), f"{indent}  "):
                    yield f"{indent}# {line}"
        else:
            secret = mark_of(option.hint, Hidden) and option.default
            yield f"{indent}{option.key}: {'<secret>' if secret else _flow(_plain(option.hint, option.default))}"


def _comment(text: str, indent: str, told: set[str] | None) -> Iterator[str]:
    if told is None or text in told:
        return
    told.add(text)
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


def _item_class(hint: Any) -> type | None:
    """The dataclass of a list's entries; None for lists of scalars, and for what is no list."""
    base, _ = unwrap(hint)
    item = get_args(base)[0] if get_origin(base) is tuple else None
    return item if dataclasses.is_dataclass(item) and isinstance(item, type) else None


def _flow(value: Any) -> str:
    """A value on one line of YAML, which YAML 1.1 and 1.2 read alike."""
    if isinstance(value, list):
        return f"[{', '.join(_flow(item) for item in value)}]"
    if isinstance(value, str):
        harmless = re.fullmatch(r"[a-z/][A-Za-z0-9/_.-]*|[0-9]+[A-Za-z]+([0-9]+[a-z]+)*", value)
        words = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}
        return value if harmless and value not in words else quote(value, limit=len(value))
    return json.dumps(value)


def main(arguments: list[str]) -> int:
    """Write both files."""
    directory = Path(arguments[0] if arguments else ".")
    (directory / SCHEMA_FILE).write_text(json.dumps(schema(), indent=2) + "\n", encoding="utf-8")
    (directory / EXAMPLE_FILE).write_text(example(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
