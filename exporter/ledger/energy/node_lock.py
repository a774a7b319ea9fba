"""NodeLock: of all exporters on one machine, one counts its energy; N that read the same registers would report it N times.

Runs in the sidecar; may be asked from any thread. The lock is a POSIX record lock on a file in shared memory, named by
the machine's boot: the kernel drops it when its holder dies, and the next exporter that asks gets it. Exporters of
different users meet there too; those in containers only where they share the directory. The file is never removed:
whoever removed it could take it from under another's lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from pathlib import Path

MODE = 0o666
"""Whoever may run an exporter must be able to take the lock after another user."""


class NodeLock:
    """The lock of this machine, which `machine` tells from others that share the directory.

    Attributes:
        path: The lock file.
        impossible: No lock can be had here at all, as the last question showed.
    """

    def __init__(self, directory: Path, machine: str) -> None:
        self.path = directory / f"training-exporter-energy-{machine or 'machine'}.lock"
        self.impossible = False
        self._descriptor: int | None = None
        self._guard = threading.Lock()

    def acquire(self) -> bool:
        """Become, or stay, the one that counts; cheap to call again.

        Where no lock can be had it counts too, since it would be wrong not to on a machine with one exporter.
        """
        with self._guard:
            if self._descriptor is None or not self._is_there(self._descriptor):
                self._close()
                self.impossible = False
                try:
                    self._descriptor = self._open()
                    fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    in_use = error.errno in {errno.EACCES, errno.EAGAIN}
                    self.impossible = self._descriptor is None or not in_use
                    self._close()
            return self._descriptor is not None or self.impossible

    def release(self) -> None:
        """Let another exporter count."""
        with self._guard:
            self._close()

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            # Not O_CREAT on a file of another user: fs.protected_regular forbids that in shared directories.
            descriptor = os.open(self.path, flags)
        except FileNotFoundError:
            descriptor = os.open(self.path, flags | os.O_CREAT | os.O_EXCL, MODE)
            with contextlib.suppress(OSError):
                os.fchmod(descriptor, MODE)  # whatever the umask
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file", str(self.path))
        return descriptor

    def _is_there(self, descriptor: int) -> bool:
        """Whether the locked file is still the one that others would open."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(descriptor), os.lstat(self.path))
        return False

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
