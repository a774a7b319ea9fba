"""Shared memory: the size of /dev/shm and how full it is.

Used in the sidecar. `statvfs` comes in. No threads, no state. DataLoader workers hand over batches through
/dev/shm and die of a bus error when it is full; Docker gives a container 64 MiB of it.
"""

from __future__ import annotations

import os
from pathlib import Path

from exporter.collectors.draft import Draft
from exporter.collectors.family import Collected, FamilySpec
from exporter.collectors.kernel_files import FILE_REASONS, NOT_OFFERED, failure

SIZE = FamilySpec(
    "host_shm_size_bytes",
    "gauge",
    "Size of /dev/shm as the exporter sees it. Absent where there is none.",
    unit="bytes",
    source="statvfs /dev/shm f_blocks * f_frsize",
)
USED = FamilySpec(
    "host_shm_used_bytes",
    "gauge",
    "Used part of /dev/shm as the exporter sees it. Absent where there is none.",
    unit="bytes",
    source="statvfs /dev/shm (f_blocks - f_bfree) * f_frsize",
)
SPECS = (SIZE, USED)


class ShmCollector:
    """Asks how full /dev/shm is.

    Args:
        shm: Where it is mounted.
    """

    name = "shm"
    specs = SPECS
    reasons = FILE_REASONS

    def __init__(self, *, shm: Path = Path("/dev/shm")) -> None:  # noqa: S108 - looked at, never written to
        self._path = shm

    def collect(self) -> Collected:
        """Ask once.

        Raises:
            CollectError: It exists and does not answer.
        """
        draft = Draft()
        try:
            found = os.statvfs(self._path)
        except OSError as error:
            if error.errno not in NOT_OFFERED:
                raise failure(self._path, error) from error
            draft.unsupported(f"no {self._path}")
            return draft.finish()
        draft.add(SIZE, found.f_blocks * found.f_frsize)
        draft.add(USED, (found.f_blocks - found.f_bfree) * found.f_frsize)
        return draft.finish()
