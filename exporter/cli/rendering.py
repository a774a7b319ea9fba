"""The configuration as YAML text: every option with its help, or the values in force.

Used in the sidecar for `/config`, and while developing for `config.example.yaml`. Definitions and values come
in, text goes out that the loader reads back. No files, no threads.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import textwrap
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from exporter.cli.configuration import UNCHANGED, Configuration
from exporter.config.loader import choices, limits
from exporter.config.nodes import quote
from exporter.config.options import Hidden, Keys, Notation, Option, is_union, options_of, unwrap

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
