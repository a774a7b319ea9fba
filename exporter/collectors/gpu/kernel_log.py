"""Xid errors in the kernel's log: what the driver says when NVML cannot.

Used in the sidecar by the GPU collector; no threads. /dev/kmsg is read without waiting, from the moment it was opened;
counts by PCI address and Xid come out. Where it may not be read (it takes CAP_SYSLOG, or
kernel.dmesg_restrict=0 and the file's permission), there is no fallback, which is a normal state.

An Xid that takes the GPU or the driver down may never reach the event set, whose process hangs or has lost the card;
the log has it. Source: "NVRM: Xid (PCI:0000:3b:00): 79, …" of NVIDIA's driver; man 4 kmsg.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from exporter.collectors.gpu.publishing import KernelXids, XidCount

_XID = re.compile(
    r"NVRM: Xid \(PCI:([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})[^)]*\): ([0-9]{1,6})\b"
)
_RECORD_BYTES = 8192
_MOST_RECORDS = 4096
"""In one pass; the rest waits for the next."""

_MOST_COUNTED = 1024


class KernelLog:
    """Counts Xids.

    Args:
        path: The log.
        clock: Unix seconds.
    """

    def __init__(self, *, path: Path = Path("/dev/kmsg"), clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._descriptor: int | None = None
        self._rest = ""
        self._counts: dict[str, dict[str, XidCount]] = {}

    @property
    def readable(self) -> bool:
        """Whether the log is being read."""
        return self._descriptor is not None

    def open(self) -> None:
        """Begin with what comes from now on."""
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError:
            self.close()

    @property
    def counts(self) -> KernelXids:
        """What was counted up to the last `read`."""
        return self._counts

    def restore(self, counts: KernelXids) -> None:
        """Go on from counts that were kept; to be called before `open`."""
        self._counts = {address: dict(xids) for address, xids in counts.items()}

    def close(self) -> None:
        """Stop reading; the counts stay."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def read(self) -> dict[str, dict[str, XidCount]]:
        """Take what is new, and give the counts so far."""
        if self._descriptor is not None:
            for _ in range(_MOST_RECORDS):
                try:
                    record = os.read(self._descriptor, _RECORD_BYTES)
                except BlockingIOError:
                    break
                except BrokenPipeError:
                    continue  # records were overwritten before we read them
                except OSError:
                    self.close()
                    break
                if not record:
                    break
                self._take(record)
        return self._counts

    def _take(self, record: bytes) -> None:
        # One record is one line with its continuation; where the log is a plain file, lines come in pieces.
        *lines, self._rest = (self._rest + record.decode("utf-8", "replace")).split("\n")
        self._rest = self._rest[-_RECORD_BYTES:]
        for line in lines:
            found = _XID.search(line)
            if found is not None:
                domain, bus, device, xid = found.groups()
                # NVML writes 00000000:3B:00.0.
                self._count(f"{int(domain, 16):08X}:{bus.upper()}:{device.upper()}.0", xid)

    def _count(self, address: str, xid: str) -> None:
        xids = self._counts.setdefault(address, {})
        if xid in xids or sum(map(len, self._counts.values())) < _MOST_COUNTED:
            before = xids.get(xid, XidCount(0, 0.0))
            xids[xid] = XidCount(before.count + 1, self._clock())
