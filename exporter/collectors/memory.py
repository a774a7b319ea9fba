"""Memory: what the machine's memory is used for.

Used in the sidecar. /proc/meminfo comes in. No threads, no state.

Source: Documentation/filesystems/proc.rst, "meminfo".
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from exporter.collectors.draft import Draft
from exporter.collectors.family import Collected, FamilySpec
from exporter.collectors.kernel_files import (
    FILE_REASONS,
    named_values,
    parse_count,
    parse_kibibytes,
    read_file,
)


def _spec(word: str, help_text: str, source: str) -> FamilySpec:
    return FamilySpec(
        f"host_memory_{word}_bytes", "gauge", help_text, unit="bytes", source=f"/proc/meminfo {source}"
    )


TOTAL = _spec("total", "Memory that the kernel can use.", "MemTotal")
AVAILABLE = _spec(
    "available",
    "Memory that new work could take without swapping, as the kernel estimates it. Absent on kernels before 3.14.",
    "MemAvailable",
)
FREE = _spec("free", "Memory that holds nothing at all; small on a healthy machine.", "MemFree")
USED = _spec(
    "used",
    "Memory that new work could not take: total - available. Absent where available is.",
    "MemTotal - MemAvailable",
)
BUFFERS = _spec("buffers", "Cached blocks of raw devices.", "Buffers")
CACHED = _spec("cached", "Cached pages of files, shared memory included.", "Cached")
SHARED = _spec(
    "shared", "Shared memory and tmpfs, which also holds what DataLoader workers hand over.", "Shmem"
)
SLAB = _spec("slab", "Memory of the kernel's own objects.", "Slab")
DIRTY = _spec("dirty", "Memory that waits to be written to disk.", "Dirty")
WRITEBACK = _spec("writeback", "Memory that is being written to disk.", "Writeback")
ANON = _spec("anon", "Memory of processes that no file backs.", "AnonPages")
HUGEPAGES_TOTAL = _spec(
    "hugepages_total",
    "Memory set aside as huge pages of the default size. Absent where the kernel has none.",
    "HugePages_Total * Hugepagesize",
)
HUGEPAGES_FREE = _spec(
    "hugepages_free",
    "Memory set aside as huge pages that nobody uses. Absent where the kernel has none.",
    "HugePages_Free * Hugepagesize",
)
SPECS = (
    TOTAL,
    AVAILABLE,
    FREE,
    USED,
    BUFFERS,
    CACHED,
    SHARED,
    SLAB,
    DIRTY,
    WRITEBACK,
    ANON,
    HUGEPAGES_TOTAL,
    HUGEPAGES_FREE,
)

SIZES = {
    TOTAL: "MemTotal",
    FREE: "MemFree",
    BUFFERS: "Buffers",
    CACHED: "Cached",
    SHARED: "Shmem",
    SLAB: "Slab",
    DIRTY: "Dirty",
    WRITEBACK: "Writeback",
    ANON: "AnonPages",
}
"""What every kernel has: one of these that is missing is a damaged file."""

HUGE = {HUGEPAGES_TOTAL: "HugePages_Total", HUGEPAGES_FREE: "HugePages_Free"}


class MemoryCollector:
    """Reads /proc/meminfo.

    Args:
        proc: Where procfs is mounted.
    """

    name = "memory"
    specs = SPECS
    reasons = FILE_REASONS

    def __init__(self, *, proc: Path = Path("/proc")) -> None:
        self._path = proc / "meminfo"

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
        values = named_values(text, ":")
        for spec, name in SIZES.items():
            with draft.part():
                draft.add(spec, parse_kibibytes(values.get(name, ""), self._path, name))
        with draft.part():
            self._add_available(draft, values)
        if "Hugepagesize" not in values:
            draft.unsupported(f"{self._path}: no huge pages")
            return draft.finish()
        for spec, name in HUGE.items():
            with draft.part():
                size = parse_kibibytes(values["Hugepagesize"], self._path, "Hugepagesize")
                draft.add(spec, parse_count(values.get(name, ""), self._path, name) * size)
        return draft.finish()

    def _add_available(self, draft: Draft, values: Mapping[str, str]) -> None:
        if "MemAvailable" not in values:
            draft.unsupported(f"{self._path}: no MemAvailable")
            return
        available = parse_kibibytes(values["MemAvailable"], self._path, "MemAvailable")
        total = parse_kibibytes(values.get("MemTotal", ""), self._path, "MemTotal")
        draft.add(AVAILABLE, available)
        draft.add(USED, max(0, total - available))
