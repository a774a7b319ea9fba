"""The files in a feed directory: their names; opened only if regular, read in bounds, replaced as a whole.

Used in training processes and in the sidecar, on directories into which others may write too. A process with the id
`<id>` (32 hexadecimal digits) has `<id>.feed`, its last complete snapshot; `<id>.lock`, which it holds for as long as it
lives; and for a moment `<id>.tmp`, a snapshot being written. `owner.lock` is held by the sidecar that owns the directory,
which also writes `overrides.json`. There is no writable mapping (a full tmpfs would answer with SIGBUS) and no fsync.
"""
# one kind of path within the folder, which the job and the sidecar share:
# ruff: noqa: PTH105, PTH108

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

FEED, LOCK, TEMPORARY = ".feed", ".lock", ".tmp"
OWNER_LOCK = "owner.lock"
OVERRIDES = "overrides.json"

OWN_MODE = 0o600
"""Permissions in the user's default directory."""
SHARED_MODE = 0o644
"""Permissions in a directory that somebody chose, less the umask: a sidecar of another user is to read there."""


def is_process_id(text: str) -> bool:
    """Say whether this is an id as file names carry it."""
    return len(text) == 32 and set("0123456789abcdef").issuperset(text)


def process_of(name: str) -> str | None:
    """Give the id of the process that a file belongs to; None for any other file."""
    stem, dot, suffix = name.rpartition(".")
    return stem if dot + suffix in {FEED, LOCK, TEMPORARY} and is_process_id(stem) else None


def open_regular(path: str, *, directory: int | None = None) -> tuple[int, os.stat_result]:
    """Open a file for reading if it is a regular one, under no other name; relative to an open directory, if given.

    Raises:
        OSError: `ELOOP` for a symbolic link, `EMLINK` for one of several links, `EINVAL` for what is no file.
    """
    # Looked at before it is opened, since merely opening a device can do something.
    check_regular(os.stat(path, dir_fd=directory, follow_symlinks=False), path)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    descriptor = os.open(path, flags, dir_fd=directory)
    try:
        found = os.fstat(descriptor)
        check_regular(found, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, found


def check_regular(found: os.stat_result, path: str) -> None:
    """Refuse what is not a regular file with one name; raises OSError as `open_regular` does."""
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "a symbolic link", path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    # No link at all is a file that was replaced while it was being opened: still a whole one.
    if found.st_nlink > 1:
        raise OSError(errno.EMLINK, "one of several links", path)


def read_file(path: str, size: int) -> tuple[bytes, os.stat_result]:
    """Read at most `size` bytes from the start of a regular file, and what it is; raises OSError."""
    descriptor, found = open_regular(path)
    try:
        return read_up_to(descriptor, size), found
    finally:
        os.close(descriptor)


def read_up_to(descriptor: int, size: int) -> bytes:
    """Read at most `size` bytes from the start of a file."""
    parts: list[bytes] = []
    position = 0
    while position < size and (part := os.pread(descriptor, size - position, position)):
        parts.append(part)
        position += len(part)
    return b"".join(parts)


def replace_file(path: str, data: bytes, *, temporary: str, mode: int) -> None:
    """Replace a file, also a symbolic link, as a whole: a reader finds the old content or the new, never a part.

    `temporary` is a name in the same directory; a leftover of it is removed. On OSError the old file stands as it was.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(temporary, flags, mode)
    except FileExistsError:
        os.unlink(temporary)
        descriptor = os.open(temporary, flags, mode)
    try:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
