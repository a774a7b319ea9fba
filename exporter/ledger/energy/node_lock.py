"""NodeLock: of all exporters on one machine, one counts its energy; N that read the same registers would report it N times.

Runs in the sidecar; may be asked from any thread. The lock is on a file in shared memory, named by the machine's boot:
the kernel drops it when its holder dies, and the next exporter that asks gets it. Exporters of different users meet there
too; those in containers only where they share the directory. The file is never removed: whoever removed it could take it
from under another's lock.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from exporter.feed.files import RecordLock

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
        self._lock: RecordLock | None = None
        self._guard = threading.Lock()

    def acquire(self) -> bool:
        """Become, or stay, the one that counts; cheap to call again.

        Where no lock can be had it counts too, since it would be wrong not to on a machine with one exporter.
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
        """Let another exporter count."""
        with self._guard:
            self._drop()

    def _drop(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _make_file(self) -> None:
        # Not O_CREAT alone on a file of another user: fs.protected_regular forbids that in shared directories.
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
            with contextlib.suppress(OSError):
                os.fchmod(descriptor, MODE)  # whatever the umask
            os.close(descriptor)
