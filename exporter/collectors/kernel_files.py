"""Small files of /proc and /sys, what is mounted, and which names a user wants to see.

A source that the kernel does not offer is a normal state; one that cannot be read, or holds something else than documented,
is a problem with one of `FILE_REASONS`. Where procfs is mounted, `psutil.PROCFS_PATH` says for psutil and for us.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import re
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

from exporter.errors import CollectError
from exporter.families import Collected

FILE_REASONS = ("malformed", "permission", "unreadable")
"""Every reason with which reading a file can fail."""

ABSENT = frozenset(
    (
        errno.ENOENT,
        errno.ENOTDIR,
        errno.ENODEV,
        errno.ENXIO,
        errno.EOPNOTSUPP,  # /proc/pressure with psi=0
        errno.ESRCH,  # said of an open file whose process has ended
        errno.EINVAL,  # a driver's word for no such counter
        errno.ENODATA,  # a sensor without a value at the moment
        errno.EAGAIN,
        errno.EBUSY,
    )
)

_OCTAL = re.compile(rb"\\([0-3][0-7]{2})")

EVERYTHING = ("*",)
"""The include list that leaves nothing out."""


def procfs() -> Path:
    """Give the place where procfs is mounted, as psutil knows it."""
    return Path(psutil.PROCFS_PATH)


@contextmanager
def source(collected: Collected, what: Path | str) -> Iterator[None]:
    """Read one source: one that is not offered is noted, one that fails is a problem; the others go on."""
    try:
        yield
    except CollectError as error:
        collected.fail(error)
    except OSError as error:
        if error.errno in ABSENT:
            collected.unsupported.append(f"no {error.filename or what}")
        else:
            collected.fail(failure(error.filename or what, error))
    except (
        ArithmeticError,
        AssertionError,
        LookupError,
        RuntimeError,
        StopIteration,
        TypeError,
        ValueError,
    ) as error:
        # A field that is missing, one too many, or no number: psutil and we take files apart as documented.
        message = f"{what}: not what the kernel documents ({type(error).__name__}: {error})"
        collected.fail(CollectError(message, reason="malformed"))


def failure(what: Path | str, error: OSError) -> CollectError:
    """Make the error of a source that the system does not let us have."""
    reason = "permission" if error.errno in (errno.EACCES, errno.EPERM) else "unreadable"
    return CollectError(f"{what}: {error.strerror or error}", reason=reason)


def read_file(path: Path) -> str:
    """Read a kernel file, without blanks around it; bytes that are not UTF-8 become surrogates; raises OSError."""
    return path.read_bytes().decode("utf-8", "surrogateescape").strip()


def read_optional(path: Path) -> str | None:
    """Read a kernel file; None where there is none or it has no reading now; raises OSError."""
    try:
        return read_file(path)
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise


def list_directory(directory: Path) -> list[str]:
    """List the names in a directory, sorted; empty where there is no such directory; raises OSError."""
    try:
        return sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        if error.errno in ABSENT:
            return []
        raise


def named_counts(text: str) -> dict[str, int]:
    """Read lines of a name and a number, as in `pgfault 12` and `MemTotal: 12 kB`; what is no such line is left out."""
    pairs = (line.replace(":", " ", 1).split() for line in text.split("\n"))
    return {words[0]: int(words[1]) for words in pairs if len(words) > 1 and words[1].isdecimal()}


def printable(text: str) -> str:
    """Make a name of the system fit for a label: what is not UTF-8 shows as U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


class Selection:
    """Names that match a shell-style pattern of one list and none of another; `*` also stands for `/`."""

    def __init__(self, include: Sequence[str], exclude: Sequence[str] = ()) -> None:
        # An empty list matches nothing, not even the empty name.
        self._include, self._exclude = (
            re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)")
            for patterns in (include, exclude)
        )

    def __contains__(self, name: str) -> bool:
        return self._include.match(name) is not None and self._exclude.match(name) is None


class HighWater:
    """The largest value seen per key, for kernel numbers that may step back a little.

    A step back would read as a restart in Prometheus and add the whole value to an increase.
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


class Mount(NamedTuple):
    """One line of mountinfo; names that are not UTF-8 hold surrogates, as the system calls want them.

    Source: Documentation/filesystems/proc.rst, "/proc/<pid>/mountinfo".
    """

    id: int
    parent: int  # the mount it stands on
    device: str  # `major:minor`, the same for all mounts of one filesystem
    root: str  # the directory of the filesystem that is mounted
    path: str  # where
    fstype: str  # `ext4`, `nfs4`, `fuse.sshfs` …
    source: str  # the block device, the server's export, or any word
    options: frozenset[str]  # of the mount and of the filesystem

    @property
    def label(self) -> str:
        """The path as a label value."""
        return printable(self.path)


def parse_mounts(text: str, fs_types: Collection[str] = ()) -> list[Mount]:
    """List the mounts of a mountinfo in the kernel's order; raises ValueError."""
    wanted = [f" - {fs_type} " for fs_type in fs_types]
    return [
        _mount(line)
        for line in text.split("\n")
        if line and (not wanted or any(word in line for word in wanted))
    ]


def visible(mounts: Sequence[Mount]) -> list[Mount]:
    """Leave out what other mounts cover: to look at such a path would be to look at another filesystem.

    Of two mounts on the same parent, the one further up in the tree covers the one below it: had it been
    there first, it would be the parent. A mount on a mount's very own path covers that.
    """
    by_id = {mount.id: mount for mount in mounts}
    beside: dict[int, set[str]] = {}
    for mount in mounts:
        beside.setdefault(mount.parent, set()).add(mount.path)
    shadowed = {
        mount.id
        for mount in mounts
        if not beside[mount.parent].isdisjoint(map(str, PurePosixPath(mount.path).parents))
    }

    def can_be_seen(mount: Mount) -> bool:
        if mount.id != mount.parent and mount.path in beside.get(mount.id, ()):
            return False
        stands_on: set[int] = set()
        step: Mount | None = mount
        while step is not None and step.id not in stands_on:  # the root of all may be its own parent
            stands_on.add(step.id)
            step = by_id.get(step.parent)
        return shadowed.isdisjoint(stands_on)

    return [mount for mount in mounts if can_be_seen(mount)]


def unescape(field: str) -> str:
    r"""Undo the kernel's octal escapes (`\040` for a blank) in a name."""
    return os.fsdecode(_OCTAL.sub(lambda found: bytes((int(found[1], 8),)), os.fsencode(field)))


def _mount(line: str) -> Mount:
    # Optional fields stand before the dash, at least three fields behind it.
    before, after = line.split(" - ", 1)
    number, parent, device, root, path, options = before.split(" ")[:6]
    fstype, origin, super_options = after.split(" ")[:3]
    return Mount(
        int(number),
        int(parent),
        device,
        unescape(root),
        unescape(path),
        printable(unescape(fstype)),
        printable(unescape(origin)),
        frozenset(f"{options},{super_options}".split(",")),
    )
