"""Disk: what block devices read and write, and how long that takes. Source: Documentation/admin-guide/iostats.rst.

A device that has others below it (RAID, LVM, multipath) counts the same I/O once more: sum over devices of one level only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil

from exporter.collectors.kernel_files import EVERYTHING, Selection, procfs, source
from exporter.families import Collected, rows

MILLISECONDS_PER_SECOND = 1000

FIELDS = rows("""
host_disk_read_bytes_total{device} [read_bytes]: Bytes read. <- /proc/diskstats sectors read * 512
host_disk_written_bytes_total{device} [write_bytes]: Bytes written. <- /proc/diskstats sectors written * 512
host_disk_reads_completed_total{device} [read_count]: Reads that have ended. <- /proc/diskstats reads
    completed
host_disk_writes_completed_total{device} [write_count]: Writes that have ended. <- /proc/diskstats writes
    completed
host_disk_read_time_seconds_total{device} [read_time]: Time that all reads took together, also those that
    ran side by side. <- /proc/diskstats milliseconds reading
host_disk_write_time_seconds_total{device} [write_time]: Time that all writes took together, also those that
    ran side by side. <- /proc/diskstats milliseconds writing
host_disk_io_time_seconds_total{device} [busy_time]: Time in which at least one I/O was under way; its rate
    is the share of time the device was busy. <- /proc/diskstats milliseconds doing I/Os
""")
"""Family, and psutil's name of it."""
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
                    for spec, field in FIELDS.items():
                        divisor = MILLISECONDS_PER_SECOND if spec.unit == "seconds" else 1
                        collected.add(spec, getattr(counters, field) / divisor, device)
            if not collected:
                collected.unsupported.append(f"{self._path}: no disk, or none that is to be shown")
        return collected

    def _is_partition(self, device: str) -> bool:
        # cciss/c0d0 is a directory cciss!c0d0
        return (self._blocks / device.replace("/", "!") / "partition").exists()
