"""NFS and Lustre: what goes over each of their mounts, and how long the servers take.

Used in the sidecar. Of NFS, /proc/self/mountstats comes in, which the kernel answers without asking a server, so that a
dead one does not hang it. Of Lustre, the client's own statistics come in, from procfs or (since Lustre 2.12) from
debugfs, which only root may read; they list only what has happened: what is missing there is 0. No threads, no state.

Source: fs/nfs/super.c (nfs_show_stats), net/sunrpc/stats.c, nfsiostat(8); Lustre Operations Manual, "Monitoring Client
Activity" (llite.*.stats).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from exporter.collectors.host.mounts import Mount, printable, read_mounts, unescape
from exporter.collectors.kernel_files import (
    list_directory,
    parse_count,
    procfs,
    read_bytes,
    read_file,
    source,
)
from exporter.errors import CollectError
from exporter.families import Collected, FamilySpec, family

MILLISECONDS_PER_SECOND = 1000
MICROSECONDS_PER_SECOND = 1e6


def _counter(name: str, help_text: str, where: str, *labels: str) -> FamilySpec:
    return family(f"host_{name}_total", help_text, where, "mount", *labels)


NFS_READ = _counter(
    "nfs_read_bytes",
    "Bytes that programs read from the mount, from the page cache too.",
    "/proc/self/mountstats bytes: normal + direct read",
)
NFS_WRITTEN = _counter(
    "nfs_written_bytes",
    "Bytes that programs wrote to the mount.",
    "/proc/self/mountstats bytes: normal + direct write",
)
NFS_OPERATIONS = _counter(
    "nfs_operations",
    "Requests that have ended: read, write and other.",
    "/proc/self/mountstats per-op operations",
    "operation",
)
NFS_TIME = _counter(
    "nfs_operation_time_seconds",
    "Time that all requests took together, from the first queue to the end.",
    "/proc/self/mountstats per-op execute time",
    "operation",
)
NFS_RETRANSMISSIONS = _counter(
    "nfs_retransmissions",
    "Requests sent again because no answer came.",
    "/proc/self/mountstats per-op transmissions - operations",
)
NFS_TIMEOUTS = _counter(
    "nfs_timeouts",
    "Requests that ran into the major timeout: the server was not there.",
    "/proc/self/mountstats per-op major timeouts",
)
NFS_SPECS = (NFS_READ, NFS_WRITTEN, NFS_OPERATIONS, NFS_TIME, NFS_RETRANSMISSIONS, NFS_TIMEOUTS)

LUSTRE_READ = _counter(
    "lustre_read_bytes",
    "Bytes that programs read from the mount.",
    "llite.*.stats read_bytes sum",
)
LUSTRE_WRITTEN = _counter(
    "lustre_written_bytes",
    "Bytes that programs wrote to the mount.",
    "llite.*.stats write_bytes sum",
)
LUSTRE_OPERATIONS = _counter(
    "lustre_operations", "Calls of programs: read, write and other.", "llite.*.stats samples", "operation"
)
LUSTRE_TIME = _counter(
    "lustre_operation_time_seconds",
    "Time that all calls took together. Absent where Lustre does not measure it (before 2.13).",
    "llite.*.stats [usecs] sum",
    "operation",
)
LUSTRE_SPECS = (LUSTRE_READ, LUSTRE_WRITTEN, LUSTRE_OPERATIONS, LUSTRE_TIME)
SPECS = (*NFS_SPECS, *LUSTRE_SPECS)

Samples = dict[FamilySpec, dict[tuple[str, ...], float]]

NFS = ("nfs", "nfs4")
_NFS_OPERATIONS = {"READ": "read", "READ_PLUS": "read", "WRITE": "write"}
"""What moves data; everything else is `other`."""
_LUSTRE_SIZES = {"read_bytes": (LUSTRE_READ, "read"), "write_bytes": (LUSTRE_WRITTEN, "write")}
_LUSTRE_CALLS = ("[regs]", "[reqs]", "[usecs]")
"""Units of lines that count calls; others count pages or the bytes of bulk transfers."""


@dataclass(slots=True)
class _Section:
    """What mountstats says about one NFS mount, still as text."""

    path: str
    size: list[str] = field(default_factory=list)
    operations: dict[str, list[str]] = field(default_factory=dict)


class NfsCollector:
    """Reads the statistics of the NFS mounts."""

    name = "nfs"
    specs = NFS_SPECS

    def __init__(self) -> None:
        self._proc = procfs()
        self._path = self._proc / "self/mountstats"

    def collect(self) -> Collected:
        """Read the source once."""
        collected = Collected()
        with source(collected, self._path):
            sections = {section.path: section for section in _sections(read_bytes(self._path) or b"")}
            if not sections:
                collected.unsupported.append("no NFS is mounted")
                return collected
            samples: Samples = {spec: {} for spec in NFS_SPECS}
            devices = {mount.path: mount.device for mount in read_mounts(self._proc, NFS) or ()}
            seen: set[str] = set()
            for path, section in sections.items():
                # The same filesystem, mounted at several places, has the same statistics at each of them.
                device = devices.get(path, path)
                if device not in seen:
                    seen.add(device)
                    with source(collected, f"{self._path} {printable(path)}"):
                        _add_nfs(samples, section, self._path)
            for spec, values in samples.items():
                collected.add_family(spec, values)
        return collected


def _add_nfs(samples: Samples, section: _Section, path: Path) -> None:
    mount = printable(section.path)
    normal_read, normal_write, direct_read, direct_write = (
        parse_count(word, path, mount) for word in section.size[:4]
    )
    operations = {name: Counter[str]() for name in ("read", "write", "other")}
    for name, words in section.operations.items():
        columns = ("count", "sent", "timeouts", "", "", "", "", "milliseconds")
        counts = {
            column: parse_count(word, path, mount, name) for column, word in zip(columns, words, strict=False)
        }
        operations[_NFS_OPERATIONS.get(name, "other")].update(counts)
    samples[NFS_READ][mount,] = normal_read + direct_read
    samples[NFS_WRITTEN][mount,] = normal_write + direct_write
    for operation, sums in operations.items():
        samples[NFS_OPERATIONS][mount, operation] = sums["count"]
        samples[NFS_TIME][mount, operation] = sums["milliseconds"] / MILLISECONDS_PER_SECOND
    resent = sum(sums["sent"] - sums["count"] for sums in operations.values())
    samples[NFS_RETRANSMISSIONS][mount,] = max(0, resent)
    samples[NFS_TIMEOUTS][mount,] = sum(sums["timeouts"] for sums in operations.values())


def _sections(content: bytes) -> Iterator[_Section]:
    section: _Section | None = None
    operations = False
    for line in content.split(b"\n"):
        if line.startswith((b"device ", b"no device ")):
            if section is not None:
                yield section
            section, operations = _begin(line.split(b" ")), False
        elif section is not None:
            words = line.decode("utf-8", "replace").split()
            if words == ["per-op", "statistics"]:
                operations = True
            elif operations and len(words) > 8:
                section.operations[words[0].removesuffix(":")] = words[1:]
            elif words[:1] == ["bytes:"]:
                section.size = words[1:]
    if section is not None:
        yield section


def _begin(words: Sequence[bytes]) -> _Section | None:
    # device SOURCE mounted on PATH with fstype nfs4 statvers=1.1; the kernel escapes blanks within names
    if len(words) < 9 or words[7].decode("ascii", "replace") not in NFS:
        return None
    return _Section(unescape(words[4]))


class LustreCollector:
    """Reads the statistics of the Lustre mounts.

    Args:
        sys: Where sysfs, and in it debugfs, is mounted.
    """

    name = "lustre"
    specs = LUSTRE_SPECS

    def __init__(self, *, sys: Path = Path("/sys")) -> None:
        self._proc = procfs()
        self._directories = (self._proc / "fs/lustre/llite", sys / "kernel/debug/lustre/llite")

    def collect(self) -> Collected:
        """Read the sources once."""
        collected = Collected()
        with source(collected, "Lustre"):
            mounts = read_mounts(self._proc, ("lustre",))
            if not mounts:
                # Without this question everybody but root would be told that debugfs is closed to them.
                collected.unsupported.append("no Lustre is mounted")
                return collected
            samples: Samples = {spec: {} for spec in LUSTRE_SPECS}
            clients = {name: each / name for each in self._directories for name in list_directory(each)}
            labels = _labels(list(clients), mounts)
            found = False
            for name, client in clients.items():
                with source(collected, client / "stats"):
                    text = read_file(client / "stats")
                    if text is not None:
                        found = True
                        _add_lustre(samples, text, client / "stats", labels[name])
            for spec, values in samples.items():
                collected.add_family(spec, values)
            if not found:
                places = " or ".join(str(path) for path in self._directories)
                collected.unsupported.append(f"no statistics in {places}")
        return collected


def _add_lustre(samples: Samples, text: str, path: Path, mount: str) -> None:
    sizes = dict.fromkeys((LUSTRE_READ, LUSTRE_WRITTEN), 0)
    calls = dict.fromkeys(("read", "write", "other"), 0)
    microseconds: dict[str, int] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) < 4 or words[2] != "samples":
            continue  # snapshot_time, start_time
        name, unit = words[0], words[3]
        if name in _LUSTRE_SIZES:
            if len(words) < 7:
                message = (
                    f"{path} {name}: expected a count with its smallest, largest and sum, found {line!r}"
                )
                raise CollectError(message, reason="malformed")
            spec, operation = _LUSTRE_SIZES[name]
            sizes[spec] = parse_count(words[6], path, name)
            calls[operation] = parse_count(words[1], path, name)
        elif unit in _LUSTRE_CALLS:
            operation = name if name in {"read", "write"} else "other"
            if operation == "other":  # read and write are counted by their bytes' lines
                calls[operation] += parse_count(words[1], path, name)
            if unit == "[usecs]" and len(words) >= 7:
                microseconds[operation] = microseconds.get(operation, 0) + parse_count(words[6], path, name)
    for spec, size in sizes.items():
        samples[spec][mount,] = size
    for operation, count in calls.items():
        samples[LUSTRE_OPERATIONS][mount, operation] = count
    for operation, spent in microseconds.items():
        samples[LUSTRE_TIME][mount, operation] = spent / MICROSECONDS_PER_SECOND


def _labels(clients: list[str], mounts: list[Mount]) -> dict[str, str]:
    """Give each client the mount point of its filesystem, or its own name where that is ambiguous."""
    places: dict[str, str] = {}
    for mount in mounts:  # 10.0.0.1@o2ib:/scratch/project is a part of the filesystem `scratch`
        places.setdefault(mount.source.rpartition(":/")[2].partition("/")[0], mount.label)
    filesystems = {client: client.rpartition("-")[0] for client in clients}
    uses = Counter(filesystems.values())
    return {
        client: places.get(filesystem, client) if uses[filesystem] == 1 else client
        for client, filesystem in filesystems.items()
    }
