"""Kernel files of /proc and /sys: reading, parsing and selection by name.

A source that the kernel does not offer is unsupported, which is a normal state. A source that cannot be read or
parsed is a problem, with a reason in `FILE_REASONS`. Other exceptions are bugs in the exporter and are not caught here,
except in `from_psutil`. Both psutil and the exporter read procfs at psutil.PROCFS_PATH.
"""

from __future__ import annotations

import errno
import fnmatch
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil

from exporter.errors import CollectError
from exporter.families import Collected

_T = TypeVar("_T")

FILE_REASONS = ("malformed", "permission", "unreadable")
"""Reasons of a file that cannot be read or parsed."""

ABSENCE_ERRORS = frozenset(
    (
        errno.ENOENT,
        errno.ENOTDIR,
        errno.ENODEV,
        errno.ENXIO,
        errno.EOPNOTSUPP,  # /proc/pressure with psi=0
        errno.ESRCH,  # an open file of a process that has ended
        errno.EINVAL,  # a driver without the counter
        errno.ENODATA,  # a sensor without a current value
        errno.EAGAIN,  # a device that is busy or suspended
        errno.EBUSY,
    )
)
"""Error numbers of a source that does not exist or has no current value."""

EVERYTHING = ("*",)
"""Patterns that match every name."""


def procfs() -> Path:
    """Return the mount point of procfs."""
    return Path(psutil.PROCFS_PATH)


@contextmanager
def source(collected: Collected, name: Path | str) -> Iterator[None]:
    """Run the body, and record a missing source as unsupported, and an unreadable or malformed source as a problem.

    The caller continues with its other sources.
    """
    try:
        yield
    except CollectError as error:
        collected.fail(error)
    except OSError as error:
        if error.errno in ABSENCE_ERRORS:
            collected.unsupported.append(f"no {error.filename or name}")
        else:
            collected.fail(failure(error.filename or name, error))


def failure(name: Path | str, error: OSError) -> CollectError:
    """Return the CollectError (`permission` or `unreadable`) of a system call that failed."""
    reason = "permission" if error.errno in (errno.EACCES, errno.EPERM) else "unreadable"
    return CollectError(f"{name}: {error.strerror or error}", reason=reason)


def malformed(name: Path | str, error: Exception) -> CollectError:
    """Return the CollectError (`malformed`) of a file whose content raised `error` in a parser."""
    message = f"{name}: unexpected content ({type(error).__name__}: {error})"
    return CollectError(message, reason="malformed")


def parse(name: Path | str, parser: Callable[[str], _T], text: str) -> _T:
    """Return `parser(text)`. Raises CollectError (malformed) if the parser raises ValueError or LookupError.

    The parser must depend on the text alone, so that such an exception is a fault of the file.
    """
    try:
        return parser(text)
    except (ValueError, LookupError) as error:
        raise malformed(name, error) from error


def parse_file(path: Path, parser: Callable[[str], _T]) -> _T:
    """Return the parsed content of a file. Raises OSError and CollectError (malformed)."""
    return parse(path, parser, read_file(path))


def from_psutil(name: Path | str, call: Callable[[], _T]) -> _T:
    """Call a function of psutil that reads a file. Raises OSError, psutil.Error and CollectError (malformed).

    psutil does not document the exceptions that damaged files cause: any other exception counts as malformed.
    """
    try:
        return call()
    except (OSError, psutil.Error):
        raise
    except Exception as error:
        raise malformed(name, error) from error


def read_file(path: Path) -> str:
    """Return the stripped content of a kernel file. Bytes that are not UTF-8 become surrogates. Raises OSError."""
    return path.read_bytes().decode("utf-8", "surrogateescape").strip()


def read_optional(path: Path) -> str | None:
    """Return the content of a kernel file, or None if the file is missing or has no current value. Raises OSError."""
    try:
        return read_file(path)
    except OSError as error:
        if error.errno in ABSENCE_ERRORS:
            return None
        raise


def list_directory(directory: Path) -> list[str]:
    """Return the sorted names in a directory, or an empty list if the directory is missing. Raises OSError."""
    try:
        return sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        if error.errno in ABSENCE_ERRORS:
            return []
        raise


def named_counts(text: str) -> dict[str, int]:
    """Parse lines with a name and a number, such as `pgfault 12` and `MemTotal: 12 kB`. Other lines are ignored."""
    counts: dict[str, int] = {}
    for line in text.split("\n"):
        name, number, *_ = (*line.replace(":", " ", 1).split(), "", "")
        if number.isdecimal():
            counts[name] = int(number)
    return counts


def counts_in(path: Path, *required: str) -> dict[str, int]:
    """Return the counts of a file such as /proc/vmstat. Raises CollectError (malformed) if a required line is missing."""
    counts = parse_file(path, named_counts)
    for name in required:
        if name not in counts:
            raise CollectError(f"{path}: unexpected content (no line {name})", reason="malformed")
    return counts


def printable(text: str) -> str:
    """Return a name from `read_file` as a label value: bytes that are not UTF-8 become U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


class Selection:
    """Set of names that match an include pattern and no exclude pattern (shell style; `*` also matches `/`)."""

    def __init__(self, include: Sequence[str], exclude: Sequence[str] = ()) -> None:
        # An empty list matches nothing, not even the empty name.
        self._include, self._exclude = (
            re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)")
            for patterns in (include, exclude)
        )

    def __contains__(self, name: str) -> bool:
        return self._include.match(name) is not None and self._exclude.match(name) is None


class HighWater:
    """Highest value of each kernel counter, to publish a counter of the kernel that can decrease slightly.

    Prometheus interprets a decrease as a restart of the counter, and adds the whole new value to the increase.
    """

    def __init__(self) -> None:
        self._highest: dict[Hashable, float] = {}

    def hold(self, key: Hashable, value: float) -> float:
        """Return the value, or the highest earlier value of the key if that is larger."""
        highest = self._highest[key] = max(value, self._highest.get(key, value))
        return highest

    def forget(self, key: Hashable) -> None:
        """Discard the highest value of a key."""
        self._highest.pop(key, None)
