"""YAML nodes with their places, and the texts of problems.

A document without aliases and with a limited depth is composed in a time that its size bounds.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from exporter.errors import ConfigurationError, Problem

MAX_BYTES = 256 * 1024
"""Size limit of a file; a configuration is a few KiB, and PyYAML reads about 100 KiB a second."""

MAX_DEPTH = 32
"""Limit of nested mappings and lists in a file; the configuration has five levels."""

EMPTY = yaml.MappingNode("", [], yaml.Mark("", 0, 0, 0, "", 0))
"""Root of an empty document."""


class _Loader(yaml.SafeLoader):
    """Composer of nodes; without aliases, and with a limited depth, the size of a file bounds the work."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node; raises MarkedYAMLError for an alias and for an excessive depth."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # types-PyYAML leaves it out
        mark = event.start_mark
        if type(event) is yaml.AliasEvent:
            message = f"alias *{event.anchor}: aliases are not supported, write the value out"
            raise yaml.MarkedYAMLError(problem=message, problem_mark=mark)
        if self.depth >= MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {MAX_DEPTH} levels", problem_mark=mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def compose(text: str, source: str) -> yaml.Node | None:
    """The root node of a YAML document, None for an empty one."""
    try:
        return _Loader(text).get_single_node()
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, error.position - before.rfind("\n")
        message = f"the character {ascii(chr(error.character))[1:-1]} is not allowed in YAML"
        problem = Problem(source, line, column, message)
    except yaml.MarkedYAMLError as error:
        message = ", ".join(part for part in (error.context, error.problem) if part)
        problem = problem_at(source, error.problem_mark or error.context_mark, message)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        # PyYAML does not convert the errors of chr() for "\UFFFFFFFF" and int() for %YAML 1.999….
        problem = problem_at(source, None, f"not YAML: {error}")
    raise ConfigurationError([problem])


def problem_at(source: str, mark: Any, message: str) -> Problem:
    """Return a problem at a mark of PyYAML, on one printable line."""
    line, column = (mark.line + 1, mark.column + 1) if mark else (None, None)
    return Problem(source, line, column, printable(" ".join(message.split())))


def is_null(node: yaml.Node) -> bool:
    """Return True for an empty value or null."""
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def join(path: str, key: str) -> str:
    """Return the path of a key in a mapping."""
    shown = key if re.fullmatch(r"[\w-]{1,60}", key) else quote(key)
    return f"{path}.{shown}" if path else shown


def quote(text: str) -> str:
    """Return text in double quotes, shortened, with control characters escaped for terminals and logs."""
    return f'"{printable(text if len(text) <= 60 else text[:59] + "…")}"'


def printable(text: str) -> str:
    """Return text with control characters escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
