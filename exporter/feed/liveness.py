"""Is a process alive? The kernel knows: a POSIX record lock on a file that its owner opened once.

The owner (a training process; for `owner.lock` a sidecar) takes the lock and keeps the file open; whoever wants to know
asks with `F_GETLK`, which takes nothing, waits for nothing, works on a read-only mount and across containers that share
the directory. When the owner dies, however it dies, the kernel drops the lock.

Record locks and not `flock` or open-file-description locks, since those live on in every forked worker that inherited
the descriptor. The price is a rule of POSIX: when a process closes *any* descriptor of a file, its record locks on it are
gone. So nobody opens a lock file that its own process holds (`_HELD`); an owner takes the lock again whenever it looks
(`RecordLock.keep`), since a job may close every descriptor, and never touches one that is no longer its own; and a forked
child holds nothing. Linux only; elsewhere `exporter.feed.directory` refuses before anything here is called.
"""
# ruff: noqa: PTH108, PTH118 - one kind of path within the folder, which the job and the sidecar share

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from contextlib import suppress

from exporter.feed.files import FEED, LOCK, OWN_MODE, TEMPORARY, check_regular, open_regular

try:
    import fcntl
except ImportError:  # Windows: everything imports and records there, without a feed
    fcntl = None  # type: ignore[assignment]  # never used then, see above

_FLOCK = struct.Struct("@hhqqi0q")
"""struct flock as the kernel writes it, padding included: type, whence, start, length (0: to the end), pid."""

_HELD: dict[tuple[int, int], int] = {}
"""Lock files held by this process: (device, inode) to process id, which tells a forked child from its parent."""


class RecordLock:
    """A lock that this process holds for as long as it lives, or until `release`."""

    __slots__ = ("_descriptor", "_inode", "_pid", "path")

    def __init__(self, path: str, descriptor: int, inode: tuple[int, int]) -> None:
        self.path = path
        self._descriptor = descriptor
        self._inode = inode
        self._pid = _HELD[inode] = os.getpid()

    @classmethod
    def take(cls, path: str, *, create_mode: int) -> RecordLock | None:
        """Take the lock without waiting; None when another process, or another part of this one, holds it.

        Raises:
            OSError: The file cannot be opened, made with this mode or locked, or is not a regular file with one link.
        """
        if _held_here(path):
            return None  # opening and closing it would drop the lock that somebody here relies on
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags, create_mode)
        lock = None
        try:
            if _try_lock(descriptor):
                found = os.fstat(descriptor)
                check_regular(found, path)
                if found.st_nlink:  # else it was removed just now: whoever did that held the lock
                    lock = cls(path, descriptor, _inode(found))
        finally:
            if lock is None:
                os.close(descriptor)
        return lock

    def keep(self) -> bool:
        """Make sure of the lock, taking it again if something in this process has dropped it.

        False when it is lost for good: descriptor closed, file removed or moved away, or another process has the lock.
        """
        if self._pid != os.getpid() or not self._is_own():
            return False
        try:
            return _inode(os.lstat(self.path)) == self._inode and _try_lock(self._descriptor)
        except OSError:
            return False

    def release(self) -> None:
        """Drop the lock. In a forked child this does nothing, since the lock is its parent's."""
        if self._pid != os.getpid():
            return
        _HELD.pop(self._inode, None)
        if self._is_own():
            os.close(self._descriptor)
        self._pid = -1

    def _is_own(self) -> bool:
        # After a job has closed all descriptors, ours may be the number of a file of the job.
        try:
            return _inode(os.fstat(self._descriptor)) == self._inode
        except OSError:
            return False


def holder(path: str, *, directory: int | None = None) -> int | None:
    """Ask who holds a lock file, its path relative to an open directory, if one is given.

    Returns:
        None when nobody does, or there is no such file; else the holder's process id as seen from here, 0 for
        one in a pid namespace that cannot be seen from here.

    Raises:
        OSError: The file cannot be opened, is a symbolic link or no regular file.
    """
    if _held_here(path, directory=directory):
        return os.getpid()
    try:
        descriptor, _ = open_regular(path, directory=directory)
    except FileNotFoundError:
        return None
    try:
        # What stands in the way of reading is a lock for writing, the owner's; anybody who may read may take the other.
        question = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, question))
    finally:
        os.close(descriptor)
    return None if kind == fcntl.F_UNLCK else max(pid, 0)


def remove_process(directory: str, process_id: str, *, if_true: Callable[[], bool] = lambda: True) -> bool:
    """Remove the files of a process that is dead at this moment; says whether none of them is left.

    Its lock is held meanwhile, and made for that if it is missing, so that a process that had only lost it (a job
    that closed all descriptors) cannot come back between the question and the removal. `if_true` is asked once it cannot:
    the files stay unless it says so.
    """
    stem = os.path.join(directory, process_id)
    lock: RecordLock | None = None
    try:
        lock = RecordLock.take(stem + LOCK, create_mode=OWN_MODE)
        if lock is None:
            return False
    except OSError:
        # Another user's lock file, or no room for one: the kernel still says whether it is held, and the
        # directory whether we may.
        if _may_be_held(stem + LOCK):
            return False
    try:
        if not if_true():
            return False
        # The lock file last: what a crash leaves behind is then still known by it.
        for suffix in (FEED, TEMPORARY, LOCK):
            with suppress(FileNotFoundError):
                os.unlink(stem + suffix)
    except OSError:
        return False
    finally:
        if lock is not None:
            lock.release()
    return True


def _may_be_held(path: str) -> bool:
    try:
        return holder(path) is not None
    except OSError:
        return True


def _held_here(path: str, *, directory: int | None = None) -> bool:
    try:
        found = os.stat(path, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return _HELD.get(_inode(found)) == os.getpid()


def _inode(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError as error:
        if error.errno in {errno.EACCES, errno.EAGAIN}:
            return False
        raise
    return True
