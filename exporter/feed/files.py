"""Files of a feed directory: opened only if regular, replaced as a whole, locked by running processes.

Used in training processes and in the sidecar, on Linux. A process has these files:

- `<id>.feed`: the last complete snapshot
- `<id>.lock`: locked until the process closes the feed or exits
- `<id>.stacks`: the answer to a stack request
- `<id>.tmp`: the next snapshot, before it replaces the last snapshot

The sidecar has `owner.lock`, `overrides.json` and `stacks.request`, and `run` has the directory `runs`.
"""
# ruff: noqa: PTH105, PTH108, PTH118 - this package uses string paths in the job and in the sidecar

from __future__ import annotations

import errno
import os
import stat
import struct
import time
from collections.abc import Callable
from contextlib import suppress

try:
    import fcntl
except ImportError:  # Windows, where all modules import and record, without a feed
    fcntl = None  # type: ignore[assignment]  # not used there

# Ends of the names of files in a feed directory.
FEED = ".feed"
LOCK = ".lock"
TEMPORARY = ".tmp"
STACKS = ".stacks"
# Names of files in a feed directory.
OWNER_LOCK = "owner.lock"
OVERRIDES = "overrides.json"

OWN_MODE = 0o600
"""Permissions of files in the user's default directory."""
SHARED_MODE = 0o644
"""Permissions of files in a configured directory, less the umask: readable for sidecars of other users."""
_FLOCK = struct.Struct("@hhqqi0q")
"""struct flock of the kernel, padding included: type, whence, start, length (0: to the end), pid."""
_PROCESS_BY_LOCK: dict[tuple[int, int], int] = {}
"""Pid of the process that locked a file, by device and inode. In a forked child, the entries of the parent have a different pid."""


def is_process_id(text: str) -> bool:
    """Return True if a text is the id of a recording process: 32 hexadecimal digits."""
    return len(text) == 32 and set("0123456789abcdef").issuperset(text)


def parse_process_id(name: str) -> str | None:
    """Return the id of the process to which a feed, lock or temporary file belongs, or None for other file names.

    A stacks file names no process here, because it never remains alone: `remove_process` removes it before the lock file.
    """
    stem, dot, suffix = name.rpartition(".")
    if dot + suffix == TEMPORARY:
        stem = stem.partition("-")[0]  # `replace_file` may add a random suffix
    return stem if dot + suffix in {FEED, LOCK, TEMPORARY} and is_process_id(stem) else None


def open_regular(path: str, *, directory: int | None = None) -> tuple[int, os.stat_result]:
    """Open a regular file with a single link for reading; relative to an open directory, if given.

    Raises OSError: `ELOOP` for a symbolic link, `EMLINK` for a file with several links, `EINVAL` for other kinds of entries.
    """
    # Checked before the open, because opening a device can have effects.
    _check_regular(os.stat(path, dir_fd=directory, follow_symlinks=False), path)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    descriptor = os.open(path, flags, dir_fd=directory)
    try:
        status = os.fstat(descriptor)
        _check_regular(status, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, status


def _check_regular(status: os.stat_result, path: str) -> None:
    """Raise OSError for an entry that is not a regular file with at most one link."""
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "a symbolic link", path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    # A file without a link is accepted: it was replaced after the open, and is complete.
    if status.st_nlink > 1:
        raise OSError(errno.EMLINK, "a file with several links", path)


def read_file(path: str, max_bytes: int) -> tuple[bytes, os.stat_result]:
    """Return at most *max_bytes* from the start of a regular file, and the file's status. Raises OSError."""
    descriptor, status = open_regular(path)
    try:
        return os.pread(descriptor, max_bytes, 0), status
    finally:
        os.close(descriptor)


def replace_file(path: str, data: bytes, *, temporary: str, mode: int) -> None:
    """Replace a file, or a symbolic link, atomically: a reader finds the old content or the new content.

    *temporary* is a path in the same directory with the suffix `.tmp`. A leftover file of that name is removed. If the leftover
    file cannot be removed, a random name is used instead. After an OSError the old file is unchanged.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(temporary, flags, mode)
    except FileExistsError:
        try:
            os.unlink(temporary)
        except (PermissionError, IsADirectoryError):
            temporary = f"{temporary.removesuffix(TEMPORARY)}-{os.urandom(8).hex()}{TEMPORARY}"
        descriptor = os.open(temporary, flags, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def overwrite_file(path: str, data: bytes) -> None:
    """Overwrite a file of this user, within the space that the file already has on a full disk.

    A reader may meanwhile find a part of the new content, and a kill of the process leaves this part. Raises OSError, and changes
    nothing, if the space does not suffice.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        _check_regular(status, path)
        if status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "a file of another user", path)
        if len(data) > status.st_blocks * 512:  # the unit of `st_blocks` on every filesystem
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))
        # The kernel's own time has a resolution of some milliseconds, in which a reader may have found a part.
        os.utime(descriptor, ns=(time.time_ns(), time.time_ns()))
    finally:
        os.close(descriptor)


class RecordLock:
    """POSIX record lock, held until `release` or the exit of this process.

    To ask for the holder without locking the file, use `find_lock_holder`.

    `flock` and open-file-description locks would survive in every forked worker that inherited the descriptor; a forked child does
    not inherit a record lock. POSIX drops the record locks of a process on a file when the process closes *any* descriptor of the
    file. Therefore this module does not open a lock file that the process holds (`_PROCESS_BY_LOCK`), and `keep` restores the lock
    after a job has closed all descriptors.
    """

    def __init__(self, path: str, descriptor: int, inode: tuple[int, int]) -> None:
        self.path = path
        self._descriptor = descriptor
        self._inode = inode
        self._pid = _PROCESS_BY_LOCK[inode] = os.getpid()

    @classmethod
    def take(cls, path: str, *, create_mode: int | None) -> RecordLock | None:
        """Lock a file without waiting.

        Returns None if another process or another part of this process holds the lock, or has just removed the file. A missing file is
        created with *create_mode*; without a mode, it is an error.

        Raises:
            OSError: The file is missing, cannot be locked, or is not a regular file.
        """
        if _is_held_here(path):
            return None  # opening and closing the file would drop the lock of this process
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        create_flag = 0 if create_mode is None else os.O_CREAT
        descriptor = os.open(path, flags | create_flag, create_mode or 0)
        lock = None
        try:
            if _try_lock(descriptor):
                status = os.fstat(descriptor)
                _check_regular(status, path)
                if status.st_nlink:  # otherwise the previous holder has removed the file
                    lock = cls(path, descriptor, _inode(status))
        finally:
            if lock is None:
                os.close(descriptor)
        return lock

    def keep(self) -> bool:
        """Restore the lock, which a close in this process may have dropped. Return False if the lock is lost."""
        try:
            status = os.lstat(self.path)
            return self._is_own() and _inode(status) == self._inode and _try_lock(self._descriptor)
        except OSError:
            return False

    def mark(self, *, is_outdated: bool) -> None:
        """Mark the last snapshot as outdated, by a modification time of 0 of the lock file, or as current.

        The modification time can be set on a full disk, too, on which no snapshot can be written.
        """
        if self._is_own():
            os.utime(self._descriptor, (0, 0) if is_outdated else None)

    def release(self) -> None:
        """Drop the lock. Does nothing in a forked child, because the parent holds the lock."""
        if self._pid == os.getpid():
            _PROCESS_BY_LOCK.pop(self._inode, None)
            if self._is_own():
                os.close(self._descriptor)
            self._pid = -1

    def _is_own(self) -> bool:
        """Return True if the descriptor is still the lock file's, in the process that took the lock.

        After a job has closed all descriptors, the descriptor's number may belong to a file of the job.
        """
        try:
            return self._pid == os.getpid() and _inode(os.fstat(self._descriptor)) == self._inode
        except OSError:
            return False


def find_lock_holder(path: str, *, directory: int | None = None) -> int | None:
    """Return the pid of the holder of a lock file; relative to an open directory, if given.

    Returns None without a holder or without a file, and 0 for a process in an invisible pid namespace. Raises OSError if the file
    cannot be opened.
    """
    if _is_held_here(path, directory=directory):
        return os.getpid()
    try:
        descriptor, _ = open_regular(path, directory=directory)
    except FileNotFoundError:
        return None
    try:
        # F_GETLK reports the lock that would prevent this read lock: the write lock of the holder.
        query = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        lock_type, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, query))
    finally:
        os.close(descriptor)
    return None if lock_type == fcntl.F_UNLCK else max(pid, 0)


def remove_process(directory: str, process_id: str, *, condition: Callable[[], bool] = lambda: True) -> bool:
    """Remove the files of an exited process if *condition* returns True. Return True if neither a feed file nor a lock file is left.

    A job that has closed all its descriptors has lost the lock, although it still runs, and may restore it. To prevent that between the
    check and the removal, the lock is held during the removal, and a missing lock file is created.
    """
    stem = os.path.join(directory, process_id)
    lock: RecordLock | None = None
    try:
        try:
            lock = RecordLock.take(stem + LOCK, create_mode=OWN_MODE)
            is_held = lock is None
        except OSError:
            # The lock file belongs to another user, or the disk is full. The kernel still reports the holder, and the permissions
            # of the directory decide about the removal.
            is_held = find_lock_holder(stem + LOCK) is not None
        if is_held or not condition():
            return False
        # The lock file is removed last, because it identifies the remaining files after a crash.
        for suffix in (TEMPORARY, STACKS):
            with suppress(FileNotFoundError, PermissionError, IsADirectoryError):  # missing, or foreign
                os.unlink(stem + suffix)
        for suffix in (FEED, LOCK):
            with suppress(FileNotFoundError):
                os.unlink(stem + suffix)
    except OSError:
        return False
    finally:
        if lock is not None:
            lock.release()
    return True


def _is_held_here(path: str, *, directory: int | None = None) -> bool:
    """Return True if this process holds the lock of a file. Opens no file, because closing the file would drop the lock."""
    try:
        status = os.stat(path, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return _PROCESS_BY_LOCK.get(_inode(status)) == os.getpid()


def _inode(status: os.stat_result) -> tuple[int, int]:
    """Return device and inode, which identify a file under all of its names."""
    return status.st_dev, status.st_ino


def _try_lock(descriptor: int) -> bool:
    """Lock an open file without waiting. Return False if a different process holds the lock. Raises OSError."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError as error:
        if error.errno in {errno.EACCES, errno.EAGAIN}:
            return False
        raise
    return True
