"""Record locks of state files: a byte of a shared lock file per state file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
from pathlib import Path

_log = logging.getLogger(__name__)

# Errors of a request for a lock.
_IN_USE = {errno.EACCES, errno.EAGAIN}  # another process holds the lock
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # the filesystem has no locks


class StateLocks:
    """Locks of a state directory, held until `release`, `close` or the exit of the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._has_warned = False

    def acquire(self, name: str) -> bool:
        """Lock a state file. Return False if a different sidecar holds the lock.

        On a file system without locks, every sidecar acquires the lock, and logs a warning once.
        """
        if self._descriptor is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o600)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _offset(name))
        except OSError as error:
            if error.errno in _IN_USE:
                return False
            if error.errno not in _NO_LOCKS:
                raise
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "%s is on a file system without record locks: two sidecars that count the same rank of the same run"
                    " would overwrite each other's totals; set a separate --state.dir for each sidecar",
                    self._path.parent,
                )
        return True

    def release(self, name: str) -> None:
        """Unlock a state file."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, _offset(name))

    def is_removed(self) -> bool:
        """Return True if the lock file was deleted and the locks are therefore ineffective."""
        return self._descriptor is not None and not os.fstat(self._descriptor).st_nlink

    def close(self) -> None:
        """Release every lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _offset(name: str) -> int:
    """Return the byte of the lock file that is locked for a state file.

    The offset is a hash of seven bytes, because an offset of eight bytes may exceed the largest file offset.
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
