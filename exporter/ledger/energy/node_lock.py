"""Lock of the exporter that counts the energy of a machine."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from exporter.feed.files import RecordLock

MODE = 0o666
"""Mode of the lock file: exporters of all users must be able to lock the file."""


class NodeLock:
    """Record lock of the only exporter that counts a machine's energy; thread-safe.

    The lock file is in shared memory and named by the machine's boot id; the kernel releases the lock at the exit of the holder.
    The file is never removed, because a removed file can be locked a second time.

    Attributes:
        impossible: True if no lock is possible here, as of the last call.
    """

    def __init__(self, directory: Path, machine: str) -> None:
        self.path = directory / f"training-exporter-energy-{machine or 'machine'}.lock"
        self.impossible = False
        self._lock: RecordLock | None = None
        self._guard = threading.Lock()

    def acquire(self) -> bool:
        """Return True if this exporter counts the energy; repeated calls are cheap.

        Also True if no lock is possible: most machines have a single exporter.
        """
        with self._guard:
            if self._lock is None or not self._lock.keep():
                self._drop()
                try:
                    self._make_file()
                    self._lock, self.impossible = RecordLock.take(str(self.path), create_mode=None), False
                except OSError:
                    self.impossible = True
            return self._lock is not None or self.impossible

    def release(self) -> None:
        """Release the lock for other exporters."""
        with self._guard:
            self._drop()

    def _drop(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _make_file(self) -> None:
        # Not O_CREAT alone on a file of a different user: fs.protected_regular forbids O_CREAT in shared directories.
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
            with contextlib.suppress(OSError):
                os.fchmod(descriptor, MODE)  # independent of the umask
            os.close(descriptor)
