"""overrides.json: the configuration's `recording:` and `events:` rules on their way from the sidecar to the jobs.

The sidecar that owns the directory writes the file as a whole; training processes read it at start and when it
has changed. Only its shape is checked here; what a rule means, and whether it makes sense, is recording's matter.

    {"version": 1, "rules": [{"match": "train.*", "enabled": false}, {"match": "loss", "window_seconds": 10},
     {"events": true, "match": "checkpoint.*", "per_second": 5}]}
"""
# one kind of path within the folder, which the job and the sidecar share:
# ruff: noqa: PTH116, PTH118

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from json import dumps, loads
from typing import NoReturn

from exporter.errors import FeedDirectoryError, FeedFormatError
from exporter.feed.directory import check_directory, is_trusted, own_uid
from exporter.feed.files import OVERRIDES, OWN_MODE, SHARED_MODE, read_file, replace_file

Rule = Mapping[str, object]

VERSION = 1
MAX_BYTES = 1 << 20
MAX_RULES = 1000
_KEYS = frozenset(
    (
        *("match", "enabled", "aggregations", "window_seconds", "window_samples", "buckets"),
        *("events", "severity", "sample", "per_second"),
    )
)


def write_overrides(
    directory: str | os.PathLike[str], rules: Sequence[Mapping[str, object]], *, trusted: bool | None = None
) -> None:
    """Replace the rules, in the order in which they apply. Only for the sidecar that owns the directory.

    Raises:
        FeedFormatError: `content`: a rule is not of the shape that `read_overrides` accepts.
        FeedDirectoryError: The file cannot be written.
    """
    path = os.path.join(directory, OVERRIDES)
    try:
        body = {"version": VERSION, "rules": _check_rules(list(map(dict, rules)))}
        data = dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        _refuse(f"rules that are no JSON: {error}")
    if len(data) > MAX_BYTES:
        _refuse(f"{len(data)} bytes of rules, at most {MAX_BYTES} are read")
    if trusted is None:
        trusted = is_trusted(directory, own_uid())
    try:
        replace_file(path, data, temporary=path + ".tmp", mode=SHARED_MODE if trusted else OWN_MODE)
    except OSError as error:
        raise _unusable(f"cannot write {OVERRIDES} ({error.strerror})", directory) from error


def read_overrides(
    directory: str | os.PathLike[str], *, trusted: bool | None = None
) -> tuple[Mapping[str, object], ...] | None:
    """Read the rules, in order; keys of a later version are left out. None when there is no file, or no directory.

    In the user's default directory the file must be the user's own; in a directory that somebody chose (None for
    `trusted` tells it from the path) it may be anybody's, but not writable for everybody.

    Raises:
        FeedDirectoryError: The directory or the file must not be trusted, or cannot be read.
        FeedFormatError: `truncated`, `version` or `content`.
    """
    uid = own_uid()
    if trusted is None:
        trusted = is_trusted(directory, uid)
    if not os.path.lexists(directory):
        return None
    check_directory(directory, trusted=trusted, uid=uid)
    try:
        data, found = read_file(os.path.join(directory, OVERRIDES), MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(f"{OVERRIDES} cannot be used ({error.strerror})", directory) from error
    if not trusted and found.st_uid != uid:
        raise _unusable(f"{OVERRIDES} belongs to uid {found.st_uid}, not to uid {uid}", directory)
    if found.st_mode & stat.S_IWOTH:
        raise _unusable(f"everybody may write to {OVERRIDES}", directory)
    if not data:
        raise FeedFormatError(f"{OVERRIDES} is empty", reason="truncated")
    if len(data) > MAX_BYTES:
        _refuse(f"more than {MAX_BYTES} bytes")
    try:
        body = loads(data.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise FeedFormatError(f"{OVERRIDES} is no JSON: {error}", reason="content") from error
    if type(body) is not dict:
        _refuse("not an object")
    if body.get("version") != VERSION:
        raise FeedFormatError(f"{OVERRIDES} has an unknown version (known: {VERSION})", reason="version")
    return tuple(_check_rules(body.get("rules")))


class OverridesReader:
    """Follows the rules in one feed directory, which need not exist yet."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = directory
        self._stamp: tuple[int, int, int] | None = None

    def changed_rules(self) -> tuple[Mapping[str, object], ...] | None:
        """Read the rules if they are others than at the last call (else None); none when the file has gone.

        Raises as `read_overrides`, once for each state of the file.
        """
        # Taken before reading: what is written in between is another file at the next call.
        try:
            found = os.stat(os.path.join(self._directory, OVERRIDES), follow_symlinks=False)
            stamp = found.st_ino, found.st_mtime_ns, found.st_size
        except OSError:
            stamp = None
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        return read_overrides(self._directory) or ()


def _check_rules(found: object) -> list[Rule]:
    if type(found) is not list or len(found) > MAX_RULES:
        _refuse(f"not a list of at most {MAX_RULES} rules")
    if any(type(rule) is not dict or not isinstance(rule.get("match"), str) for rule in found):
        _refuse("a rule that is no object with a text 'match'")
    return [{key: value for key, value in rule.items() if key in _KEYS} for rule in found]


def _refuse(message: str) -> NoReturn:
    raise FeedFormatError(f"{OVERRIDES}: {message}", reason="content")


def _unusable(message: str, directory: str | os.PathLike[str]) -> FeedDirectoryError:
    return FeedDirectoryError(
        message, path=os.fspath(directory), remedy=f"remove {OVERRIDES} there; the sidecar writes it anew"
    )
