"""Xid errors in the kernel log, which NVML's events may miss.

Runs in the sidecar, without a thread. An Xid that stops the GPU or the driver may never appear in NVML's events.
Records of /dev/kmsg are read without blocking, starting when the log is opened. Reading requires CAP_SYSLOG or
kernel.dmesg_restrict=0; a missing permission is a normal state. Source: "NVRM: Xid (PCI:0000:3b:00): 79, …"; man 4
kmsg.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

_XID = re.compile(
    r"NVRM: Xid \(PCI:(?P<domain>[0-9a-fA-F]{4,8}):(?P<bus>[0-9a-fA-F]{2}):(?P<device>[0-9a-fA-F]{2})[^)]*\):"
    r" (?P<xid>[0-9]{1,6})\b"
)
"""Xid error in a line of the kernel log, with the PCI address of the GPU."""
_RECORD_BYTES = 8192
"""Size of a read. A record of the kernel log is never larger."""

KernelXids = Mapping[str, Mapping[str, tuple[int, float]]]
"""Number of errors and Unix time of the last error, by PCI address in NVML's notation and by Xid."""


class KernelLog:
    """Counter of the Xid errors in the kernel log."""

    def __init__(self, *, path: Path = Path("/dev/kmsg"), clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._descriptor: int | None = None
        self._incomplete_line = ""
        self._counts: dict[str, dict[str, tuple[int, float]]] = {}

    def open(self) -> None:
        """Open the log and seek to the end. Without permission, the log stays closed."""
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError:
            self.close()

    def close(self) -> None:
        """Close the log, and keep the counts."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def read(self) -> KernelXids:
        """Read the new records, and return the Xids since the log was opened."""
        while self._descriptor is not None:
            try:
                record = os.read(self._descriptor, _RECORD_BYTES)
            except BrokenPipeError:
                continue  # records were overwritten before this read
            except BlockingIOError:
                break
            except OSError:
                self.close()
                break
            if not record:
                break
            self._count_xids(record)
        return self._counts

    def _count_xids(self, record: bytes) -> None:
        """Count the Xids in the complete lines of a record. An incomplete last line is kept for the next record."""
        # A record is a line with continuation lines; a plain file is read in chunks.
        text = self._incomplete_line + record.decode("utf-8", "replace")
        *lines, self._incomplete_line = text.split("\n")
        for match in filter(None, map(_XID.search, lines)):
            bus, device, xid = match["bus"].upper(), match["device"].upper(), match["xid"]
            address = f"{int(match['domain'], 16):08X}:{bus}:{device}.0"  # NVML writes 00000000:3B:00.0
            xids = self._counts.setdefault(address, {})
            count, _ = xids.get(xid, (0, 0.0))
            xids[xid] = (count + 1, self._clock())
