"""StateLocks: who keeps which state file, by record locks that the kernel drops when their holder dies.

Runs in the sidecar, within the store that uses it; no threads. One file, `locks`, stands for all: a byte of it, found
from the name of a state file, is that file's. The lock file is never removed by us; where somebody else does, all locks
are taken again in a new one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
from collections.abc import Collection, Iterator
from pathlib import Path

_log = logging.getLogger(__name__)

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_TAKEN = {errno.EACCES, errno.EAGAIN}


class StateLocks:
    """The locks of one directory, which may be missing as long as none is taken.

    Args:
        directory: Its path.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptor: int | None = None
        self._told = False

    def take(self, name: str, within: int) -> bool:
        """Lock a state file; on a file system without locks everybody succeeds, which is logged.

        Args:
            name: Of the state file.
            within: The directory, open.

        Returns:
            False while another process holds it.

        Raises:
            OSError: It cannot be told.
        """
        if self._descriptor is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open("locks", flags, 0o600, dir_fd=within)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _offset(name))
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            if error.errno not in _NO_LOCKS:
                raise
            if not self._told:
                self._told = True
                _log.warning(
                    "%s is on a file system without record locks: two sidecars that keep the same rank of the"
                    " same run there would overwrite each other's totals",
                    self._directory,
                )
        return True

    def drop(self, name: str) -> None:
        """Let others have it; harmless when it is not held."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, _offset(name))

    @property
    def lost(self) -> bool:
        """Whether somebody has removed the lock file (`rm -r` of the directory), so that others would take another."""
        return self._descriptor is not None and not os.fstat(self._descriptor).st_nlink

    def renew(self, names: Collection[str], within: int) -> Iterator[str]:
        """Take locks again in a new file, and tell which of them others have been quicker to take."""
        self.close()
        for name in names:
            if not self.take(name, within):
                yield name

    def close(self) -> None:
        """Drop all."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _offset(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
