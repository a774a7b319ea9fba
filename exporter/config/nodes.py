"""YAML text into nodes that know their place, within the part of YAML that everyone reads alike.

Used in the sidecar by `loader`; the only file that touches PyYAML. A scalar is read as YAML 1.2's core schema reads
it, which is what editors and other languages do; where PyYAML (1.1) reads it differently (`yes`, `010`, `1:30`) it
carries a sentence with both readings. Anchors, aliases and tags are refused: no configuration needs them, and without
them a file's size bounds the work that it can cause.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

MAX_DEPTH = 32
"""Nesting limit, far below what would exhaust the interpreter's stack."""

Report = Callable[[int, int, str], None]
"""Takes a problem: line, column (both from 1), message."""


@dataclass(frozen=True, slots=True)
class Node:
    """A place in the text, from 1; of no other kind where it was refused and has been reported."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Scalar(Node):
    """A single value.

    Attributes:
        text: As written, without quotes.
        value: None, bool, int, float or str, as YAML 1.2 reads it.
        surprise: Why YAML 1.1 reads it differently; None where it does not.
    """

    text: str
    value: bool | int | float | str | None
    surprise: str | None = None


@dataclass(frozen=True, slots=True)
class Listing(Node):
    """A sequence."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Table(Node):
    """A mapping, with every entry that was written: duplicates too, and keys of any kind."""

    entries: tuple[tuple[Node, Node], ...]


def read_nodes(text: str, report: Report) -> Node | None:
    """The root node of one YAML document.

    None for an empty document, and for one that is no YAML; then a problem was reported.
    """
    loader: _Loader | None = None
    try:
        loader = _Loader(text, report)
        root = loader.get_single_node()
        return None if root is None else _node(root)
    except yaml.reader.ReaderError as error:
        found = ascii(chr(error.character))[1:-1]
        report(*place_after(text[: error.position]), f"the character {found} is not allowed in YAML")
    except yaml.MarkedYAMLError as error:
        message = ", ".join(part for part in (error.context, error.problem) if part)
        if r"'\t'" in message:
            message += " (a tab; indent with spaces)"
        elif "single document" in message:
            message = "a second document begins here; a configuration is one document"
        report(*_place(error.problem_mark or error.context_mark), " ".join(message.split()))
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # PyYAML lets through what chr() says about "\UFFFFFFFF" and int() about %YAML 1.999….
        mark = loader.get_mark() if loader else None
        report(*_place(mark), f"not YAML: {' '.join(str(error).split())}")
    return None


def scalar_of(text: str, *, plain: bool = True) -> Scalar:
    """A scalar that stands for itself, such as a command line's; never a surprise."""
    return Scalar(1, 1, text, _value(text) if plain else text)


def place_after(before: str) -> tuple[int, int]:
    """Line and column of the character that follows a text."""
    return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1


def quote(text: str, limit: int = 60) -> str:
    """Text in double quotes on one line, shortened; nothing in it can act on a terminal or a log."""
    shown = text if len(text) <= limit else text[: limit - 1] + "…"
    return '"' + "".join(_ESCAPED.get(c) or (c if c.isprintable() else _escape(c)) for c in shown) + '"'


_ESCAPED = {'"': '\\"', "\\": "\\\\"}


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


class _RefusedNode(yaml.Node):
    """An alias or a tagged value; reported when it was met."""


class _Loader(yaml.SafeLoader):
    """Composes PyYAML's nodes, and reports what this part of YAML leaves out."""

    def __init__(self, text: str, report: Report) -> None:
        super().__init__(text)
        self._report = report
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # types-PyYAML leaves it out
        mark = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            self.get_event()  # type: ignore[no-untyped-call]  # as above
            message = f"alias *{event.anchor}: aliases are not supported, write the value out"
            self._report(*_place(mark), message)
            return _RefusedNode("", None, mark, mark)
        if event.anchor is not None:
            self._report(*_place(mark), f"anchor &{event.anchor}: anchors are not supported, remove it")
            event.anchor = None
        tag, event.tag = event.tag, None
        if tag is not None:
            shown = quote(tag.replace("tag:yaml.org,2002:", "!!"))
            self._report(*_place(mark), f"tag {shown}: tags are not supported, remove it")
        if self._depth >= MAX_DEPTH:
            raise yaml.MarkedYAMLError(None, None, f"nested deeper than {MAX_DEPTH} levels", mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node if tag is None else _RefusedNode("", None, mark, mark)


def _place(mark: yaml.Mark | None) -> tuple[int, int]:
    return (mark.line + 1, mark.column + 1) if mark else (1, 1)


def _node(node: yaml.Node) -> Node:
    place = _place(node.start_mark)
    if isinstance(node, yaml.ScalarNode):
        value = _value(node.value) if node.style is None else node.value
        return Scalar(*place, node.value, value, _surprise(node, value))
    if isinstance(node, yaml.SequenceNode):
        return Listing(*place, tuple(_node(item) for item in node.value))
    if isinstance(node, yaml.MappingNode):
        return Table(*place, tuple((_node(key), _node(value)) for key, value in node.value))
    return Node(*place)


_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_ENDLESS = {".nan": math.nan, ".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf}
_LONGEST_NUMBER = 40  # characters; keeps int() cheap, and below the interpreter's own limit


def _value(text: str) -> bool | int | float | str | None:
    """A plain scalar in YAML 1.2's core schema."""
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text[0] in "tT"
    if text.lower() in _ENDLESS:
        return _ENDLESS[text.lower()]
    if len(text) <= _LONGEST_NUMBER and _INTEGER.fullmatch(text):
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    return float(text) if _FLOAT.fullmatch(text) else text


def _surprise(node: yaml.ScalarNode, value: object) -> str | None:
    """Both readings of a scalar on which YAML 1.1 and 1.2 disagree, None where they agree."""
    text, kind = node.value, node.tag.rpartition(":")[2]
    if node.style is not None or type(value) is float:  # 1e3 is a number to everyone but PyYAML
        return None
    if kind not in {"bool", "int", "float"} and type(value) is not int:  # so are dates, which nothing here is
        return None
    old = "a number"
    if len(text) <= _LONGEST_NUMBER:
        try:
            read = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError):  # 0b_ looks like a number and is none
            read = None
        if type(read) is type(value) and read == value:
            return None
        old = old if read is None else _spell(read)
    new = _spell(value)
    ways = " or ".join(sorted({old, new}))
    return f"{quote(text)[1:-1]} is {old} in YAML 1.1 and {new} in YAML 1.2; write {ways}"


def _spell(value: object) -> str:
    """A value as it is written in YAML."""
    if isinstance(value, str):
        return quote(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
