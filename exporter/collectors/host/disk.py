"""Disk: what block devices read and write, and how long that takes.

Used in the sidecar. psutil reads /proc/diskstats; sysfs tells whether a device is a partition. A device that has others
below it (a partition's disk, RAID, LVM, multipath) counts the same I/O once more than they do: sum over devices of one
level only. Source: Documentation/admin-guide/iostats.rst.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil

from exporter.collectors.kernel_files import EVERYTHING, Selection, procfs, source
from exporter.families import Collected, FamilySpec, family

MILLISECONDS_PER_SECOND = 1000


def _spec(name: str, help_text: str, field: str) -> FamilySpec:
    return family(f"host_disk_{name}_total", help_text, f"/proc/diskstats {field}", "device")


FIELDS: dict[FamilySpec, tuple[str, int]] = {
    _spec("read_bytes", "Bytes read.", "sectors read * 512"): ("read_bytes", 1),
    _spec("written_bytes", "Bytes written.", "sectors written * 512"): ("write_bytes", 1),
    _spec("reads_completed", "Reads that have ended.", "reads completed"): ("read_count", 1),
    _spec("writes_completed", "Writes that have ended.", "writes completed"): ("write_count", 1),
    _spec(
        "read_time_seconds",
        "Time that all reads took together, also those that ran side by side.",
        "milliseconds reading",
    ): ("read_time", MILLISECONDS_PER_SECOND),
    _spec(
        "write_time_seconds",
        "Time that all writes took together, also those that ran side by side.",
        "milliseconds writing",
    ): ("write_time", MILLISECONDS_PER_SECOND),
    _spec(
        "io_time_seconds",
        "Time in which at least one I/O was under way; its rate is the share of time the device was busy.",
        "milliseconds doing I/Os",
    ): ("busy_time", MILLISECONDS_PER_SECOND),
}
"""Family, psutil's name of it, and by what to divide."""
SPECS = tuple(FIELDS)

DEVICE_EXCLUDE = ("loop*", "ram*", "zram*", "fd[0-9]*", "sr[0-9]*")
"""Files and memory that pose as disks, and drives that nobody trains from."""


class DiskCollector:
    """Reads what the disks did."""

    name = "disk"
    specs = SPECS

    def __init__(
        self,
        *,
        sys: Path = Path("/sys"),
        device_include: Sequence[str] = EVERYTHING,
        device_exclude: Sequence[str] = DEVICE_EXCLUDE,
        partitions: bool = False,
    ) -> None:
        self._path = procfs() / "diskstats"
        self._blocks = sys / "class/block"
        self._selection = Selection(device_include, device_exclude)
        self._partitions = partitions

    def collect(self) -> Collected:
        """Read the source once."""
        collected = Collected()
        with source(collected, self._path):
            # nowrap would keep what a removed device has counted for the next one of its name.
            for device, counters in psutil.disk_io_counters(perdisk=True, nowrap=False).items():
                if device in self._selection and (self._partitions or not self._is_partition(device)):
                    for spec, (field, divisor) in FIELDS.items():
                        collected.add(spec, getattr(counters, field) / divisor, device)
            if not collected:
                collected.unsupported.append(f"{self._path}: no disk, or none that is to be shown")
        return collected

    def _is_partition(self, device: str) -> bool:
        # cciss/c0d0 is a directory cciss!c0d0
        return (self._blocks / device.replace("/", "!") / "partition").exists()
