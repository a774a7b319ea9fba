"""Disk: what block devices read and write, and how long that takes.

Used in the sidecar. /proc/diskstats comes in, and from sysfs whether a device is a partition, once per device.
No threads. It holds what it knows about the devices of the last pass.

A device that has others below it (a partition's disk, RAID, LVM, multipath) counts the same I/O once more than
they do: sum over devices of one level only.

Source: Documentation/admin-guide/iostats.rst; times are 32-bit milliseconds there and start again after 49.7
days of them, which a rate takes as the reset of a counter and thereby loses one interval at most.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from exporter.collectors.draft import Draft
from exporter.collectors.family import Collected, FamilySpec, FamilyType
from exporter.collectors.kernel_files import FILE_REASONS, parse_count, read_file, refuse
from exporter.collectors.selection import EVERYTHING, Selection

MILLISECONDS_PER_SECOND = 1000
SECTOR_BYTES = 512
"""The unit of /proc/diskstats, whatever the device's own sectors are."""


def _spec(name: str, help_text: str, field: str, *, unit: str = "") -> FamilySpec:
    kind: FamilyType = "counter" if name.endswith("_total") else "gauge"
    return FamilySpec(f"host_disk_{name}", kind, help_text, ("device",), unit, f"/proc/diskstats {field}")


READS = _spec("reads_completed_total", "Reads that have ended.", "reads completed")
READ_BYTES = _spec("read_bytes_total", "Bytes read.", "sectors read * 512", unit="bytes")
READ_TIME = _spec(
    "read_time_seconds_total",
    "Time that all reads took together, also those that ran side by side.",
    "milliseconds reading",
    unit="seconds",
)
WRITES = _spec("writes_completed_total", "Writes that have ended.", "writes completed")
WRITTEN_BYTES = _spec("written_bytes_total", "Bytes written.", "sectors written * 512", unit="bytes")
WRITE_TIME = _spec(
    "write_time_seconds_total",
    "Time that all writes took together, also those that ran side by side.",
    "milliseconds writing",
    unit="seconds",
)
NOW = _spec(
    "io_now",
    "I/O under way at the moment. Absent where an old kernel has counted below zero.",
    "I/Os currently in progress",
)
TIME = _spec(
    "io_time_seconds_total",
    "Time in which at least one I/O was under way; its rate is the share of time the device was busy.",
    "milliseconds doing I/Os",
    unit="seconds",
)
WEIGHTED = _spec(
    "io_time_weighted_seconds_total",
    "Time that all I/O took together; its rate is the mean length of the queue.",
    "weighted milliseconds doing I/Os",
    unit="seconds",
)
SPECS = (READ_BYTES, WRITTEN_BYTES, READS, WRITES, READ_TIME, WRITE_TIME, TIME, WEIGHTED, NOW)

FIELDS: tuple[tuple[FamilySpec, int, int, int], ...] = (
    (READS, 0, 1, 1),
    (READ_BYTES, 2, SECTOR_BYTES, 1),
    (READ_TIME, 3, 1, MILLISECONDS_PER_SECOND),
    (WRITES, 4, 1, 1),
    (WRITTEN_BYTES, 6, SECTOR_BYTES, 1),
    (WRITE_TIME, 7, 1, MILLISECONDS_PER_SECOND),
    (TIME, 9, 1, MILLISECONDS_PER_SECOND),
    (WEIGHTED, 10, 1, MILLISECONDS_PER_SECOND),
)
"""Family, its field behind the device's name, and by what to multiply and divide it."""

_NOW_FIELD = 8
_FIELDS_AT_LEAST = 11  # kernels since 4.18 and 5.5 add discards and flushes
_BELOW_ZERO = 2**31  # printed as if it could not be negative

DEVICE_EXCLUDE = ("loop*", "ram*", "zram*", "fd[0-9]*", "sr[0-9]*")
"""Files and memory that pose as disks, and drives that nobody trains from."""

_PARTITION = re.compile(r"(?:[hsv]|xv)d[a-z]+[0-9]+|(?:nvme[0-9]+n|mmcblk|nbd|md)[0-9]+p[0-9]+", re.ASCII)
"""Names of partitions, for machines without sysfs."""


class DiskCollector:
    """Reads /proc/diskstats.

    Args:
        proc: Where procfs is mounted.
        sys: Where sysfs is mounted.
        device_include: Patterns of the devices to show.
        device_exclude: Patterns of those to leave out.
        partitions: Also partitions, whose I/O their disk counts as well.
    """

    name = "disk"
    specs = SPECS
    reasons = FILE_REASONS

    def __init__(
        self,
        *,
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
        device_include: Sequence[str] = EVERYTHING,
        device_exclude: Sequence[str] = DEVICE_EXCLUDE,
        partitions: bool = False,
    ) -> None:
        self._path = proc / "diskstats"
        self._blocks = sys / "class/block"
        self._selection = Selection(device_include, device_exclude)
        self._partitions = partitions
        self._shown: dict[str, bool] = {}  # by number and name, of the devices of the last pass

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
        samples: dict[FamilySpec, dict[tuple[str, ...], float]] = {spec: {} for spec in SPECS}
        shown: dict[str, bool] = {}
        for line in text.splitlines():
            words = line.split()
            with draft.part():
                if len(words) < 3 + _FIELDS_AT_LEAST:
                    refuse(line, (self._path,), "a device and eleven numbers")
                device = words[2]
                identity = " ".join(words[:3])
                known = self._shown.get(identity)
                shown[identity] = self._is_wanted(device) if known is None else known
                if shown[identity]:
                    self._add_device(samples, device, words[3:])
        self._shown = shown
        for spec, values in samples.items():
            draft.add_family(spec, values)
        if not samples[READS] and not draft.failed:
            draft.unsupported(f"{self._path}: no disk, or none that is to be shown")
        return draft.finish()

    def _add_device(
        self, samples: dict[FamilySpec, dict[tuple[str, ...], float]], device: str, words: Sequence[str]
    ) -> None:
        counts = [parse_count(word, self._path, device) for word in words[:_FIELDS_AT_LEAST]]
        for spec, field, factor, divisor in FIELDS:
            value = counts[field] * factor
            samples[spec][device,] = value / divisor if divisor != 1 else value
        if counts[_NOW_FIELD] < _BELOW_ZERO:
            samples[NOW][device,] = counts[_NOW_FIELD]

    def _is_wanted(self, device: str) -> bool:
        return device in self._selection and (self._partitions or not self._is_partition(device))

    def _is_partition(self, device: str) -> bool:
        entry = self._blocks / device.replace("/", "!")  # cciss/c0d0 is a directory cciss!c0d0
        try:
            if entry.exists():
                return (entry / "partition").exists()
        except (OSError, ValueError):  # a name that is no path, from a damaged file
            pass
        return _PARTITION.fullmatch(device) is not None
