"""YAML loader: text to dataclasses, with all problems as file:line:column; and dataclasses to YAML.

A mapping overrides the *default value of the field*, key by key. A dataclass may have a method
`problems() -> Iterable[tuple[field, message]]`, which checks the combination of fields.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml

from exporter.config.options import (
    REQUIRED,
    UNCHANGED,
    Hidden,
    Keys,
    Notation,
    Range,
    is_union,
    mark_of,
    options_of,
    unwrap,
)
from exporter.errors import ConfigurationError, Problem

MAX_BYTES = 256 * 1024
"""Size limit of a file; a configuration is a few KiB, and PyYAML reads about 100 KiB a second."""

MAX_DEPTH = 32
"""Limit of nested mappings and lists in a file; the configuration has five levels."""

_T = TypeVar("_T")
_BAD: Any = object()  # result of a conversion that reported a problem
_START = yaml.Mark("", 0, 0, 0, "", 0)


def load(text: str | bytes, source: str, cls: type[_T]) -> _T:
    """Return a dataclass instance from the YAML text of a source; the defaults for "". Raises ConfigurationError."""
    if len(text) > MAX_BYTES:
        raise ConfigurationError([Problem(source, None, None, f"larger than {MAX_BYTES >> 10} KiB")])
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            before = error.object[: error.start].decode("utf-8")
            line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
            message = f"the byte 0x{error.object[error.start]:02x} is not UTF-8"
            raise ConfigurationError([Problem(source, line, column, message)]) from None
    root = _compose(text.removeprefix("\ufeff"), source)
    if root is None or _is_null(root):
        root = yaml.MappingNode("", [], _START)
    conversion = _Conversion(source)
    value = conversion.convert(root, cls, "", REQUIRED)
    if conversion.problems:
        in_order = sorted(conversion.problems, key=lambda each: (each.line or 0, each.column or 0))
        raise ConfigurationError(in_order)
    return typing.cast("_T", value)


def load_file(path: str | Path, cls: type[_T]) -> _T:
    """Read and `load` a file; raises ConfigurationError, also for an unreadable file."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError([Problem(str(path), None, None, f"cannot be read: {reason}")]) from error
    return load(data, str(path), cls)


def parse(text: str, source: str, hint: Any) -> Any:
    """A value from a command line or environment variable, as in a file; raises ConfigurationError that names the source."""
    conversion = _Conversion(source)
    value = conversion.convert(yaml.ScalarNode("tag:yaml.org,2002:str", text), hint, "", REQUIRED)
    if conversion.problems:
        raise ConfigurationError(conversion.problems)
    return value


def plain(hint: Any, value: Any) -> Any:
    """Return a value as plain YAML or JSON data, without secrets."""
    base, _ = unwrap(hint)
    notation = mark_of(hint, Notation)
    if value is None:
        return None
    if mark_of(hint, Hidden):
        return value and "<secret>"
    if is_union(base):
        return plain(next(member for member in get_args(base) if member is not NoneType), value)
    if dataclasses.is_dataclass(value):
        options = options_of(type(value), value)
        return {each.key: plain(each.hint, each.default) for each in options if each.default is not UNCHANGED}
    if isinstance(value, Mapping):
        return {key: plain(type(inner), inner) for key, inner in value.items()}
    if notation is not None:
        return notation.format(value)
    if isinstance(value, frozenset):
        value = tuple(sorted(value, key=list(get_args(base)[0]).index))
    if isinstance(value, tuple):
        return [plain(get_args(base)[0], item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def dump(instance: Any) -> str:
    """An instance of a dataclass as YAML, which `load` reads back."""
    shown = plain(type(instance), instance)
    return yaml.safe_dump(shown, sort_keys=False, default_flow_style=None, width=110)


def suggest(word: str, known: Iterable[str]) -> str:
    """Return `did you mean "…"?` for a similar known word, otherwise the list of known words."""
    words = list(known)
    near = difflib.get_close_matches(word[:100], words, 1, 0.6)
    if near:
        return f'did you mean "{near[0]}"?'
    return f"expected one of {', '.join(words)}" if words else "nothing is allowed here"


def expectation(hint: Any) -> str:
    """Describe the allowed values of a type."""
    base, _ = unwrap(hint)
    if is_union(base):
        return " or ".join(expectation(member) for member in get_args(base))
    allowed = choices(base)
    if allowed:
        return f"one of {', '.join(map(str, allowed))}"
    notation = mark_of(hint, Notation)
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a path"}
    if _kind(base) is not yaml.ScalarNode:
        return "a mapping" if _kind(base) is yaml.MappingNode else "a list"
    text = notation.expected if notation else words.get(base, "null")
    return f"{text} {limits(hint)}".rstrip()


def limits(hint: Any) -> str:
    """Describe the range of a type in the notation of the file; "" for an unlimited type."""
    notation, bounds = mark_of(hint, Notation), mark_of(hint, Range) or Range()
    shown: Callable[[Any], str] = notation.format if notation else "{:.15g}".format
    if bounds.minimum is not None and bounds.maximum is not None:
        return f"from {shown(bounds.minimum)} to {shown(bounds.maximum)}"
    if bounds.minimum is not None:
        return f"of at least {shown(bounds.minimum)}"
    return "" if bounds.maximum is None else f"of at most {shown(bounds.maximum)}"


def choices(base: Any) -> dict[Any, Any]:
    """Return the values of a closed set by their notation; empty for an open type."""
    if get_origin(base) is Literal:
        return {text: text for text in get_args(base)}
    if isinstance(base, type) and issubclass(base, enum.Enum):
        return {member.value: member for member in base}
    return {}


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


def _compose(text: str, source: str) -> yaml.Node | None:
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
        problem = _problem(source, error.problem_mark or error.context_mark, message)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        # PyYAML does not convert the errors of chr() for "\UFFFFFFFF" and int() for %YAML 1.999….
        problem = _problem(source, None, f"not YAML: {error}")
    raise ConfigurationError([problem])


def _problem(source: str, mark: Any, message: str) -> Problem:
    line, column = (mark.line + 1, mark.column + 1) if mark else (None, None)
    return Problem(source, line, column, _printable(" ".join(message.split())))


class _Conversion:
    """Conversion of a file from nodes to values; collects problems instead of raising the first."""

    def __init__(self, source: str) -> None:
        self.problems: list[Problem] = []
        self._source = source
        self._constructor = yaml.constructor.SafeConstructor()

    def convert(self, node: yaml.Node, hint: Any, path: str, default: Any) -> Any:
        """The value of a node as a type, laid over a default; `_BAD` when a problem was reported."""
        base, _ = unwrap(hint)
        kind = _kind(base)
        if is_union(base):
            return self._union(node, get_args(base), path, default)
        if _is_null(node):
            advice = f"expected {expectation(hint)}"
            if kind is not yaml.ScalarNode:
                shown = "{}" if kind is yaml.MappingNode else "[]"
                advice = f"write {shown}, or remove the key for its default"
            return self._bad(node, path, f"no value is given; {advice}")
        if isinstance(node, yaml.MappingNode) and dataclasses.is_dataclass(base):
            return self._dataclass(node, typing.cast("type", base), path, default)
        if isinstance(node, yaml.MappingNode) and kind is yaml.MappingNode:
            return self._mapping(node, hint, path)
        if isinstance(node, yaml.SequenceNode) and kind is yaml.SequenceNode:
            return self._sequence(node, base, path)
        if isinstance(node, yaml.ScalarNode) and kind is yaml.ScalarNode:
            if re.search("[\ud800-\udfff]", node.value):
                return self._bad(node, path, "contains half of a surrogate pair, which is not valid Unicode")
            value, bounds = self._value_as(node, hint), mark_of(hint, Range)
            if value is not _BAD and (bounds is None or bounds.holds(value)):
                return value
        return self._mismatch(node, hint, path)

    def _bad(self, node: yaml.Node, path: str, message: str) -> Any:
        text = f"{path}: {message}" if path else message
        self.problems.append(_problem(self._source, node.start_mark, text))
        return _BAD

    def _mismatch(self, node: yaml.Node, hint: Any, path: str) -> Any:
        base, _ = unwrap(hint)
        found = "<secret>" if mark_of(hint, Hidden) else self._found(node)
        message = f"expected {expectation(hint)}, found {found}"
        is_text = isinstance(node, yaml.ScalarNode) and isinstance(self._value(node), str)
        if _kind(base) is yaml.SequenceNode and isinstance(node, yaml.ScalarNode):
            message += "; write it as a list, [...]"
        elif base in (str, Path) and not is_text:
            message += "; put text in quotes"
        elif is_text:
            near = difflib.get_close_matches(node.value[:100], map(str, choices(base)), 1)
            message += f', did you mean "{near[0]}"?' if near else ""
        return self._bad(node, path, message)

    def _union(self, node: yaml.Node, members: tuple[Any, ...], path: str, default: Any) -> Any:
        if _is_null(node) and NoneType in members:
            return None
        fitting = [m for m in members if m is not NoneType and isinstance(node, _kind(unwrap(m)[0]))]
        if len(fitting) == 1:
            return self.convert(node, fitting[0], path, default)
        for member in fitting:
            attempt = _Conversion(self._source)
            value = attempt.convert(node, member, path, default)
            if not attempt.problems:
                return value
        return self._mismatch(node, typing.Union[members], path)  # noqa: UP007  (made from a tuple)

    def _sequence(self, node: yaml.SequenceNode, base: Any, path: str) -> Any:
        item, origin = get_args(base)[0], get_origin(base)
        values: list[Any] = []
        for index, child in enumerate(node.value):
            value = self.convert(child, item, f"{path}[{index}]", REQUIRED)
            if origin is frozenset and value is not _BAD and value in values:
                value = self._bad(child, f"{path}[{index}]", "is listed twice")
            values.append(value)
        return _BAD if any(value is _BAD for value in values) else origin(values)

    def _mapping(self, node: yaml.MappingNode, hint: Any, path: str) -> Any:
        keys = mark_of(hint, Keys)
        known: Mapping[str, Any] = keys.defaults if keys else {}
        values = dict(known)
        for text, (key, child) in self._entries(node, path).items():
            inner = _join(path, text)
            if text in known:
                values[text] = self.convert(child, type(known[text]), inner, known[text])
            elif keys:
                self._unknown(key, inner, known)
            else:
                values[text] = self.convert(child, get_args(unwrap(hint)[0])[1], inner, REQUIRED)
        return values  # after a problem with bad values inside; the caller then raises

    def _entries(self, node: yaml.MappingNode, path: str) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """A mapping's entries by the key's text; reports duplicates, and keys that are no text."""
        entries: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or not isinstance(self._value(key), str):
                self._bad(key, path, f"a key must be a text, found {self._found(key)}; put it in quotes")
            elif key.value in entries:
                first = entries[key.value][0].start_mark.line + 1
                self._bad(key, _join(path, key.value), f"duplicate key, first set on line {first}")
            else:
                entries[key.value] = key, value
        return entries

    def _unknown(self, key: yaml.Node, path: str, known: Iterable[str]) -> None:
        self._bad(key, path, f"unknown key {_quote(key.value)}, {suggest(key.value, known)}")

    def _dataclass(self, node: yaml.MappingNode, cls: type, path: str, default: Any) -> Any:
        before = len(self.problems)
        options = {option.key: option for option in options_of(cls, default)}
        entries = self._entries(node, path)
        for text, (key, _) in entries.items():
            if text not in options:
                self._unknown(key, _join(path, text), options)
        values: dict[str, Any] = {}
        places: dict[str, tuple[yaml.Node, str]] = {}
        for text, option in options.items():
            inner = _join(path, text)
            _, child = entries.get(text, (None, None))
            places[option.name] = child or node, inner
            values[option.name] = option.default
            if child is not None:
                values[option.name] = self.convert(child, option.hint, inner, option.default)
            elif option.default is REQUIRED:
                self._bad(node, path, f"missing key {_quote(text)} ({expectation(option.hint)})")
        if len(self.problems) > before:
            return _BAD
        made = cls(**values)
        check = getattr(made, "problems", None)
        for name, message in check() if callable(check) else ():
            self._bad(*places[name], message)
        return _BAD if len(self.problems) > before else made

    def _value(self, node: yaml.ScalarNode) -> bool | int | float | str | None:
        """Return a scalar as PyYAML reads the scalar; other types, such as dates, remain text."""
        text: str = node.value
        try:
            value = self._constructor.construct_object(node)
        except (
            yaml.YAMLError,
            ValueError,
            LookupError,
        ):  # a foreign tag; 0b_ looks like a number and is none
            return text
        return value if value is None or isinstance(value, bool | int | float) else text

    def _value_as(self, node: yaml.ScalarNode, hint: Any) -> Any:
        """Convert a scalar to a type; returns `_BAD` for a different type."""
        (base, _), notation, value = unwrap(hint), mark_of(hint, Notation), self._value(node)
        allowed = choices(base)
        if notation is not None:
            # Reject an unquoted number or a word such as true: the author did not intend a text.
            if base is str and not isinstance(value, str):
                return _BAD
            try:
                return notation.parse(node.value)
            except ValueError:
                return _BAD
        if allowed:
            if isinstance(value, bool) and node.value in allowed:
                return allowed[node.value]  # YAML 1.1 reads a bare `off` as false
            fits = (allowed[text] for text in allowed if type(text) is type(value) and text == value)
            return next(fits, _BAD)
        if base is Path:
            return Path(value) if isinstance(value, str) and value and "\0" not in value else _BAD
        if base is float and not isinstance(value, bool) and node.style is None:
            try:
                value = float(node.value if isinstance(value, str) else value or 0)  # 1e3 is a text to PyYAML
            except (ValueError, OverflowError):
                return _BAD
        infinite = isinstance(value, float) and not math.isfinite(value)
        return _BAD if type(value) is not base or infinite else value

    def _found(self, node: yaml.Node) -> str:
        """A node in words, for messages."""
        if not isinstance(node, yaml.ScalarNode):
            return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
        if _is_null(node):
            return "nothing"
        return _quote(node.value) if isinstance(self._value(node), str) else _printable(node.value)


def _kind(base: Any) -> type[yaml.Node]:
    """The kind of node that a type is written as."""
    if dataclasses.is_dataclass(base) or get_origin(base) in (dict, Mapping):
        return yaml.MappingNode
    return yaml.SequenceNode if get_origin(base) in (tuple, list, frozenset) else yaml.ScalarNode


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _join(path: str, key: str) -> str:
    shown = key if re.fullmatch(r"[\w-]{1,60}", key) else _quote(key)
    return f"{path}.{shown}" if path else shown


def _quote(text: str) -> str:
    """Return text in double quotes, shortened, with control characters escaped for terminals and logs."""
    return f'"{_printable(text if len(text) <= 60 else text[:59] + "…")}"'


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
