"""statvfs calls with a deadline.

A dead NFS server or FUSE daemon blocks statvfs forever, and the thread cannot be interrupted. Each call therefore
runs in a separate daemon thread. A call that exceeds the deadline is abandoned, and statvfs is not called again for
this filesystem until the call has returned.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Mapping

NOT_RETURNED = "statvfs has not returned"
_UNKNOWN_COUNT = 2**63
"""Smallest value that means unknown: the kernel stores -1 in unsigned fields."""

StatvfsResult = os.statvfs_result | OSError | None
"""Result or error of statvfs; None if statvfs has not returned."""


class StatvfsPool:
    """Concurrent statvfs calls, each on a separate thread, so that a hanging call affects a single filesystem."""

    def __init__(
        self,
        *,
        statvfs: Callable[[str], os.statvfs_result] = os.statvfs,
        deadline_seconds: float = 3.0,
    ) -> None:
        self._statvfs = statvfs
        self._deadline_seconds = deadline_seconds
        self._condition = threading.Condition()
        # Filesystems whose call has not returned; guarded by the condition.
        self._pending_filesystems: set[str] = set()

    def call(self, paths: Mapping[str, str]) -> Mapping[str, StatvfsResult]:
        """Call statvfs for the path of each filesystem, and return the results by filesystem.

        The result is None if the call does not return within the deadline. A filesystem whose earlier call has not returned is not
        called again. Not thread-safe.
        """
        results: dict[str, StatvfsResult] = {}
        with self._condition:
            filesystems = [filesystem for filesystem in paths if filesystem not in self._pending_filesystems]
            for filesystem in filesystems:
                arguments = (filesystem, paths[filesystem], results)
                thread = threading.Thread(
                    target=self._run, args=arguments, name="exporter-statvfs", daemon=True
                )
                try:
                    thread.start()
                    self._pending_filesystems.add(filesystem)
                except RuntimeError:
                    results[filesystem] = OSError(
                        errno.EAGAIN, "no thread for statvfs (limit of processes or memory)"
                    )
            self._condition.wait_for(
                lambda: self._pending_filesystems.isdisjoint(filesystems), self._deadline_seconds
            )
            return {filesystem: results.get(filesystem) for filesystem in paths}

    def _run(self, filesystem: str, path: str, results: dict[str, StatvfsResult]) -> None:
        """Call statvfs on a thread, and store the result, which `call` ignores after the deadline."""
        try:
            result: StatvfsResult = self._statvfs(path)
        except OSError as error:
            result = error
        with self._condition:
            self._pending_filesystems.discard(filesystem)
            results[filesystem] = result
            self._condition.notify_all()


def size_bytes(status: os.statvfs_result) -> int | None:
    """Return the size of a filesystem, or None for a filesystem without blocks (autofs, lxcfs)."""
    return _valid_count(status.f_blocks * status.f_frsize) if status.f_blocks else None


def available_bytes(status: os.statvfs_result) -> int | None:
    """Return the free bytes for users other than root, or None for a filesystem without blocks."""
    return _valid_count(status.f_bavail * status.f_frsize) if status.f_blocks else None


def files(status: os.statvfs_result) -> int | None:
    """Return the number of inodes, or None if the filesystem has no limit (btrfs)."""
    return _valid_count(status.f_files) if status.f_files else None


def files_free(status: os.statvfs_result) -> int | None:
    """Return the number of free inodes, or None if the filesystem has no limit (btrfs)."""
    return _valid_count(status.f_ffree) if status.f_files else None


def _valid_count(count: int) -> int | None:
    return count if count < _UNKNOWN_COUNT else None
