"""Traffic of Lustre mounts.

Since Lustre 2.12 the statistics are in debugfs, which only root can read.
Source: Lustre Operations Manual, "llite.*.stats".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from exporter.collectors.kernel_files import (
    list_directory,
    parse,
    parse_file,
    procfs,
    read_optional,
    source,
)
from exporter.collectors.mounts import Mount, parse_mounts
from exporter.families import Collected, FamilySpec

MICROSECONDS_PER_SECOND = 1e6

_ABSENT = "without Lustre mounts, or from Lustre 2.12 on where the exporter does not run as root"

READ_BYTES = FamilySpec(
    name="host_lustre_read_bytes_total",
    type="counter",
    unit="bytes",
    labels=("mount",),
    help="Bytes that processes read from the mount.",
    absent=_ABSENT,
    source="llite.*.stats read_bytes sum",
)
WRITTEN_BYTES = FamilySpec(
    name="host_lustre_written_bytes_total",
    type="counter",
    unit="bytes",
    labels=("mount",),
    help="Bytes that processes wrote to the mount.",
    absent=_ABSENT,
    source="llite.*.stats write_bytes sum",
)
OPERATIONS = FamilySpec(
    name="host_lustre_operations_total",
    type="counter",
    labels=("mount", "operation"),
    help="File operations of processes by operation: read, write, other.",
    absent=_ABSENT,
    source="llite.*.stats samples",
)
OPERATION_TIME = FamilySpec(
    name="host_lustre_operation_time_seconds_total",
    type="counter",
    unit="seconds",
    labels=("mount", "operation"),
    help="Sum of the durations of all operations, by operation.",
    absent=f"{_ABSENT}, and before Lustre 2.13",
    source="llite.*.stats [usecs] sum",
)
SPECS = (READ_BYTES, WRITTEN_BYTES, OPERATIONS, OPERATION_TIME)

_COUNTED_UNITS = frozenset({"[regs]", "[reqs]", "[usecs]"})
"""Units of lines that count operations. Lines with other units count pages, or bytes of bulk transfers."""


@dataclass(slots=True)
class LustreCounts:
    """Counters of a Lustre client by operation: read, write, other."""

    bytes: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    microseconds: dict[str, int] = field(default_factory=dict)


class LustreCollector:
    """Collector of the statistics of Lustre mounts."""

    name = "lustre"
    specs = SPECS

    def __init__(self, *, sys: Path = Path("/sys")) -> None:
        self._mountinfo = procfs() / "self/mountinfo"
        self._directories = (procfs() / "fs/lustre/llite", sys / "kernel/debug/lustre/llite")

    def collect(self) -> Collected:
        """Read the statistics of the Lustre clients."""
        collected = Collected()
        with source(collected, "Lustre"):
            mountinfo = read_optional(self._mountinfo) or ""
            mounts = parse(self._mountinfo, lambda text: parse_mounts(text, ("lustre",)), mountinfo)
            if not mounts:
                # Without this check, debugfs would cause a permission error for every user except root.
                collected.unsupported.append("no Lustre is mounted")
                return collected
            clients = {
                name: directory / name
                for directory in self._directories
                for name in list_directory(directory)
            }
            labels = _labels(list(clients), mounts)
            for name, client in clients.items():
                with source(collected, client / "stats"):
                    _add_counts(collected, parse_file(client / "stats", _parse_stats), labels[name])
            if not clients:
                directories = " or ".join(str(path) for path in self._directories)
                collected.unsupported.append(f"no statistics in {directories}")
        return collected


def _parse_stats(text: str) -> LustreCounts:
    """Parse lines such as `read_bytes 4 samples [bytes] 1 9 20`, whose numbers are minimum, maximum and sum."""
    counts = LustreCounts()
    for line in text.splitlines():
        # An operation without minimum, maximum and sum, and a line with a time, have fewer fields.
        name, count, samples, unit, _minimum, _maximum, total, *_ = [*line.split(), *[""] * 7]
        if samples != "samples":
            continue  # snapshot_time, start_time
        if name in {"read_bytes", "write_bytes"}:
            operation = name.removesuffix("_bytes")
            counts.operations[operation] += int(count)
            counts.bytes[operation] += int(total)
        elif unit in _COUNTED_UNITS:
            operation = name if name in {"read", "write"} else "other"
            if operation == "other":  # the lines read_bytes and write_bytes count reads and writes
                counts.operations[operation] += int(count)
            if unit == "[usecs]" and total:
                counts.microseconds[operation] = counts.microseconds.get(operation, 0) + int(total)
    return counts


def _add_counts(collected: Collected, counts: LustreCounts, mount: str) -> None:
    collected.add(READ_BYTES, counts.bytes["read"], mount)
    collected.add(WRITTEN_BYTES, counts.bytes["write"], mount)
    for operation in ("read", "write", "other"):
        collected.add(OPERATIONS, counts.operations[operation], mount, operation)
    for operation, microseconds in counts.microseconds.items():
        collected.add(OPERATION_TIME, microseconds / MICROSECONDS_PER_SECOND, mount, operation)


def _labels(clients: Sequence[str], mounts: Sequence[Mount]) -> dict[str, str]:
    """Return the label of each client: the mount point of its filesystem.

    The label is the name of the client if no mount has the name of the filesystem, or if several clients have it.
    """
    mount_points: dict[str, str] = {}  # by name of the filesystem
    for mount in mounts:  # 10.0.0.1@o2ib:/scratch/project is a part of the filesystem `scratch`
        _, _, directory = mount.source.rpartition(":/")
        filesystem, _, _ = directory.partition("/")
        mount_points.setdefault(filesystem, mount.label)
    filesystems = {client: client.rpartition("-")[0] for client in clients}  # scratch-ffff8c01a5b3d000
    client_counts = Counter(filesystems.values())
    return {
        client: mount_points.get(filesystem, client) if client_counts[filesystem] == 1 else client
        for client, filesystem in filesystems.items()
    }
