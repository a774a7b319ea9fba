"""overrides.json: the configuration's `recording:` rules on their way from the sidecar to the jobs.

The sidecar that owns the directory writes the file as a whole; training processes read it at start and when it
has changed. Only its shape is checked here; what a rule means, and whether it makes sense, is recording's matter.

    {"version": 1, "rules": [{"match": "train.*", "enabled": false}, {"match": "loss", "window_seconds": 10}]}
"""
# one kind of path within the folder, which the job and the sidecar share:
# ruff: noqa: PTH116, PTH118

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from json import dumps, loads

from exporter.errors import FeedDirectoryError, FeedFormatError
from exporter.feed.directory import check_directory, is_trusted, own_uid
from exporter.feed.files import OVERRIDES, OWN_MODE, SHARED_MODE, read_file, replace_file

Rule = Mapping[str, object]

VERSION = 1
MAX_BYTES = 1 << 20
MAX_RULES = 1000


def write_overrides(directory: str | os.PathLike[str], rules: Sequence[Rule]) -> None:
    """Replace the rules, in the order in which they apply. Only for the sidecar that owns the directory.

    Raises:
        FeedDirectoryError: The file cannot be written.
    """
    path = os.path.join(directory, OVERRIDES)
    data = dumps({"version": VERSION, "rules": list(map(dict, rules))}, allow_nan=False).encode()
    try:
        mode = SHARED_MODE if is_trusted(directory) else OWN_MODE
        replace_file(path, data, temporary=path + ".tmp", mode=mode)
    except OSError as error:
        raise _unusable(f"cannot write {OVERRIDES} ({error.strerror})", directory) from error


def read_overrides(directory: str | os.PathLike[str]) -> tuple[Rule, ...] | None:
    """Read the rules, in order. None when there is no file, or no directory.

    In the user's default directory the file must be the user's own; in a directory that somebody chose it may be
    anybody's, but not writable for everybody.

    Raises:
        FeedDirectoryError: The directory or the file must not be trusted, or cannot be read.
        FeedFormatError: `version` or `content`.
    """
    if not os.path.lexists(directory):
        return None
    check_directory(directory)
    try:
        data, found = read_file(os.path.join(directory, OVERRIDES), MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(f"{OVERRIDES} cannot be used ({error.strerror})", directory) from error
    if not is_trusted(directory) and found.st_uid != own_uid():
        raise _unusable(f"{OVERRIDES} belongs to uid {found.st_uid}, not to uid {own_uid()}", directory)
    if found.st_mode & stat.S_IWOTH:
        raise _unusable(f"everybody may write to {OVERRIDES}", directory)
    try:
        body = loads(data.decode()) if len(data) <= MAX_BYTES else None
    except (ValueError, RecursionError) as error:
        raise FeedFormatError(f"{OVERRIDES} is no JSON: {error}", reason="content") from error
    if isinstance(body, dict) and body.get("version", VERSION) != VERSION:
        raise FeedFormatError(f"{OVERRIDES} has an unknown version (known: {VERSION})", reason="version")
    rules = body.get("rules") if isinstance(body, dict) else None
    if not isinstance(rules, list) or not all(
        isinstance(rule, dict) and isinstance(rule.get("match"), str) for rule in rules[:MAX_RULES]
    ):
        raise FeedFormatError(f"{OVERRIDES}: no list of rules, each with a text 'match'", reason="content")
    return tuple(rules[:MAX_RULES])


class OverridesReader:
    """Follows the rules in one feed directory, which need not exist yet."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = directory
        self._stamp: tuple[int, int, int] | None = None

    def changed_rules(self) -> tuple[Rule, ...] | None:
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


def _unusable(message: str, directory: str | os.PathLike[str]) -> FeedDirectoryError:
    remedy = f"remove {OVERRIDES} there; the sidecar writes it anew"
    return FeedDirectoryError(message, path=os.fspath(directory), remedy=remedy)
