"""Lock that lets a single exporter count the energy of a machine."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from exporter.feed.files import RecordLock

MODE = 0o666
"""Mode of the lock file: exporters of all users must be able to lock the file."""


class NodeLock:
    """Record lock of the exporter that counts a machine's energy. Thread-safe.

    The name of the lock file contains the machine's boot id. The kernel releases the lock when the holder exits. The file is
    not removed, because a second exporter could then lock a new file of that name.

    Attributes:
        is_impossible: True if the last call could not lock the file for a reason other than a different holder.
    """

    def __init__(self, directory: Path, machine: str) -> None:
        self.path = directory / f"training-exporter-energy-{machine or 'machine'}.lock"
        self.is_impossible = False
        self._lock: RecordLock | None = None
        self._guard = threading.Lock()

    def acquire(self) -> bool:
        """Return True if this exporter holds the lock, or if no lock is possible, because most machines have a single exporter.

        Repeated calls are cheap.
        """
        with self._guard:
            if self._lock is None or not self._lock.keep():
                self._drop()
                try:
                    self._make_file()
                    self._lock, self.is_impossible = RecordLock.take(str(self.path), create_mode=None), False
                except OSError:
                    self.is_impossible = True
            return self._lock is not None or self.is_impossible

    def release(self) -> None:
        """Release the lock for other exporters."""
        with self._guard:
            self._drop()

    def _drop(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _make_file(self) -> None:
        # Created with O_EXCL, because fs.protected_regular forbids to open a different user's file in a shared directory with
        # O_CREAT.
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
            with contextlib.suppress(OSError):
                os.fchmod(descriptor, MODE)  # independent of the umask
            os.close(descriptor)
