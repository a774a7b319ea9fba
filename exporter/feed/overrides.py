"""Stat rules, which the sidecar writes to `overrides.json` in the feed directory and training processes read.

In a shared directory, only files of the reader's user, of root and of the owner of the directory are trusted. A sidecar
writes `overrides-<uid>.json` if `overrides.json` belongs to a different user. Readers use the newest trusted file.
"""
# ruff: noqa: PTH116, PTH118, PTH119, PTH120 - this package uses string paths in the job and in the sidecar

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping, Sequence
from json import dumps, loads

from exporter.errors import FeedDirectoryError, FeedFormatError
from exporter.feed.directory import check_directory, is_trusted, own_uid, refusal
from exporter.feed.entries import FileStamp, newest_entry, own_entry
from exporter.feed.files import OVERRIDES, OWN_MODE, SHARED_MODE, read_file, replace_file

StatRule = Mapping[str, object]
"""Stat rule as in the file, such as `{"match": "train.*", "enabled": False}`. This module checks only `match`; the package `recording`
checks the other keys."""
VERSION = 1
"""Version of the file format."""
MAX_BYTES = 1 << 20
"""Maximum size of the file. A larger file is refused."""
MAX_STAT_RULES = 1000
"""Maximum number of rules that are read. Further rules are ignored."""


def write_overrides(directory: str | os.PathLike[str], rules: Sequence[StatRule]) -> None:
    """Replace the rules, such as `{"version": 1, "rules": [{"match": "train.*", "enabled": false}]}`.

    Only the owner of the directory calls this function. Raises `FeedDirectoryError` if the write fails.
    """
    path = own_entry(os.path.join(directory, OVERRIDES))
    data = dumps({"version": VERSION, "rules": list(map(dict, rules))}, allow_nan=False).encode()
    try:
        mode = SHARED_MODE if is_trusted(directory) else OWN_MODE
        replace_file(path, data, temporary=path + ".tmp", mode=mode)
    except OSError as error:
        name = os.path.basename(path)
        is_full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        remedy = "free some space there" if is_full else f"make the directory writable, or remove {name}"
        raise refusal(f"cannot write {name} ({error.strerror})", directory, remedy) from error


def has_overrides(directory: str | os.PathLike[str]) -> bool:
    """Return True if the directory contains a trusted file of Stat rules."""
    return newest_entry(os.path.join(directory, OVERRIDES)) is not None


def read_overrides(directory: str | os.PathLike[str]) -> tuple[StatRule, ...] | None:
    """Return the rules, or None without a file or a directory.

    Raises `FeedDirectoryError` if the file is unreadable, foreign or writable for all users, and `FeedFormatError` for invalid
    content.
    """
    if not os.path.lexists(directory):
        return None
    check_directory(directory)
    path = os.path.join(directory, OVERRIDES)
    entry = newest_entry(path)
    return _read(path if entry is None else entry.path)


class OverridesReader:
    """Reader of the Stat rules of a feed directory, which may be missing."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = directory
        self._path = os.path.join(directory, OVERRIDES)
        self._stamp: FileStamp | None = None

    def changed_rules(self) -> tuple[StatRule, ...] | None:
        """Return the rules if the file has changed since the last call, otherwise None.

        Returns an empty tuple after the file was removed. Raises the errors of `read_overrides`, once per change of the file.
        """
        # The stamp is taken before the file is read, so that the next call notices a later write.
        entry = newest_entry(self._path)
        stamp = None if entry is None else entry.stamp()
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        return read_overrides(self._directory) or ()


def _read(path: str) -> tuple[StatRule, ...] | None:
    """Return at most `MAX_STAT_RULES` rules of a file, or None without a file. Raises the errors of `read_overrides`."""
    name = os.path.basename(path)
    try:
        data, status = read_file(path, MAX_BYTES + 1)
        directory_owner = os.stat(os.path.dirname(path)).st_uid
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(f"cannot read {name} ({error.strerror})", path) from error
    if status.st_uid not in {own_uid(), 0, directory_owner}:
        message = (
            f"{name} belongs to uid {status.st_uid}, expected this user, root or the owner of the directory"
        )
        raise _unusable(message, path)
    if status.st_mode & stat.S_IWOTH:
        raise _unusable(f"all users can write to {name}", path)
    if len(data) > MAX_BYTES:
        raise FeedFormatError(f"{name} is larger than {MAX_BYTES} bytes", reason="too_large")
    try:
        body = loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise FeedFormatError(f"{name} is not JSON: {error}", reason="content") from error
    if isinstance(body, dict) and body.get("version", VERSION) != VERSION:
        raise FeedFormatError(
            f"the version of {name} is not supported (supported: {VERSION})", reason="version"
        )
    rules = body.get("rules") if isinstance(body, dict) else None
    if not isinstance(rules, list) or not all(
        isinstance(rule, dict) and isinstance(rule.get("match"), str) for rule in rules[:MAX_STAT_RULES]
    ):
        raise FeedFormatError(f"{name}: expected a list of rules, each with a text 'match'", reason="content")
    return tuple(rules[:MAX_STAT_RULES])


def _unusable(message: str, path: str) -> FeedDirectoryError:
    """Return the error of an unreadable or foreign file of rules."""
    remedy = f"remove {os.path.basename(path)}; the sidecar restores the file"
    return refusal(message, os.path.dirname(path), remedy)
