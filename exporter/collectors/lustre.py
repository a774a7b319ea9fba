"""Lustre: what goes over each mounted Lustre filesystem.

Used in the sidecar. The client's own statistics come in, from procfs or (since Lustre 2.12) from debugfs, which
only root may read. No threads, no state.

Source: Lustre Operations Manual, "Monitoring Client Activity" (llite.*.stats). The statistics list only what
has happened: what is missing there is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from exporter.collectors.draft import Draft
from exporter.collectors.family import Collected, FamilySpec
from exporter.collectors.kernel_files import (
    FILE_REASONS,
    NOT_OFFERED,
    failure,
    parse_count,
    read_file,
    refuse,
)
from exporter.collectors.mounts import Mount, read_mounts

MICROSECONDS_PER_SECOND = 1e6


def _spec(name: str, help_text: str, source: str, *labels: str, unit: str = "") -> FamilySpec:
    return FamilySpec(
        f"host_lustre_{name}_total",
        "counter",
        help_text,
        ("mount", *labels),
        unit,
        f"llite.*.stats {source}",
    )


READ_BYTES = _spec("read_bytes", "Bytes that programs read from the mount.", "read_bytes sum", unit="bytes")
WRITTEN_BYTES = _spec(
    "written_bytes", "Bytes that programs wrote to the mount.", "write_bytes sum", unit="bytes"
)
OPERATIONS = _spec(
    "operations",
    "Calls of programs: read, write and other, or each kind by itself with per_operation.",
    "samples",
    "operation",
)
TIME = _spec(
    "operation_time_seconds",
    "Time that all calls took together. Absent where Lustre does not measure it (before 2.13).",
    "[usecs] sum",
    "operation",
    unit="seconds",
)
SPECS = (READ_BYTES, WRITTEN_BYTES, OPERATIONS, TIME)

KINDS = {"read": "read", "write": "write"}
_SIZES = {"read_bytes": (READ_BYTES, "read"), "write_bytes": (WRITTEN_BYTES, "write")}
_CALLS = ("[regs]", "[reqs]", "[usecs]")
"""Units of lines that count calls; others count pages or the bytes of bulk transfers."""


class LustreCollector:
    """Reads the statistics of the Lustre mounts.

    Args:
        proc: Where procfs is mounted.
        sys: Where sysfs, and in it debugfs, is mounted.
        per_operation: One series per kind of call that has occurred instead of read, write and other.
    """

    name = "lustre"
    specs = SPECS
    reasons = FILE_REASONS

    def __init__(
        self, *, proc: Path = Path("/proc"), sys: Path = Path("/sys"), per_operation: bool = False
    ) -> None:
        self._proc = proc
        self._directories = (proc / "fs/lustre/llite", sys / "kernel/debug/lustre/llite")
        self._per_operation = per_operation

    def collect(self) -> Collected:
        """Read the sources once.

        Raises:
            CollectError: Nothing of them could be read.
        """
        draft = Draft()
        mounts = read_mounts(self._proc, ("lustre",))
        if not mounts:
            # Without this question everybody but root would be told that debugfs is closed to them.
            draft.unsupported("no Lustre is mounted")
            return draft.finish()
        samples: dict[FamilySpec, dict[tuple[str, ...], float]] = {spec: {} for spec in SPECS}
        clients = {client.name: client for directory in self._directories for client in _entries(directory)}
        labels = _labels(list(clients), mounts)
        found = False
        for name, client in clients.items():
            with draft.part():
                text = read_file(client / "stats")
                if text is not None:
                    found = True
                    self._add_client(samples, text, client / "stats", labels[name])
        for spec, values in samples.items():
            draft.add_family(spec, values)
        if not found and not draft.failed:
            draft.unsupported(f"no statistics in {' or '.join(str(path) for path in self._directories)}")
        return draft.finish()

    def _add_client(
        self, samples: Mapping[FamilySpec, dict[tuple[str, ...], float]], text: str, path: Path, mount: str
    ) -> None:
        sizes = dict.fromkeys((READ_BYTES, WRITTEN_BYTES), 0)
        calls = {} if self._per_operation else dict.fromkeys(("read", "write", "other"), 0)
        times: dict[str, int] = {}
        for line in text.splitlines():
            words = line.split()
            if len(words) < 4 or words[2] != "samples":
                continue  # snapshot_time, start_time
            name, unit = words[0], words[3]
            if name in _SIZES:
                spec, kind = _SIZES[name]
                if len(words) < 7:
                    refuse(line, (path,), "a count with its smallest, largest and sum")
                sizes[spec] = parse_count(words[6], path, name)
                calls[kind] = parse_count(words[1], path, name)
            elif unit in _CALLS:
                kind = name if self._per_operation else KINDS.get(name, "other")
                if name not in KINDS:  # read and write are counted by their bytes' lines
                    calls[kind] = calls.get(kind, 0) + parse_count(words[1], path, name)
                if unit == "[usecs]" and len(words) >= 7:
                    times[kind] = times.get(kind, 0) + parse_count(words[6], path, name)
        for spec, size in sizes.items():
            samples[spec][mount,] = size
        for kind, count in calls.items():
            samples[OPERATIONS][mount, kind] = count
        for kind, microseconds in times.items():
            samples[TIME][mount, kind] = microseconds / MICROSECONDS_PER_SECOND


def _labels(clients: list[str], mounts: list[Mount]) -> dict[str, str]:
    """Give each client the mount point of its filesystem, or its own name where that is ambiguous."""
    places: dict[str, str] = {}
    for mount in mounts:  # 10.0.0.1@o2ib:/scratch/project is a part of the filesystem `scratch`
        places.setdefault(mount.source.rpartition(":/")[2].partition("/")[0], mount.label)
    filesystems = {client: client.rpartition("-")[0] for client in clients}
    return {
        client: places.get(filesystem, client)
        if list(filesystems.values()).count(filesystem) == 1
        else client
        for client, filesystem in filesystems.items()
    }


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError as error:
        if error.errno in NOT_OFFERED:
            return []
        raise failure(directory, error) from error
