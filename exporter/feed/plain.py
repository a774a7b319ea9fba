"""Plain files: opened only if they are what they seem, read in bounds, replaced as a whole.

Used in training processes and in the sidecar, on directories into which others may write too. There is no
writable mapping of a file (a full tmpfs would answer with SIGBUS, which no code survives) and no fsync (the
feed need not survive the machine).
"""
# one kind of path within the folder, which the job and the sidecar share:
# ruff: noqa: PTH105, PTH108

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress


def open_plain(path: str, *, directory: int | None = None) -> tuple[int, os.stat_result]:
    """Open a file for reading if it is a plain one, under no other name.

    Args:
        path: The file, relative to `directory` if that is given.
        directory: An open directory.

    Returns:
        The descriptor, which the caller closes, and what it is.

    Raises:
        OSError: `ELOOP` for a symbolic link, `EMLINK` for one of several links, `EINVAL` for what is no file.
    """
    # Looked at before it is opened, since merely opening a device can do something.
    check_plain(os.stat(path, dir_fd=directory, follow_symlinks=False), path)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    descriptor = os.open(path, flags, dir_fd=directory)
    try:
        found = os.fstat(descriptor)
        check_plain(found, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, found


def check_plain(found: os.stat_result, path: str) -> None:
    """Refuse what is not a plain file with one name.

    Raises:
        OSError: As for `open_plain`.
    """
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "a symbolic link", path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a plain file", path)
    # No link at all is a file that was replaced while it was being opened: still a whole one.
    if found.st_nlink > 1:
        raise OSError(errno.EMLINK, "one of several links", path)


def read_up_to(descriptor: int, size: int) -> bytes:
    """Read at most `size` bytes from the start of a file."""
    parts: list[bytes] = []
    position = 0
    while position < size and (part := os.pread(descriptor, size - position, position)):
        parts.append(part)
        position += len(part)
    return b"".join(parts)


def replace_file(path: str, data: bytes, *, temporary: str, mode: int) -> None:
    """Replace a file as a whole: a reader finds the old content or the new, never a part.

    Args:
        path: What to replace; not followed if it is a symbolic link.
        data: The new content.
        temporary: A name in the same directory; a leftover of that name is removed.
        mode: Permissions, less the umask.

    Raises:
        OSError: The old file stands as it was, and the temporary one is gone if that could be done.
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
