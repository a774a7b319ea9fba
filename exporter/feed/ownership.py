"""Ownership of a feed directory: a single sidecar removes the files of exited processes and saves the totals.

The owner holds the lock of `owner.lock`, or of an alternative name if an untrusted user has created that file.
"""
# ruff: noqa: PTH118 - this package uses string paths

from __future__ import annotations

import os
from pathlib import Path

from exporter.feed import files
from exporter.feed.directory import is_trusted
from exporter.feed.entries import own_entry, trusted_entries
from exporter.feed.files import RecordLock, find_lock_holder


class DirectoryOwnership:
    """Ownership of a feed directory by this process. The constructor touches no file.

    Attributes:
        problem: Error that prevented the last `acquire`; empty if there was none or a different process owns the directory.
    """

    def __init__(self, directory: Path) -> None:
        self.problem = ""
        self._directory = os.fspath(directory)
        self._is_trusted = is_trusted(directory)
        self._lock: RecordLock | None = None

    @property
    def is_held(self) -> bool:
        """True after a successful `acquire`, until the release."""
        return self._lock is not None

    def keep(self) -> bool:
        """Restore the lock, if necessary. Return True if this process owns the directory; False before `acquire`."""
        return self._lock is not None and self._lock.keep()

    def acquire(self) -> bool:
        """Acquire or keep the ownership. Return False if a different process owns the directory, or if locking fails.

        In a shared directory, a foreign lock file is ignored, and this process locks a file with an alternative name.
        """
        if self.keep():
            return True
        self.release()
        default_path = os.path.join(self._directory, files.OWNER_LOCK)
        path = own_entry(default_path)
        mode = files.SHARED_MODE if self._is_trusted else files.OWN_MODE
        self.problem = ""
        try:
            other_paths = [entry for entry in trusted_entries(default_path) if entry != path]
            if any(map(_has_holder, other_paths)):
                return False
            self._lock = RecordLock.take(path, create_mode=mode)
        except OSError as error:
            self.problem = f"{path}: {error.strerror}"
            return False
        return self._lock is not None

    def release(self) -> None:
        """Release the ownership."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _has_holder(path: str) -> bool:
    """Return True if a process holds a lock file. An unreadable file counts as unlocked."""
    try:
        return find_lock_holder(path) is not None
    except OSError:
        return False
