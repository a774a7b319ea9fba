"""NFS: what goes over each NFS mount, and how long the servers take.

Used in the sidecar. /proc/self/mountstats comes in, which the kernel answers without asking a server, so that
a dead one does not hang it. No threads, no state.

Source: fs/nfs/super.c (nfs_show_stats), net/sunrpc/stats.c; nfsiostat(8).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from exporter.collectors.draft import Draft
from exporter.collectors.family import Collected, FamilySpec
from exporter.collectors.kernel_files import FILE_REASONS, parse_count, read_bytes, refuse
from exporter.collectors.mounts import printable, read_mounts, unescape

MILLISECONDS_PER_SECOND = 1000


def _spec(name: str, help_text: str, source: str, *labels: str, unit: str = "") -> FamilySpec:
    return FamilySpec(
        f"host_nfs_{name}_total",
        "counter",
        help_text,
        ("mount", *labels),
        unit,
        f"/proc/self/mountstats {source}",
    )


READ_BYTES = _spec(
    "read_bytes",
    "Bytes that programs read from the mount, from the page cache too.",
    "bytes: normal + direct read",
    unit="bytes",
)
WRITTEN_BYTES = _spec(
    "written_bytes",
    "Bytes that programs wrote to the mount.",
    "bytes: normal + direct write",
    unit="bytes",
)
SERVER_READ_BYTES = _spec(
    "server_read_bytes", "Bytes read from the server.", "bytes: server read", unit="bytes"
)
SERVER_WRITTEN_BYTES = _spec(
    "server_written_bytes", "Bytes written to the server.", "bytes: server write", unit="bytes"
)
OPERATIONS = _spec(
    "operations",
    "Requests that have ended: read, write and other, or each kind by itself with per_operation.",
    "per-op operations",
    "operation",
)
TIME = _spec(
    "operation_time_seconds",
    "Time that all requests took together, from the first queue to the end.",
    "per-op execute time",
    "operation",
    unit="seconds",
)
RESPONSE_TIME = _spec(
    "response_time_seconds",
    "Time that all requests waited for the server's answer, together.",
    "per-op round trip time",
    "operation",
    unit="seconds",
)
RETRANSMISSIONS = _spec(
    "retransmissions",
    "Requests sent again because no answer came.",
    "per-op transmissions - operations",
)
TIMEOUTS = _spec(
    "timeouts",
    "Requests that ran into the major timeout: the server was not there.",
    "per-op major timeouts",
)
SPECS = (
    READ_BYTES,
    WRITTEN_BYTES,
    SERVER_READ_BYTES,
    SERVER_WRITTEN_BYTES,
    OPERATIONS,
    TIME,
    RESPONSE_TIME,
    RETRANSMISSIONS,
    TIMEOUTS,
)

NFS = ("nfs", "nfs4")
KINDS = {"READ": "read", "READ_PLUS": "read", "WRITE": "write"}
"""What moves data; everything else is `other`."""

_TIME_SPECS = ((RESPONSE_TIME, 6), (TIME, 7))


@dataclass(slots=True)
class _Section:
    """What mountstats says about one NFS mount, still as text."""

    path: str
    size: list[str] = field(default_factory=list)
    operations: dict[str, list[str]] = field(default_factory=dict)


class NfsCollector:
    """Reads the statistics of the NFS mounts.

    Args:
        proc: Where procfs is mounted.
        per_operation: One series per kind of request that has occurred instead of read, write and other.
    """

    name = "nfs"
    specs = SPECS
    reasons = FILE_REASONS

    def __init__(self, *, proc: Path = Path("/proc"), per_operation: bool = False) -> None:
        self._proc = proc
        self._path = proc / "self/mountstats"
        self._per_operation = per_operation

    def collect(self) -> Collected:
        """Read the source once.

        Raises:
            CollectError: Nothing of it could be read.
        """
        draft = Draft()
        content = read_bytes(self._path)
        if content is None:
            draft.unsupported(f"no {self._path}")
            return draft.finish()
        sections = {section.path: section for section in _sections(content)}
        if not sections:
            draft.unsupported("no NFS is mounted")
            return draft.finish()
        samples: dict[FamilySpec, dict[tuple[str, ...], float]] = {spec: {} for spec in SPECS}
        devices = {mount.path: mount.device for mount in read_mounts(self._proc, NFS) or ()}
        seen: set[str] = set()
        for path, section in sections.items():
            # The same filesystem, mounted at several places, has the same statistics at each of them.
            device = devices.get(path, path)
            if device not in seen:
                seen.add(device)
                self._add_mount(draft, samples, section)
        for spec, values in samples.items():
            draft.add_family(spec, values)
        return draft.finish()

    def _add_mount(
        self,
        draft: Draft,
        samples: Mapping[FamilySpec, dict[tuple[str, ...], float]],
        section: _Section,
    ) -> None:
        mount = printable(section.path)
        with draft.part():
            if len(section.size) < 6:
                refuse(" ".join(section.size), (self._path, mount, "bytes:"), "eight numbers")
            counts = [parse_count(word, self._path, mount, "bytes:") for word in section.size[:6]]
            samples[READ_BYTES][mount,] = counts[0] + counts[2]
            samples[WRITTEN_BYTES][mount,] = counts[1] + counts[3]
            samples[SERVER_READ_BYTES][mount,] = counts[4]
            samples[SERVER_WRITTEN_BYTES][mount,] = counts[5]
        with draft.part():
            by_kind: dict[str, list[int]] = {}
            for name, words in section.operations.items():
                if len(words) < 8:
                    refuse(" ".join(words), (self._path, mount, name), "eight numbers")
                counts = [parse_count(word, self._path, mount, name) for word in words[:8]]
                kind = name.lower() if self._per_operation else KINDS.get(name, "other")
                if counts[0] or not self._per_operation:
                    before = by_kind.get(kind, [0] * 8)
                    by_kind[kind] = [one + other for one, other in zip(before, counts, strict=True)]
            for kind, counts in by_kind.items():
                samples[OPERATIONS][mount, kind] = counts[0]
                for spec, index in _TIME_SPECS:
                    samples[spec][mount, kind] = counts[index] / MILLISECONDS_PER_SECOND
            if section.operations:
                resent = sum(counts[1] - counts[0] for counts in by_kind.values())
                samples[RETRANSMISSIONS][mount,] = max(0, resent)
                samples[TIMEOUTS][mount,] = sum(counts[2] for counts in by_kind.values())


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
            elif operations and len(words) > 1:
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
