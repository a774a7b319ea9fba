"""YAML text into dataclasses: every problem at once, each with its file:line:column.

Used in the sidecar, for its own configuration, for `web.config.yml` and described machines. Text and a dataclass come
in; an instance goes out, or one `ConfigurationError`, whatever the text is. No threads, no state.

What a dataclass may hold: other dataclasses, `tuple[T, ...]`, `list[T]`, `frozenset[T]`, `dict[str, T]` or
`Mapping[str, T]`, `T | None`, unions of simple types, `Literal`, `Enum` (by value), `Path`, `str`, `int`, `float`,
`bool`, and what `options` annotates. A mapping is laid over the *default value of its field*, key by key. A dataclass
with a method `problems() -> Iterable[tuple[field, message]]` is asked whether its fields fit together; a `ValueError`
from its `__post_init__` is a problem of the whole mapping.
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

from exporter.config.nodes import Listing, Node, Scalar, Table, place_after, quote, read_nodes, scalar_of
from exporter.config.options import (
    REQUIRED,
    Hidden,
    Keys,
    Notation,
    Range,
    format_size,
    is_union,
    mark_of,
    options_of,
    unwrap,
)
from exporter.errors import ConfigurationError, Problem

MAX_BYTES = 256 * 1024
"""Size limit of one file; a configuration is a few KiB, and PyYAML reads about 100 KiB a second."""

_T = TypeVar("_T")
_BAD: Any = object()  # what a conversion gives that has reported a problem


def load(text: str | bytes, source: str, cls: type[_T]) -> _T:
    """Make an instance of a dataclass from YAML text (bytes must be UTF-8); empty text gives the defaults.

    Raises:
        ConfigurationError: All problems of the text, in its order; `source` is the file's name in them.
    """
    if len(text) > MAX_BYTES:
        raise ConfigurationError([Problem(source, None, None, f"larger than {format_size(MAX_BYTES)}")])
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            before = error.object[: error.start].decode("utf-8")
            found = f"the byte 0x{error.object[error.start]:02x} is not UTF-8"
            raise ConfigurationError([Problem(source, *place_after(before), found)]) from None
    conversion = _Conversion(source)
    root = read_nodes(text.removeprefix("\ufeff"), conversion.note)
    if root is not None or not conversion.problems:
        document = Table(1, 1, ()) if root is None or _is_null(root) else root
        value = conversion.convert(document, cls, "", REQUIRED)
    if conversion.problems:
        raise ConfigurationError(
            sorted(conversion.problems, key=lambda each: (each.line or 0, each.column or 0))
        )
    return typing.cast("_T", value)


def load_file(path: str | Path, cls: type[_T]) -> _T:
    """Read a file and `load` it; raises ConfigurationError also where it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError([Problem(str(path), None, None, f"cannot be read: {reason}")]) from error
    return load(data, str(path), cls)


def parse(text: str, source: str, hint: Any) -> Any:
    """One scalar from a command line or an environment variable, with the checks of a file's.

    It is not YAML: quotes are part of it, and for a text so is everything else.

    Raises:
        ConfigurationError: It is not of that type or out of range; `source` is the flag or variable.
    """
    conversion = _Conversion(source)
    value = conversion.convert(
        scalar_of(text, plain=unwrap(hint)[0] in (bool, int, float)), hint, "", REQUIRED
    )
    if conversion.problems:
        raise ConfigurationError([Problem(source, None, None, p.message) for p in conversion.problems])
    return value


def suggest(word: str, known: Iterable[str]) -> str:
    """`did you mean "…"?` where a known word is near, else the list of them."""
    words = list(known)
    near = difflib.get_close_matches(word[:100], words, 1, 0.6)
    if near:
        return f'did you mean "{near[0]}"?'
    return f"expected one of {', '.join(words)}" if words else "nothing is allowed here"


def expectation(hint: Any) -> str:
    """What a type allows, in words, for messages and documentation."""
    base, _ = unwrap(hint)
    if is_union(base):
        return " or ".join(expectation(member) for member in get_args(base))
    allowed = choices(base)
    if allowed:
        return f"one of {', '.join(map(str, allowed))}"
    notation = mark_of(hint, Notation)
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a path"}
    kind = {Table: "a mapping", Listing: "a list"}.get(_kind(base), "null")
    text = notation.expected if notation else words.get(base, kind)
    return f"{text} {limits(hint)}".rstrip()


def limits(hint: Any) -> str:
    """The range of a type in words, as it is written in a file; "" without one."""
    notation, bounds = mark_of(hint, Notation), mark_of(hint, Range) or Range()
    shown: Callable[[Any], str] = notation.format if notation else "{:.15g}".format
    if bounds.minimum is not None and bounds.maximum is not None:
        return f"from {shown(bounds.minimum)} to {shown(bounds.maximum)}"
    if bounds.minimum is not None:
        return f"of at least {shown(bounds.minimum)}"
    return "" if bounds.maximum is None else f"of at most {shown(bounds.maximum)}"


def choices(base: Any) -> dict[Any, Any]:
    """The values of a closed set by what is written; empty for an open type."""
    if get_origin(base) is Literal:
        return {text: text for text in get_args(base)}
    if isinstance(base, type) and issubclass(base, enum.Enum):
        return {member.value: member for member in base}
    return {}


class _Conversion:
    """One file on its way from nodes to values; collects problems instead of raising the first."""

    def __init__(self, source: str) -> None:
        self.problems: list[Problem] = []
        self._source = source

    def note(self, line: int, column: int, message: str) -> None:
        """Keep a problem."""
        self.problems.append(Problem(self._source, line, column, message))

    def convert(self, node: Node, hint: Any, path: str, default: Any) -> Any:
        """The value of a node as a type, laid over a default; `_BAD` when a problem was reported."""
        base, _ = unwrap(hint)
        kind = _kind(base)
        if is_union(base):
            return self._union(node, get_args(base), path, default)
        if type(node) is Node:  # refused and reported by the reader
            return _BAD
        if _is_null(node):
            remedy = {
                Table: "write {}, or remove the key for its default",
                Listing: "write [] for an empty list",
            }
            advice = remedy.get(kind, f"expected {expectation(hint)}")
            return self._bad(node, path, f"no value is given; {advice}")
        if isinstance(node, Table) and dataclasses.is_dataclass(base):
            return self._dataclass(node, typing.cast("type", base), path, default)
        if isinstance(node, Table) and kind is Table:
            return self._mapping(node, hint, path)
        if isinstance(node, Listing) and kind is Listing:
            return self._sequence(node, base, path)
        if isinstance(node, Scalar) and kind is Scalar:
            return self._scalar(node, hint, path)
        return self._mismatch(node, hint, path)

    def _bad(self, node: Node, path: str, message: str) -> Any:
        self.note(node.line, node.column, f"{path}: {message}" if path else message)
        return _BAD

    def _mismatch(self, node: Node, hint: Any, path: str) -> Any:
        base, _ = unwrap(hint)
        found = "<secret>" if mark_of(hint, Hidden) else _found(node)
        message = f"expected {expectation(hint)}, found {found}"
        is_text = isinstance(node, Scalar) and isinstance(node.value, str)
        if _kind(base) is Listing and isinstance(node, Scalar):
            message += "; write it as a list, [...]"
        elif base in (str, Path) and not is_text:
            message += "; put text in quotes"
        elif isinstance(node, Scalar) and is_text:
            near = difflib.get_close_matches(node.text[:100], map(str, choices(base)), 1)
            message += f', did you mean "{near[0]}"?' if near else ""
        return self._bad(node, path, message)

    def _union(self, node: Node, members: tuple[Any, ...], path: str, default: Any) -> Any:
        if type(node) is Node:
            return _BAD
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

    def _sequence(self, node: Listing, base: Any, path: str) -> Any:
        item, origin = get_args(base)[0], get_origin(base)
        values: list[Any] = []
        for index, child in enumerate(node.items):
            value = self.convert(child, item, f"{path}[{index}]", REQUIRED)
            if origin is frozenset and value is not _BAD and value in values:
                value = self._bad(child, f"{path}[{index}]", "is listed twice")
            values.append(value)
        return _BAD if any(value is _BAD for value in values) else origin(values)

    def _mapping(self, node: Table, hint: Any, path: str) -> Any:
        keys = mark_of(hint, Keys)
        known: Mapping[str, Any] = keys.defaults if keys else {}
        values = dict(known)
        for text, (key, child) in self._entries(node, path).items():
            inner = _join(path, text)
            if text in known:
                values[text] = self.convert(child, type(known[text]), inner, known[text])
            elif keys:
                self._unknown(key, inner, known)
            elif type(key.value) is not str or key.surprise is not None:
                self._bad(key, path, f"the key {quote(text)} is not a text; put it in quotes")
            else:
                values[text] = self.convert(child, get_args(unwrap(hint)[0])[1], inner, REQUIRED)
        return values  # with bad values in it where there was a problem; then nobody uses it

    def _entries(self, node: Table, path: str) -> dict[str, tuple[Scalar, Node]]:
        """A mapping's entries by the key's text; reports duplicates, and keys that are not single values."""
        entries: dict[str, tuple[Scalar, Node]] = {}
        for key, value in node.entries:
            if not isinstance(key, Scalar) or _is_null(key):
                if type(key) is not Node:
                    self._bad(key, path, f"a key must be a text, found {_found(key)}")
            elif key.text == "<<":
                self._bad(key, path, "merge keys are not supported, write the keys out")
            elif key.text in entries:
                first = entries[key.text][0].line
                self._bad(key, _join(path, key.text), f"duplicate key, first set on line {first}")
            else:
                entries[key.text] = key, value
        return entries

    def _unknown(self, key: Scalar, path: str, known: Iterable[str]) -> None:
        self._bad(key, path, f"unknown key {quote(key.text)}, {suggest(key.text, known)}")

    def _dataclass(self, node: Table, cls: type, path: str, default: Any) -> Any:
        before = len(self.problems)
        options = {option.key: option for option in options_of(cls, default)}
        entries = self._entries(node, path)
        for text, (key, _) in entries.items():
            if text not in options:
                self._unknown(key, _join(path, text), options)
        values: dict[str, Any] = {}
        places: dict[str, tuple[Node, str]] = {}
        for option in options.values():
            inner = _join(path, option.key)
            child = entries[option.key][1] if option.key in entries else None
            places[option.name] = child or node, inner
            values[option.name] = option.default
            if child is not None:
                values[option.name] = self.convert(child, option.hint, inner, option.default)
            elif option.default is REQUIRED:
                self._bad(node, path, f"missing key {quote(option.key)} ({expectation(option.hint)})")
        if len(self.problems) > before:
            return _BAD
        try:
            made = cls(**values)
        except ValueError as error:
            return self._bad(node, path, " ".join(str(error).split()))
        check = getattr(made, "problems", None)
        for name, message in check() if callable(check) else ():
            self._bad(*places[name], message)
        return _BAD if len(self.problems) > before else made

    def _scalar(self, node: Scalar, hint: Any, path: str) -> Any:
        if node.surprise is not None:
            hidden = "YAML 1.1 and 1.2 read this differently; put it in quotes"
            message = hidden if mark_of(hint, Hidden) else node.surprise
            return self._bad(node, path, f"{message} (expected {expectation(hint)})")
        if re.search("[\ud800-\udfff]", node.text):
            return self._bad(node, path, "contains half of a surrogate pair, which is not valid Unicode")
        value, bounds = _value_of(node, hint), mark_of(hint, Range)
        if value is _BAD or (bounds is not None and not bounds.holds(value)):
            return self._mismatch(node, hint, path)
        return value


def _value_of(node: Scalar, hint: Any) -> Any:
    """A scalar as a type, `_BAD` where it is of another."""
    (base, _), notation, value = unwrap(hint), mark_of(hint, Notation), node.value
    if notation is not None:
        if base is str and type(value) is not str:
            return _BAD  # a number or a word such as true, which its author did not mean as a text
        try:
            return notation.parse(node.text)
        except ValueError:
            return _BAD
    allowed = choices(base)
    if allowed:
        return next((allowed[text] for text in allowed if type(text) is type(value) and text == value), _BAD)
    if base is Path:
        return Path(value) if type(value) is str and value and "\0" not in value else _BAD
    if base is float and type(value) is int:
        value = float(value)
    infinite = isinstance(value, float) and not math.isfinite(value)
    return _BAD if type(value) is not base or infinite else value


def _kind(base: Any) -> type[Node]:
    """The kind of node that a type is written as."""
    if dataclasses.is_dataclass(base) or get_origin(base) in (dict, Mapping):
        return Table
    return Listing if get_origin(base) in (tuple, list, frozenset) else Scalar


def _is_null(node: Node) -> bool:
    return isinstance(node, Scalar) and node.value is None


def _found(node: Node) -> str:
    """A node in words, for messages."""
    if not isinstance(node, Scalar):
        return "a list" if isinstance(node, Listing) else "a mapping"
    if node.value is None:
        return "nothing"
    return quote(node.text) if isinstance(node.value, str) else quote(node.text)[1:-1]


def _join(path: str, key: str) -> str:
    shown = key if re.fullmatch(r"[\w-]{1,60}", key) else quote(key)
    return f"{path}.{shown}" if path else shown
