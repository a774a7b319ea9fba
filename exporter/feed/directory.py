"""Feed directory: path, checks and recording rules (`overrides.json`).

Used in training processes and in the sidecar. The default directory is created, and refused if other users can write to
the directory. A configured directory is trusted. Every directory is refused on systems other than Linux.
"""
# one kind of path within the folder, which the job and the sidecar share:
# ruff: noqa: PTH100, PTH101, PTH102, PTH112, PTH116, PTH118

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping, Sequence
from json import dumps, loads
from pathlib import Path

from exporter.errors import FeedDirectoryError, FeedFormatError
from exporter.feed.files import OVERRIDES, OWN_MODE, SHARED_MODE, read_file, replace_file

SHARED_MEMORY = "/dev/shm"  # noqa: S108  # checked before use
FALLBACK = "/tmp"  # noqa: S108  # likewise
_ANOTHER = "choose another with --feed.dir and EXPORTER_FEED_DIR"

Rule = Mapping[str, object]
VERSION = 1
MAX_BYTES = 1 << 20
MAX_RULES = 1000


def own_uid() -> int:
    """Return the user id of files that this process creates."""
    return os.geteuid() if hasattr(os, "geteuid") else 0  # Windows has none, and is refused below


def default_directory() -> Path:
    """Return the directory of this user without a configured directory."""
    return Path(SHARED_MEMORY if os.path.isdir(SHARED_MEMORY) else FALLBACK, f"exporter-{own_uid()}")


def is_trusted(path: str | os.PathLike[str]) -> bool:
    """Return True for a configured directory, False for the default directory."""
    return os.path.abspath(path) != str(default_directory())


def feed_directory(environment: Mapping[str, str]) -> str:
    """Prepare and return the directory of this process: `$EXPORTER_FEED_DIR`, or the default directory."""
    path = environment.get("EXPORTER_FEED_DIR") or str(default_directory())
    prepare_directory(path)
    return path


def prepare_directory(path: str | os.PathLike[str]) -> None:
    """Create the directory (0700) if it is missing and its parent exists, and check it; raises as `check_directory`."""
    if sys.platform == "linux" and not os.path.isdir(path):
        try:
            os.mkdir(path, 0o700)
            os.chmod(path, 0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise _refusal(f"cannot create the feed directory ({error.strerror})", path, _ANOTHER) from error
    check_directory(path)


def check_directory(path: str | os.PathLike[str]) -> None:
    """Check a directory without changes; raises `FeedDirectoryError` for an unusable directory."""
    if sys.platform != "linux":
        remedy = "statistics are recorded, but nothing can export them from here"
        raise _refusal(f"the feed needs Linux, this is {sys.platform}", path, remedy)
    trusted = is_trusted(path)
    try:
        found = os.stat(path, follow_symlinks=trusted)
    except FileNotFoundError as error:
        remedy = f"create it: mkdir -p -m 0700 {path}" if trusted else "it is made when the first job records"
        raise _refusal("there is no feed directory", path, remedy) from error
    except OSError as error:
        raise _refusal(f"cannot look at the feed directory ({error.strerror})", path) from error
    if not stat.S_ISDIR(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a directory"
        raise _refusal(f"the feed directory is {kind}", path)
    if not trusted and found.st_uid != own_uid():
        raise _refusal(f"the feed directory belongs to uid {found.st_uid}, not to uid {own_uid()}", path)
    if not trusted and found.st_mode & 0o022:
        told = f"others may write to the feed directory (mode {stat.S_IMODE(found.st_mode):04o})"
        raise _refusal(told, path, f"take that from them: chmod 0700 {path}")


def _refusal(
    message: str, path: str | os.PathLike[str], remedy: str = f"remove it, or {_ANOTHER}"
) -> FeedDirectoryError:
    return FeedDirectoryError(message, path=os.fspath(path), remedy=remedy)


# Rules for recording -------------------------------------------------------------------------------------------


def write_overrides(directory: str | os.PathLike[str], rules: Sequence[Rule]) -> None:
    """Replace the rules, in their order: `{"version": 1, "rules": [{"match": "train.*", "enabled": false}]}`.

    Only for the owner of the directory. Raises `FeedDirectoryError` if the write fails.
    """
    path = os.path.join(directory, OVERRIDES)
    data = dumps({"version": VERSION, "rules": list(map(dict, rules))}, allow_nan=False).encode()
    try:
        mode = SHARED_MODE if is_trusted(directory) else OWN_MODE
        replace_file(path, data, temporary=path + ".tmp", mode=mode)
    except OSError as error:
        raise _unusable(f"cannot write {OVERRIDES} ({error.strerror})", directory) from error


def read_overrides(directory: str | os.PathLike[str]) -> tuple[Rule, ...] | None:
    """Return the rules, in order; None without a file or a directory.

    The file must belong to this user, root or the owner of the directory, and must not be writable for all users:
    otherwise raises `FeedDirectoryError`. Raises `FeedFormatError` for invalid content.
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
    if found.st_uid not in {own_uid(), 0, os.stat(directory).st_uid}:
        message = f"{OVERRIDES} belongs to uid {found.st_uid}: not this user, root or the directory's owner"
        raise _unusable(message, directory)
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
    """Reader of the rules of a feed directory, which may be missing."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = directory
        self._stamp: tuple[int, int, int] | None = None

    def changed_rules(self) -> tuple[Rule, ...] | None:
        """Return the rules if the file has changed since the last call, otherwise None; raises once per change."""
        # Before reading: a later write changes the file again for the next call.
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
    return _refusal(message, directory, f"remove {OVERRIDES} there; the sidecar writes it anew")
