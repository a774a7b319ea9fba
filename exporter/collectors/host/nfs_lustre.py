"""NFS and Lustre: what goes over each of their mounts, and how long the servers take.

The kernel answers /proc/self/mountstats without asking a server, so that a dead one does not hang it. Since Lustre 2.12 its
statistics are in debugfs, which only root may read. Source: nfsiostat(8); Lustre Operations Manual, "llite.*.stats".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from exporter.collectors.kernel_files import (
    Mount,
    list_directory,
    parse_mounts,
    printable,
    procfs,
    read_file,
    read_optional,
    source,
    unescape,
)
from exporter.families import Collected, table

MILLISECONDS_PER_SECOND = 1000
MICROSECONDS_PER_SECOND = 1e6


(NFS_READ, NFS_WRITTEN, NFS_OPERATIONS, NFS_TIME, NFS_RETRANSMISSIONS) = NFS_SPECS = table("""
host_nfs_read_bytes_total{mount}: Bytes that programs read from the mount, from the page cache too. <-
    /proc/self/mountstats bytes: normal + direct read
host_nfs_written_bytes_total{mount}: Bytes that programs wrote to the mount. <- /proc/self/mountstats bytes:
    normal + direct write
host_nfs_operations_total{mount,operation}: Requests that have ended: read, write and other. <-
    /proc/self/mountstats per-op operations
host_nfs_operation_time_seconds_total{mount,operation}: Time that all requests took together, from the first
    queue to the end. <- /proc/self/mountstats per-op execute time
host_nfs_retransmissions_total{mount}: Requests sent again because no answer came. <- /proc/self/mountstats
    per-op transmissions - operations
""")
(LUSTRE_READ, LUSTRE_WRITTEN, LUSTRE_OPERATIONS, LUSTRE_TIME) = LUSTRE_SPECS = table("""
host_lustre_read_bytes_total{mount}: Bytes that programs read from the mount. <- llite.*.stats read_bytes
    sum
host_lustre_written_bytes_total{mount}: Bytes that programs wrote to the mount. <- llite.*.stats write_bytes
    sum
host_lustre_operations_total{mount,operation}: Calls of programs: read, write and other. <- llite.*.stats
    samples
host_lustre_operation_time_seconds_total{mount,operation}: Time that all calls took together. Absent where
    Lustre does not measure it (before 2.13). <- llite.*.stats [usecs] sum
""")
SPECS = (*NFS_SPECS, *LUSTRE_SPECS)

_NFS_OPERATIONS = {"READ": "read", "READ_PLUS": "read", "WRITE": "write"}
"""What moves data; everything else is `other`."""
_NFS_MOUNT = re.compile(r"\S+ mounted on (\S+) with fstype nfs4? ")


class NfsCollector:
    """Reads the statistics of the NFS mounts."""

    name = "nfs"
    specs = NFS_SPECS

    def __init__(self) -> None:
        self._proc = procfs()

    def collect(self) -> Collected:
        """Read the source once."""
        collected = Collected()
        path = self._proc / "self/mountstats"
        with source(collected, path):
            text = read_optional(path) or ""
            sections = {
                unescape(mount[1]): section
                for section in re.split(r"^(?:no )?device ", text, flags=re.MULTILINE)
                if (mount := _NFS_MOUNT.match(section))
            }
            if not sections:
                collected.unsupported.append("no NFS is mounted")
                return collected
            mountinfo = read_optional(self._proc / "self/mountinfo") or ""
            devices = {mount.path: mount.device for mount in parse_mounts(mountinfo, ("nfs", "nfs4"))}
            seen: set[str] = set()
            for place, section in sections.items():
                # The same filesystem, mounted at several places, has the same statistics at each of them.
                device = devices.get(place, place)
                if device not in seen:
                    seen.add(device)
                    with source(collected, f"{path} {printable(place)}"):
                        _add_nfs(collected, section, printable(place))
        return collected


def _add_nfs(collected: Collected, section: str, mount: str) -> None:
    general, _, operations = section.partition("per-op statistics")
    octets = next(line for line in general.splitlines() if line.strip().startswith("bytes:"))
    normal_read, normal_write, direct_read, direct_write = map(int, octets.split()[1:5])
    sums = {name: Counter[str]() for name in ("read", "write", "other")}
    for line in operations.splitlines():
        name, *words = line.split() or [""]
        if len(words) >= 8:
            count, sent, *_, milliseconds = map(int, words[:8])
            sums[_NFS_OPERATIONS.get(name.removesuffix(":"), "other")].update(
                count=count, resent=sent - count, milliseconds=milliseconds
            )
    collected.add(NFS_READ, normal_read + direct_read, mount)
    collected.add(NFS_WRITTEN, normal_write + direct_write, mount)
    for operation, each in sums.items():
        collected.add(NFS_OPERATIONS, each["count"], mount, operation)
        collected.add(NFS_TIME, each["milliseconds"] / MILLISECONDS_PER_SECOND, mount, operation)
    collected.add(NFS_RETRANSMISSIONS, max(0, sum(each["resent"] for each in sums.values())), mount)


class LustreCollector:
    """Reads the statistics of the Lustre mounts."""

    name = "lustre"
    specs = LUSTRE_SPECS

    def __init__(self, *, sys: Path = Path("/sys")) -> None:
        self._mountinfo = procfs() / "self/mountinfo"
        self._directories = (procfs() / "fs/lustre/llite", sys / "kernel/debug/lustre/llite")

    def collect(self) -> Collected:
        """Read the sources once."""
        collected = Collected()
        with source(collected, "Lustre"):
            mounts = parse_mounts(read_optional(self._mountinfo) or "", ("lustre",))
            if not mounts:
                # Without this question everybody but root would be told that debugfs is closed to them.
                collected.unsupported.append("no Lustre is mounted")
                return collected
            clients = {name: each / name for each in self._directories for name in list_directory(each)}
            labels = _labels(list(clients), mounts)
            for name, client in clients.items():
                with source(collected, client / "stats"):
                    _add_lustre(collected, read_file(client / "stats"), labels[name])
            if not clients:
                places = " or ".join(str(path) for path in self._directories)
                collected.unsupported.append(f"no statistics in {places}")
        return collected


def _add_lustre(collected: Collected, text: str, mount: str) -> None:
    octets = Counter[str]()
    calls = Counter[str]()
    microseconds: dict[str, int] = {}
    for line in text.splitlines():
        name, count, what, unit, *numbers = [*line.split(), "", "", "", ""]
        if what != "samples":
            continue  # snapshot_time, start_time
        if name in {"read_bytes", "write_bytes"}:
            operation = name.removesuffix("_bytes")
            calls[operation] += int(count)
            octets[operation] += int(numbers[2])
        elif unit in {"[regs]", "[reqs]", "[usecs]"}:  # others count pages or the bytes of bulk transfers
            operation = name if name in {"read", "write"} else "other"
            if operation == "other":  # read and write are counted by their bytes' lines
                calls[operation] += int(count)
            if unit == "[usecs]" and numbers[2]:
                microseconds[operation] = microseconds.get(operation, 0) + int(numbers[2])
    collected.add(LUSTRE_READ, octets["read"], mount)
    collected.add(LUSTRE_WRITTEN, octets["write"], mount)
    for operation in ("read", "write", "other"):
        collected.add(LUSTRE_OPERATIONS, calls[operation], mount, operation)
    for operation, spent in microseconds.items():
        collected.add(LUSTRE_TIME, spent / MICROSECONDS_PER_SECOND, mount, operation)


def _labels(clients: Sequence[str], mounts: Sequence[Mount]) -> dict[str, str]:
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
