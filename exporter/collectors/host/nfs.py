"""Traffic and response times of NFS mounts.

Reading /proc/self/mountstats causes no request to the server. Source: nfsiostat(8).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from exporter.collectors.kernel_files import parse, printable, procfs, read_optional, source
from exporter.collectors.mounts import parse_mounts, unescape
from exporter.families import Collected, FamilySpec

MILLISECONDS_PER_SECOND = 1000

READ_BYTES = FamilySpec(
    name="host_nfs_read_bytes_total",
    type="counter",
    unit="bytes",
    labels=("mount",),
    help="Bytes that processes read from the mount, including reads from the page cache.",
    absent="without NFS mounts",
    source="/proc/self/mountstats bytes: normal + direct read",
)
WRITTEN_BYTES = FamilySpec(
    name="host_nfs_written_bytes_total",
    type="counter",
    unit="bytes",
    labels=("mount",),
    help="Bytes that processes wrote to the mount.",
    absent="without NFS mounts",
    source="/proc/self/mountstats bytes: normal + direct write",
)
OPERATIONS = FamilySpec(
    name="host_nfs_operations_total",
    type="counter",
    labels=("mount", "operation"),
    help="Completed requests by operation: read, write, other.",
    absent="without NFS mounts",
    source="/proc/self/mountstats per-op operations",
)
OPERATION_TIME = FamilySpec(
    name="host_nfs_operation_time_seconds_total",
    type="counter",
    unit="seconds",
    labels=("mount", "operation"),
    help="Sum of the durations of all requests by operation, from queueing to completion.",
    absent="without NFS mounts",
    source="/proc/self/mountstats per-op execute time",
)
RETRANSMISSIONS = FamilySpec(
    name="host_nfs_retransmissions_total",
    type="counter",
    labels=("mount",),
    help="Retransmissions of requests that the server did not answer in time.",
    absent="without NFS mounts",
    source="/proc/self/mountstats per-op transmissions - operations",
)
SPECS = (READ_BYTES, WRITTEN_BYTES, OPERATIONS, OPERATION_TIME, RETRANSMISSIONS)

_OPERATION_OF_REQUEST = {"READ": "read", "READ_PLUS": "read", "WRITE": "write"}
"""Operation by name of the request; all other requests count as `other`."""
_NFS_MOUNT = re.compile(r"\S+ mounted on (\S+) with fstype nfs4? ")


@dataclass(slots=True)
class RequestCounts:
    """Counters of the requests of an operation: read, write or other."""

    completed_requests: int = 0
    retransmissions: int = 0
    milliseconds: int = 0  # sum of the durations


@dataclass(slots=True)
class NfsCounts:
    """Counters of a mount, with the requests by operation."""

    read_bytes: int
    written_bytes: int
    requests: dict[str, RequestCounts] = field(
        default_factory=lambda: {name: RequestCounts() for name in ("read", "write", "other")}
    )


class NfsCollector:
    """Collector of the statistics of NFS mounts."""

    name = "nfs"
    specs = SPECS

    def __init__(self) -> None:
        self._proc = procfs()

    def collect(self) -> Collected:
        """Read the statistics of the mounted NFS filesystems. A filesystem with several mounts is published once."""
        collected = Collected()
        path = self._proc / "self/mountstats"
        with source(collected, path):
            sections = _sections(read_optional(path) or "")
            if not sections:
                collected.unsupported.append("no NFS is mounted")
                return collected
            mountinfo = read_optional(self._proc / "self/mountinfo") or ""
            mounts = parse("mountinfo", lambda text: parse_mounts(text, ("nfs", "nfs4")), mountinfo)
            devices = {mount.path: mount.device for mount in mounts}
            published_devices: set[str] = set()
            for mount_point, section in sections.items():
                # A filesystem with several mount points has the same statistics at each of them.
                device = devices.get(mount_point, mount_point)
                if device not in published_devices:
                    published_devices.add(device)
                    label = printable(mount_point)
                    with source(collected, f"{path} {label}"):
                        counts = parse(f"{path} {label}", _parse_section, section)
                        _add_counts(collected, counts, label)
        return collected


def _sections(mountstats: str) -> dict[str, str]:
    """Return the text of each NFS mount by its mount point."""
    return {
        unescape(mount[1]): section
        for section in re.split(r"^(?:no )?device ", mountstats, flags=re.MULTILINE)
        if (mount := _NFS_MOUNT.match(section))
    }


def _parse_section(section: str) -> NfsCounts:
    """Parse the statistics of a mount. nfsiostat(8) documents the columns of the lines after `per-op statistics`."""
    general, _, operations = section.partition("per-op statistics")
    [bytes_line] = [line for line in general.splitlines() if line.strip().startswith("bytes:")]
    _, normal_read, normal_write, direct_read, direct_write, *_ = bytes_line.split()
    counts = NfsCounts(
        read_bytes=int(normal_read) + int(direct_read), written_bytes=int(normal_write) + int(direct_write)
    )
    for line in operations.splitlines():
        name, *fields = line.split() or [""]
        if len(fields) >= 8:
            completed_requests, transmissions, *_, milliseconds = map(int, fields[:8])
            requests = counts.requests[_OPERATION_OF_REQUEST.get(name.removesuffix(":"), "other")]
            requests.completed_requests += completed_requests
            requests.retransmissions += transmissions - completed_requests
            requests.milliseconds += milliseconds
    return counts


def _add_counts(collected: Collected, counts: NfsCounts, mount: str) -> None:
    collected.add(READ_BYTES, counts.read_bytes, mount)
    collected.add(WRITTEN_BYTES, counts.written_bytes, mount)
    for operation, requests in counts.requests.items():
        collected.add(OPERATIONS, requests.completed_requests, mount, operation)
        collected.add(OPERATION_TIME, requests.milliseconds / MILLISECONDS_PER_SECOND, mount, operation)
    retransmissions = sum(requests.retransmissions for requests in counts.requests.values())
    collected.add(RETRANSMISSIONS, max(0, retransmissions), mount)
