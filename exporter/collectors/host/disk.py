"""Reads, writes and busy time of block devices. Source: Documentation/admin-guide/iostats.rst.

A device on top of others (RAID, LVM, multipath) repeats the I/O of the underlying devices: sum only over devices of
one level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from exporter.collectors.kernel_files import EVERYTHING, Selection, from_psutil, procfs, source
from exporter.collectors.options import CollectorOptions, Patterns
from exporter.config.options import option
from exporter.families import Collected, FamilySpec

MILLISECONDS_PER_SECOND = 1000

READ_BYTES = FamilySpec(
    name="host_disk_read_bytes_total",
    type="counter",
    unit="bytes",
    labels=("device",),
    help="Bytes read.",
    source="/proc/diskstats sectors read * 512",
)
WRITTEN_BYTES = FamilySpec(
    name="host_disk_written_bytes_total",
    type="counter",
    unit="bytes",
    labels=("device",),
    help="Bytes written.",
    source="/proc/diskstats sectors written * 512",
)
READS = FamilySpec(
    name="host_disk_reads_completed_total",
    type="counter",
    labels=("device",),
    help="Completed reads.",
    source="/proc/diskstats reads completed",
)
WRITES = FamilySpec(
    name="host_disk_writes_completed_total",
    type="counter",
    labels=("device",),
    help="Completed writes.",
    source="/proc/diskstats writes completed",
)
READ_TIME = FamilySpec(
    name="host_disk_read_time_seconds_total",
    type="counter",
    unit="seconds",
    labels=("device",),
    help="Sum of the durations of all reads; concurrent reads are counted separately.",
    source="/proc/diskstats milliseconds reading",
)
WRITE_TIME = FamilySpec(
    name="host_disk_write_time_seconds_total",
    type="counter",
    unit="seconds",
    labels=("device",),
    help="Sum of the durations of all writes; concurrent writes are counted separately.",
    source="/proc/diskstats milliseconds writing",
)
IO_TIME = FamilySpec(
    name="host_disk_io_time_seconds_total",
    type="counter",
    unit="seconds",
    labels=("device",),
    help="Time with at least one I/O in progress; its rate is the utilization of the device.",
    source="/proc/diskstats milliseconds doing I/Os",
)
SPECS = (READ_BYTES, WRITTEN_BYTES, READS, WRITES, READ_TIME, WRITE_TIME, IO_TIME)

DEVICE_EXCLUDE = ("loop*", "ram*", "zram*", "fd[0-9]*", "sr[0-9]*")
"""Devices backed by a file or by memory, and removable drives."""


@dataclass(frozen=True, slots=True)
class DiskOptions(CollectorOptions):
    """Options of the disk collector."""

    partitions: bool = option(False, "Also show partitions, whose I/O is included in the disk's.")
    device_include: Patterns = option(EVERYTHING, "Patterns of devices to show.")
    device_exclude: Patterns = option(DEVICE_EXCLUDE, "Patterns of devices to exclude.")


class DiskCollector:
    """Collector of block device counters."""

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
        self._block_directory = sys / "class/block"
        self._selection = Selection(device_include, device_exclude)
        self._partitions = partitions

    def collect(self) -> Collected:
        """Read the counters of the selected devices."""
        collected = Collected()
        with source(collected, self._path):
            # With nowrap=True, psutil adds the counts of a removed device to the next device of the same name.
            devices = from_psutil(self._path, lambda: psutil.disk_io_counters(perdisk=True, nowrap=False))
            for device, counters in devices.items():
                if device in self._selection and (self._partitions or not self._is_partition(device)):
                    collected.add(READ_BYTES, counters.read_bytes, device)
                    collected.add(WRITTEN_BYTES, counters.write_bytes, device)
                    collected.add(READS, counters.read_count, device)
                    collected.add(WRITES, counters.write_count, device)
                    collected.add(READ_TIME, counters.read_time / MILLISECONDS_PER_SECOND, device)
                    collected.add(WRITE_TIME, counters.write_time / MILLISECONDS_PER_SECOND, device)
                    collected.add(IO_TIME, counters.busy_time / MILLISECONDS_PER_SECOND, device)
            if not collected:
                collected.unsupported.append(f"{self._path}: no disk, or none selected")
        return collected

    def _is_partition(self, device: str) -> bool:
        # A name such as cciss/c0d0 has the directory cciss!c0d0.
        return (self._block_directory / device.replace("/", "!") / "partition").exists()
