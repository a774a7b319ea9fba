"""NodeLock: of all exporters on one machine, one counts its energy.

Runs in the sidecar; may be asked from any thread. N exporters that read the same registers would report N times
the energy. The lock is a POSIX record lock on a file in shared memory, named by the machine's boot: the kernel
drops it when its holder dies, and the next exporter that asks gets it. Exporters of different users meet there
too; those in containers only where they share the directory. The file is never removed: whoever removed it could
take it from under another's lock.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import stat
import struct
import threading
from pathlib import Path

DIRECTORY = Path("/dev/shm")  # noqa: S108 - every user may lock there; the file is opened without following links
MODE = 0o666
"""Whoever may run an exporter must be able to take the lock after another user."""

_FLOCK = struct.Struct("@hhqqi0q")
_TAKEN = frozenset({errno.EACCES, errno.EAGAIN})


class LockStatus(enum.Enum):
    """How a question for the lock ended."""

    HELD = "held"
    TAKEN = "taken"
    IMPOSSIBLE = "impossible"


class NodeLock:
    """The lock of this machine.

    Args:
        directory: Where exporters meet.
        machine: What tells the machine from others that share the directory.

    Attributes:
        path: The lock file.
        status: How the last question ended.
        told: Why, for people: who holds it, or what makes it impossible.
    """

    def __init__(self, directory: Path, machine: str) -> None:
        self.path = directory / f"training-exporter-energy-{machine or 'machine'}.lock"
        self.status = LockStatus.TAKEN
        self.told = "not asked yet"
        self._descriptor: int | None = None
        self._guard = threading.Lock()

    def acquire(self) -> bool:
        """Become, or stay, the one that counts; cheap to call again.

        Where no lock can be had at all it counts too, since it would be wrong not to on a machine with one
        exporter; `status` tells.
        """
        with self._guard:
            if self._descriptor is None or not self._is_there(self._descriptor):
                self._take()
            return self.status is not LockStatus.TAKEN

    def release(self) -> None:
        """Let another exporter count."""
        with self._guard:
            self._close()
            self.status, self.told = LockStatus.TAKEN, "released"

    def _take(self) -> None:
        self._close()
        try:
            descriptor = self._open()
        except OSError as error:
            self._look_only(error)
            return
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._say_taken(descriptor, error)
            os.close(descriptor)
            return
        self._descriptor = descriptor
        self.status, self.told = LockStatus.HELD, ""

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

    def _look_only(self, error: OSError) -> None:
        """Find out whether somebody counts, where the file may only be read."""
        self.status, self.told = LockStatus.IMPOSSIBLE, f"{self.path}: {error.strerror}"
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            descriptor = os.open(self.path, flags)
            try:
                self._say_taken(descriptor, None)
            finally:
                os.close(descriptor)

    def _say_taken(self, descriptor: int, error: OSError | None) -> None:
        """Note who holds it; without a holder, and with another error, no lock is to be had."""
        with contextlib.suppress(OSError):
            question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, question))
            if kind != fcntl.F_UNLCK:
                self.status, self.told = LockStatus.TAKEN, f"process {pid}" if pid > 0 else "a process"
                return
        if error is not None and error.errno in _TAKEN:  # it has just let go
            self.status, self.told = LockStatus.TAKEN, "a process"
        elif error is not None:
            self.status, self.told = LockStatus.IMPOSSIBLE, f"{self.path}: {error.strerror}"

    def _is_there(self, descriptor: int) -> bool:
        """Whether the locked file is still the one that others would open."""
        with contextlib.suppress(OSError):
            here, there = os.fstat(descriptor), os.lstat(self.path)
            return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
        return False

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
