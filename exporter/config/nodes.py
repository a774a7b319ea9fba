"""YAML nodes with line and column, and the texts of problems.

Aliases are rejected and the depth is limited, so that the time to read a document is proportional to its size.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from exporter.errors import ConfigurationError, Problem

MAX_BYTES = 256 * 1024
"""Maximum size of a file. A configuration has a few KiB, and PyYAML reads about 100 KiB per second."""

MAX_DEPTH = 32
"""Maximum depth of nested mappings and lists. The configuration has five levels."""

MAX_SHOWN_CHARACTERS = 60
"""Maximum length of a key or a value in a message."""

EMPTY = yaml.MappingNode("", [], yaml.Mark("", 0, 0, 0, "", 0))
"""Root of an empty document."""


class _Loader(yaml.SafeLoader):
    """Composer of nodes that rejects aliases and excessive depth."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node. Raises MarkedYAMLError for an alias and for an excessive depth."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # types-PyYAML does not annotate this method
        mark = event.start_mark
        if type(event) is yaml.AliasEvent:
            message = f"alias *{event.anchor}: aliases are not supported; repeat the value"
            raise yaml.MarkedYAMLError(problem=message, problem_mark=mark)
        if self.depth >= MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {MAX_DEPTH} levels", problem_mark=mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def compose(text: str, source: str) -> yaml.Node | None:
    """Return the root node of a YAML document, or None for an empty document. Raises ConfigurationError."""
    try:
        return _Loader(text).get_single_node()
    except yaml.reader.ReaderError as error:
        text_before = text[: error.position]
        line, column = text_before.count("\n") + 1, error.position - text_before.rfind("\n")
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
    """Return the path of a key in a mapping. A key with other characters than letters, digits, `_` and `-`, or a long key, is quoted."""
    is_plain = len(key) <= MAX_SHOWN_CHARACTERS and re.fullmatch(r"[\w-]+", key)
    shown_key = key if is_plain else quote(key)
    return f"{path}.{shown_key}" if path else shown_key


def quote(text: str) -> str:
    """Return at most `MAX_SHOWN_CHARACTERS` of a text in double quotes, with control characters escaped for terminals and logs."""
    shown_text = text if len(text) <= MAX_SHOWN_CHARACTERS else text[: MAX_SHOWN_CHARACTERS - 1] + "…"
    return f'"{printable(shown_text)}"'


def printable(text: str) -> str:
    """Return text with control characters escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
