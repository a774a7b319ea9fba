"""Small files of /proc and /sys: bounded reads, strict numbers, and one outcome for each kind of failure.

Used in the sidecar by the collectors of the machine. There are three outcomes: the kernel does not offer the file, a
normal state; it cannot be read, or holds something else than documented, a problem with one of `FILE_REASONS`; else
its content. `source` sorts them for a block of code, whether that reads by itself or through psutil. No threads; a
read that blocks costs the collector its deadline.

Where procfs is mounted, `psutil.PROCFS_PATH` says for psutil and for us.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Container, Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import psutil

from exporter.errors import CollectError
from exporter.families import Collected

FILE_REASONS = ("malformed", "permission", "unreadable")
"""Every reason with which reading a file can fail."""

MAX_BYTES = 4 << 20
"""A machine of 1,024 CPUs has a /proc/cpuinfo of about 1.5 MiB; whatever is longer is not what we look for."""

NOT_OFFERED = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.ENODEV,
        errno.ENXIO,
        errno.EOPNOTSUPP,  # /proc/pressure with psi=0
    }
)
NO_READING = frozenset(
    {
        errno.ENODATA,  # a sensor without a value at the moment
        errno.EAGAIN,
        errno.EBUSY,  # the frequency policy of a CPU that is offline
        errno.ENETDOWN,  # the thermometer of a radio that is switched off
    }
)

_COUNT = re.compile(r"[0-9]{1,20}", re.ASCII)
_LARGEST_COUNT = 2**64 - 1


def procfs() -> Path:
    """Give the place where procfs is mounted, as psutil knows it."""
    return Path(psutil.PROCFS_PATH)


@contextmanager
def source(collected: Collected, what: Path | str) -> Iterator[None]:
    """Read one source: one that is not offered is noted, one that fails is a problem; the others go on.

    Args:
        collected: Takes the note or the problem.
        what: The source's name, for the message.
    """
    try:
        yield
    except CollectError as error:
        collected.fail(error)
    except OSError as error:
        if error.errno in NOT_OFFERED:
            collected.unsupported.append(f"no {error.filename or what}")
        else:
            collected.fail(failure(Path(error.filename or what), error))
    except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, StopIteration) as error:
        # A field that is missing, one too many, or no number: psutil and we take files apart as documented.
        message = f"{what}: not what the kernel documents ({type(error).__name__}: {error})"
        collected.fail(CollectError(message, reason="malformed"))


def read_file(path: Path, *, absent: Container[int] = ()) -> str | None:
    """Read a kernel file as a whole; None when there is none, or when it has no reading now.

    Bytes that are not UTF-8 come back as U+FFFD, which no number accepts.

    Args:
        path: The file.
        absent: Further error numbers by which a driver says that there is nothing to read.

    Raises:
        CollectError: It exists and cannot be read, or is longer than any such file.
    """
    content = read_bytes(path, absent=absent)
    return None if content is None else content.decode("utf-8", "replace")


def read_existing(path: Path) -> str:
    """Read a kernel file as a whole.

    Raises:
        CollectError: As `read_file`.
        FileNotFoundError: There is none, or it has no reading now.
    """
    text = read_file(path)
    if text is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return text


def read_bytes(path: Path, *, absent: Container[int] = ()) -> bytes | None:
    """Read a kernel file that holds names, which may be any bytes; else as `read_file`.

    Raises:
        CollectError: As `read_file`.
    """
    try:
        # Without O_NONBLOCK, which no kernel file minds, a pipe in its place would be waited for for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            # /proc hands out a file in pieces that end where it likes; only an empty read is the end.
            pieces, length = [], 0
            while piece := os.read(descriptor, 1 << 16):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_BYTES:
                    raise CollectError(f"{path} is longer than {MAX_BYTES} bytes", reason="malformed")
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in NOT_OFFERED or error.errno in NO_READING or error.errno in absent:
            return None
        raise failure(path, error) from error
    return b"".join(pieces)


def list_directory(directory: Path) -> list[str]:
    """List the names in a directory, sorted; empty when there is no such directory.

    Raises:
        CollectError: The directory exists and cannot be listed.
    """
    try:
        return sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        if error.errno in NOT_OFFERED:
            return []
        raise failure(directory, error) from error


def numbered_entries(directory: Path, prefix: str) -> list[tuple[int, Path]]:
    """List `prefix0`, `prefix1`, … of a directory by number; empty when there is no such directory.

    Raises:
        CollectError: The directory exists and cannot be listed.
    """
    numbers = ((name, name.removeprefix(prefix)) for name in list_directory(directory))
    return sorted(
        (int(number), directory / name)
        for name, number in numbers
        if _COUNT.fullmatch(number) and name == f"{prefix}{int(number)}"
    )


def parse_count(text: str, *place: object) -> int:
    """Parse an unsigned 64-bit number as the kernel prints it.

    Args:
        text: The number.
        place: The file, and where in it, for the message; so in all that follows.

    Raises:
        CollectError: It is anything else.
    """
    if not _COUNT.fullmatch(text) or (count := int(text)) > _LARGEST_COUNT:
        refuse(text, place, "an unsigned number")
    return count


def parse_kibibytes(text: str, *place: object) -> int:
    """Parse `1024 kB`, as /proc/meminfo and its sisters give sizes, into bytes.

    Raises:
        CollectError: It is anything else.
    """
    number, _, unit = text.partition(" ")
    if unit != "kB":
        refuse(text, place, "a size in kB")
    return parse_count(number, *place) * 1024


def named_values(text: str, separator: str, *, prefix: str = "") -> dict[str, str]:
    """Split lines of a name, a separator and a value; the values stay text until somebody asks for them.

    Args:
        text: The file's content.
        separator: What ends the name.
        prefix: What stands before each name (`Node 0 `).
    """
    pairs = (line.removeprefix(prefix).partition(separator) for line in text.splitlines())
    return {name: value.strip() for name, found, value in pairs if found}


def refuse(text: str, place: Sequence[object], expected: str) -> NoReturn:
    """Say what stood where something else belongs.

    Args:
        text: What was found.
        place: The file, and where in it; put together only here, since almost nothing is ever refused.
        expected: With an article.

    Raises:
        CollectError: Always, with the reason `malformed`.
    """
    found = text if len(text) <= 40 else f"{text[:40]}…"
    where = " ".join(str(part) for part in place)
    raise CollectError(f"{where}: expected {expected}, found {found!r}", reason="malformed")


def failure(path: Path, error: OSError) -> CollectError:
    """Make the error of a source that the system does not let us have."""
    reason = "permission" if error.errno in (errno.EACCES, errno.EPERM) else "unreadable"
    return CollectError(f"{path}: {error.strerror or error}", reason=reason)


class HighWater:
    """The largest value seen per key, for kernel numbers that may step back a little.

    Idle and iowait times are corrected by the kernel, and a difference of two counters that are read one after the
    other may dip. A step back would read as a restart in Prometheus and add the whole value to an increase.
    """

    def __init__(self) -> None:
        self._highest: dict[Hashable, float] = {}

    def hold(self, key: Hashable, value: float) -> float:
        """Give the value, or the larger one that has been seen before."""
        highest = self._highest[key] = max(value, self._highest.get(key, value))
        return highest

    def forget(self, key: Hashable) -> None:
        """Begin anew with the next value."""
        self._highest.pop(key, None)
