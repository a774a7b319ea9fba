"""YAML loader: converts text to dataclasses, and reports problems with file, line and column.

Reports the first error of the YAML syntax, or all problems of keys and values.

A mapping overrides the default value of the field key by key. A dataclass may have a method
`problems() -> Iterable[tuple[field, message]]`, which checks the combination of fields if each field is valid.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import typing
from collections.abc import Iterable
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

import yaml

from exporter.config.expectation import MAX_COMPARED_CHARACTERS, choices, expectation, node_kind, suggest
from exporter.config.nodes import EMPTY, MAX_BYTES, compose, is_null, join, printable, problem_at, quote
from exporter.config.options import (
    REQUIRED,
    Notation,
    Range,
    Secret,
    annotation_of,
    is_union,
    options_of,
    unwrap,
)
from exporter.errors import ConfigurationError, Problem

_T = TypeVar("_T")
_INVALID: Any = object()  # result of a conversion that reported a problem


def load(text: str | bytes, source: str, cls: type[_T]) -> _T:
    """Return a dataclass instance from the YAML text of a source. An empty text has the defaults. Raises ConfigurationError."""
    if len(text) > MAX_BYTES:
        raise ConfigurationError(
            [Problem(source, line=None, column=None, message=f"larger than {MAX_BYTES >> 10} KiB")]
        )
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            text_before = error.object[: error.start].decode("utf-8")
            line, column = text_before.count("\n") + 1, len(text_before) - text_before.rfind("\n")
            message = f"the byte 0x{error.object[error.start]:02x} is not UTF-8"
            raise ConfigurationError([Problem(source, line=line, column=column, message=message)]) from None
    root = compose(text.removeprefix("\ufeff"), source)
    if root is None or is_null(root):
        root = EMPTY
    conversion = _Conversion(source)
    value = conversion.convert(root, cls, "", REQUIRED)
    if conversion.problems:
        raise ConfigurationError(
            sorted(conversion.problems, key=lambda problem: (problem.line or 0, problem.column or 0))
        )
    return typing.cast("_T", value)


def load_file(path: str | Path, cls: type[_T]) -> _T:
    """Read and `load` a file. Raises ConfigurationError, also for an unreadable file."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(
            [Problem(str(path), line=None, column=None, message=f"cannot be read: {reason}")]
        ) from error
    return load(data, str(path), cls)


def parse(text: str, source: str, hint: Any) -> Any:
    """Return the value of a flag or an environment variable. Raises ConfigurationError, which names the source.

    The hint is a text, a path, a float, a type with a notation, or choices; a text is never an integer or a boolean.
    """
    conversion = _Conversion(source)
    value = conversion.convert(yaml.ScalarNode("tag:yaml.org,2002:str", text), hint, "", REQUIRED)
    if conversion.problems:
        raise ConfigurationError(conversion.problems)
    return value


class _Conversion:
    """Conversion of a file from nodes to values. Collects all problems instead of raising the first."""

    def __init__(self, source: str) -> None:
        self.problems: list[Problem] = []
        self._source = source
        self._constructor = yaml.constructor.SafeConstructor()

    def convert(self, node: yaml.Node, hint: Any, path: str, default: Any) -> Any:
        """Return a node as a value of a type. Returns `_INVALID` after a problem.

        *path* is the path of the node in messages, such as `gpu.period`. If the type is a dataclass, missing keys have the values of
        *default*. If *default* is `REQUIRED`, they have the default values of the class.
        """
        base, _ = unwrap(hint)
        expected_kind = node_kind(base)
        if is_union(base):
            return self._convert_union(node, get_args(base), path, default)
        if is_null(node):
            advice = f"expected {expectation(hint)}"
            if expected_kind is not yaml.ScalarNode:
                empty_value = "{}" if expected_kind is yaml.MappingNode else "[]"
                advice = f"write {empty_value}, or remove the key for its default"
            return self._report(node, path, f"the value is missing; {advice}")
        if isinstance(node, yaml.MappingNode) and dataclasses.is_dataclass(base):
            return self._convert_dataclass(node, typing.cast("type", base), path, default)
        if isinstance(node, yaml.MappingNode) and expected_kind is yaml.MappingNode:
            return self._convert_mapping(node, hint, path)
        if isinstance(node, yaml.SequenceNode) and expected_kind is yaml.SequenceNode:
            return self._convert_sequence(node, base, path)
        if isinstance(node, yaml.ScalarNode) and expected_kind is yaml.ScalarNode:
            if re.search("[\ud800-\udfff]", node.value):
                return self._report(
                    node, path, "contains half of a surrogate pair, which is not valid Unicode"
                )
            value, bounds = self._convert_scalar(node, hint), annotation_of(hint, Range)
            if value is not _INVALID and (bounds is None or bounds.contains(value)):
                return value
        return self._report_mismatch(node, hint, path)

    def _report(self, node: yaml.Node, path: str, message: str) -> Any:
        """Add a problem, and return `_INVALID`."""
        text = f"{path}: {message}" if path else message
        self.problems.append(problem_at(self._source, node.start_mark, text))
        return _INVALID

    def _report_mismatch(self, node: yaml.Node, hint: Any, path: str) -> Any:
        """Report a node of a different type or out of range, with advice for common mistakes. Secrets are not shown."""
        base, _ = unwrap(hint)
        description = "<secret>" if annotation_of(hint, Secret) else self._describe(node)
        message = f"expected {expectation(hint)}, found {description}"
        is_text = isinstance(node, yaml.ScalarNode) and isinstance(self._scalar_value(node), str)
        if node_kind(base) is yaml.SequenceNode and isinstance(node, yaml.ScalarNode):
            message += "; write it as a list, [...]"
        elif base in (str, Path) and not is_text:
            message += "; put text in quotes"
        elif is_text:
            matches = difflib.get_close_matches(
                node.value[:MAX_COMPARED_CHARACTERS], map(str, choices(base)), n=1
            )
            message += f', did you mean "{matches[0]}"?' if matches else ""
        return self._report(node, path, message)

    def _convert_union(self, node: yaml.Node, members: tuple[Any, ...], path: str, default: Any) -> Any:
        """Return a node as a value of the first member that accepts the node. If only one member is possible, report its problems."""
        if is_null(node) and NoneType in members:
            return None
        candidates = [
            member
            for member in members
            if member is not NoneType and isinstance(node, node_kind(unwrap(member)[0]))
        ]
        if len(candidates) == 1:
            return self.convert(node, candidates[0], path, default)
        for member in candidates:
            attempt = _Conversion(self._source)
            value = attempt.convert(node, member, path, default)
            if not attempt.problems:
                return value
        return self._report_mismatch(node, typing.Union[members], path)  # noqa: UP007  (the members are known only at run time)

    def _convert_sequence(self, node: yaml.SequenceNode, base: Any, path: str) -> Any:
        """Return a list as a tuple, list or frozenset. An item that is twice in a frozenset is a problem."""
        item_hint, *_ = get_args(base)
        origin = get_origin(base)
        values: list[Any] = []
        for index, child in enumerate(node.value):
            value = self.convert(child, item_hint, f"{path}[{index}]", REQUIRED)
            if origin is frozenset and value is not _INVALID and value in values:
                value = self._report(child, f"{path}[{index}]", "is listed twice")
            values.append(value)
        return _INVALID if any(value is _INVALID for value in values) else origin(values)

    def _convert_mapping(self, node: yaml.MappingNode, hint: Any, path: str) -> Any:
        """Return a mapping with any keys as a dict, whose values have the type of the hint."""
        base, _ = unwrap(hint)
        _, value_hint = get_args(base)
        return {  # contains `_INVALID` after a problem; `load` then raises
            key: self.convert(child, value_hint, join(path, key), REQUIRED)
            for key, (_, child) in self._entries(node, path).items()
        }

    def _entries(self, node: yaml.MappingNode, path: str) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """Return the nodes of key and value by key. Reports duplicate keys, and keys that are not text."""
        entries: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or not isinstance(self._scalar_value(key_node), str):
                message = f"a key must be a text, found {self._describe(key_node)}; put it in quotes"
                self._report(key_node, path, message)
                continue
            key = key_node.value
            if key in entries:
                first_key_node, _ = entries[key]
                first_line = first_key_node.start_mark.line + 1  # PyYAML counts from 0
                self._report(key_node, join(path, key), f"duplicate key, first set on line {first_line}")
            else:
                entries[key] = key_node, value_node
        return entries

    def _report_unknown_key(self, key_node: yaml.Node, path: str, known_keys: Iterable[str]) -> None:
        key = key_node.value
        self._report(key_node, path, f"unknown key {quote(key)}, {suggest(key, known_keys)}")

    def _convert_dataclass(self, node: yaml.MappingNode, cls: type, path: str, default: Any) -> Any:
        """Return a mapping as a dataclass. The method `problems` is called only if every key and value is valid."""
        problem_count = len(self.problems)
        options = {option.key: option for option in options_of(cls, default)}
        entries = self._entries(node, path)
        for key, (key_node, _) in entries.items():
            if key not in options:
                self._report_unknown_key(key_node, join(path, key), options)
        values: dict[str, Any] = {}
        node_and_path_by_name: dict[str, tuple[yaml.Node, str]] = {}
        for key, option in options.items():
            option_path = join(path, key)
            _, child = entries.get(key, (None, None))
            node_and_path_by_name[option.name] = child or node, option_path
            values[option.name] = option.default
            if child is not None:
                values[option.name] = self.convert(child, option.hint, option_path, option.default)
            elif option.default is REQUIRED:
                self._report(node, path, f"missing key {quote(key)} ({expectation(option.hint)})")
        if len(self.problems) > problem_count:
            return _INVALID
        instance = cls(**values)
        check = getattr(instance, "problems", None)
        for name, message in check() if callable(check) else ():
            self._report(*node_and_path_by_name[name], message)
        return _INVALID if len(self.problems) > problem_count else instance

    def _scalar_value(self, node: yaml.ScalarNode) -> bool | int | float | str | None:
        """Return a scalar as PyYAML reads the scalar. Other types, such as dates, remain text."""
        text: str = node.value
        try:
            value = self._constructor.construct_object(node)
        except (yaml.YAMLError, ValueError, LookupError):
            return text  # an unknown tag, or a text such as 0b_ that only looks like a number
        return value if value is None or isinstance(value, bool | int | float) else text

    def _convert_scalar(self, node: yaml.ScalarNode, hint: Any) -> Any:
        """Convert a scalar to a type. Return `_INVALID` for a different type."""
        (base, _), notation, value = unwrap(hint), annotation_of(hint, Notation), self._scalar_value(node)
        allowed_values = choices(base)
        if notation is not None:
            # Reject an unquoted number or `true`: the author did not intend a text.
            if base is str and not isinstance(value, str):
                return _INVALID
            try:
                return notation.parse(node.value)
            except ValueError:
                return _INVALID
        if allowed_values:
            if isinstance(value, bool) and node.value in allowed_values:
                return allowed_values[node.value]  # YAML 1.1 reads a bare `off` as false
            matches = (
                allowed_values[text] for text in allowed_values if type(text) is type(value) and text == value
            )
            return next(matches, _INVALID)
        if base is Path:
            return Path(value) if isinstance(value, str) and value and "\0" not in value else _INVALID
        if base is float and not isinstance(value, bool) and node.style is None:
            try:
                # PyYAML reads 1e3 as text.
                value = float(value) if isinstance(value, int | float) else float(node.value)
            except (ValueError, OverflowError):
                return _INVALID
        is_finite = not isinstance(value, float) or math.isfinite(value)
        return value if type(value) is base and is_finite else _INVALID

    def _describe(self, node: yaml.Node) -> str:
        """Describe a node for a message."""
        if not isinstance(node, yaml.ScalarNode):
            return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
        if is_null(node):
            return "nothing"
        return quote(node.value) if isinstance(self._scalar_value(node), str) else printable(node.value)
