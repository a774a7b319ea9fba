"""Lock that lets a single exporter count the energy of a machine."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from exporter.feed.files import RecordLock

LOCK_FILE_MODE = 0o666
"""Exporters of all users must be able to lock the file."""


class NodeLock:
    """Record lock of the exporter that counts a machine's energy. Thread-safe.

    The name of the lock file contains the machine's boot id, or "machine" if the boot id is "". The kernel releases the lock
    when the holder exits. The file is not removed, because a second exporter could then lock a new file of that name.

    Attributes:
        cannot_lock: True if the last attempt to lock the file failed, for a reason other than a different holder.
    """

    def __init__(self, directory: Path, boot_id: str) -> None:
        self.path = directory / f"training-exporter-energy-{boot_id or 'machine'}.lock"
        self.cannot_lock = False
        self._lock: RecordLock | None = None
        self._mutex = threading.Lock()

    def acquire(self) -> bool:
        """Return True if this exporter may count the energy of the machine.

        If the file cannot be locked, this exporter counts, because most machines run a single exporter.
        """
        with self._mutex:
            if self._lock is None or not self._lock.keep():
                self._drop()
                try:
                    self._create_file()
                    self._lock, self.cannot_lock = RecordLock.take(str(self.path), create_mode=None), False
                except OSError:
                    self.cannot_lock = True
            return self._lock is not None or self.cannot_lock

    def release(self) -> None:
        """Release the lock for other exporters."""
        with self._mutex:
            self._drop()

    def _drop(self) -> None:
        """Release the lock, if it is held. The caller holds the mutex."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _create_file(self) -> None:
        """Create the lock file, unless it exists. Raises OSError.

        The file is created with O_EXCL, because fs.protected_regular forbids opening a different user's file in a shared directory
        with O_CREAT.
        """
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(
                self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, LOCK_FILE_MODE
            )
            with contextlib.suppress(OSError):
                os.fchmod(descriptor, LOCK_FILE_MODE)  # independent of the umask
            os.close(descriptor)
