"""NUMA: the memory of each node.

Used in the sidecar. /sys/devices/system/node comes in. No threads, no state. How allocations fell on the
nodes is in `vm`.
"""

from __future__ import annotations

from pathlib import Path

from exporter.collectors.draft import Draft
from exporter.collectors.family import Collected, FamilySpec
from exporter.collectors.kernel_files import (
    FILE_REASONS,
    named_values,
    numbered_entries,
    parse_kibibytes,
    read_file,
)

TOTAL = FamilySpec(
    "host_numa_memory_total_bytes",
    "gauge",
    "Memory of the node. Absent on kernels without NUMA.",
    ("node",),
    unit="bytes",
    source="/sys/devices/system/node/node*/meminfo MemTotal",
)
FREE = FamilySpec(
    "host_numa_memory_free_bytes",
    "gauge",
    "Memory of the node that holds nothing at all. Absent on kernels without NUMA.",
    ("node",),
    unit="bytes",
    source="/sys/devices/system/node/node*/meminfo MemFree",
)
SPECS = (TOTAL, FREE)


class NumaCollector:
    """Reads the nodes' meminfo.

    Args:
        sys: Where sysfs is mounted.
    """

    name = "numa"
    specs = SPECS
    reasons = FILE_REASONS

    def __init__(self, *, sys: Path = Path("/sys")) -> None:
        self._directory = sys / "devices/system/node"

    def collect(self) -> Collected:
        """Read the sources once.

        Raises:
            CollectError: Nothing of them could be read.
        """
        draft = Draft()
        total: dict[tuple[str, ...], float] = {}
        free: dict[tuple[str, ...], float] = {}
        nodes = numbered_entries(self._directory, "node")
        for number, node in nodes:
            path = node / "meminfo"
            with draft.part():
                text = read_file(path)
                if text is None:
                    continue
                values = named_values(text, ":", prefix=f"Node {number} ")
                sizes = [
                    parse_kibibytes(values.get(name, ""), path, name) for name in ("MemTotal", "MemFree")
                ]
                total[str(number),], free[str(number),] = sizes
        draft.add_family(TOTAL, total)
        draft.add_family(FREE, free)
        if not nodes:
            draft.unsupported(f"no NUMA nodes in {self._directory}")
        return draft.finish()
