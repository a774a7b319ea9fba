"""File descriptors: how many open files the machine has, and how many it can have.

Used in the sidecar. /proc/sys/fs/file-nr comes in. No threads, no state. (The exporter's own descriptors are
with its own process.)

Source: Documentation/admin-guide/sysctl/fs.rst, "file-max & file-nr".
"""

from __future__ import annotations

from pathlib import Path

from exporter.collectors.draft import Draft
from exporter.collectors.family import Collected, FamilySpec
from exporter.collectors.kernel_files import FILE_REASONS, parse_count, read_file, refuse

ALLOCATED = FamilySpec(
    "host_filefd_allocated",
    "gauge",
    "Open files of the whole machine.",
    source="/proc/sys/fs/file-nr, first field",
)
MAXIMUM = FamilySpec(
    "host_filefd_maximum",
    "gauge",
    "Open files that the machine can have. Absent where nothing limits them (2^63 - 1).",
    source="/proc/sys/fs/file-nr, third field",
)
SPECS = (ALLOCATED, MAXIMUM)

UNLIMITED = 2**62
"""From here on a limit is the kernel's word for none."""


class FileDescriptorsCollector:
    """Reads /proc/sys/fs/file-nr.

    Args:
        proc: Where procfs is mounted.
    """

    name = "file_descriptors"
    specs = SPECS
    reasons = FILE_REASONS

    def __init__(self, *, proc: Path = Path("/proc")) -> None:
        self._path = proc / "sys/fs/file-nr"

    def collect(self) -> Collected:
        """Read the source once.

        Raises:
            CollectError: Nothing of it could be read.
        """
        draft = Draft()
        text = read_file(self._path)
        if text is None:
            draft.unsupported(f"no {self._path}")
            return draft.finish()
        words = text.split()
        if len(words) != 3:
            refuse(text, (self._path,), "three numbers")
        with draft.part():
            draft.add(ALLOCATED, parse_count(words[0], self._path))
        with draft.part():
            maximum = parse_count(words[2], self._path)
            if maximum < UNLIMITED:
                draft.add(MAXIMUM, maximum)
        return draft.finish()
