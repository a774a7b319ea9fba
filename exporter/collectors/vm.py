"""Virtual memory: page faults, reclaim, processes killed for memory, and NUMA placement.

Used in the sidecar. /proc/vmstat comes in, one read per pass. No threads. It holds the highest count of minor
faults, which is a difference of two counters.

Reclaim has one counter per cause, on kernels before 4.8 also one per zone; they are summed here. What
pgscan_anon and pgscan_file count is the same pages once more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from exporter.collectors.draft import Draft
from exporter.collectors.family import Collected, FamilySpec
from exporter.collectors.high_water import HighWater
from exporter.collectors.kernel_files import FILE_REASONS, named_values, parse_count, read_file

FAULTS = FamilySpec(
    "host_vm_page_faults_total",
    "counter",
    "Page faults since boot: major ones had to read from a disk, minor ones had not.",
    ("kind",),
    source="/proc/vmstat pgmajfault, pgfault - pgmajfault",
)
SCANNED = FamilySpec(
    "host_vm_pages_scanned_total",
    "counter",
    "Pages looked at in search of memory to free.",
    source="/proc/vmstat pgscan_kswapd + pgscan_direct + …",
)
STOLEN = FamilySpec(
    "host_vm_pages_stolen_total",
    "counter",
    "Pages freed because memory ran short.",
    source="/proc/vmstat pgsteal_kswapd + pgsteal_direct + …",
)
OOM_KILLS = FamilySpec(
    "host_vm_oom_kills_total",
    "counter",
    "Processes killed because memory ran out, those at a cgroup's limit included. Absent on kernels before 4.13.",
    source="/proc/vmstat oom_kill",
)
NUMA_HIT = FamilySpec(
    "host_numa_hit_total",
    "counter",
    "Pages allocated on the node that was wanted. Absent on kernels without NUMA.",
    source="/proc/vmstat numa_hit",
)
NUMA_MISS = FamilySpec(
    "host_numa_miss_total",
    "counter",
    "Pages allocated on a node because the wanted one had none left. Absent on kernels without NUMA.",
    source="/proc/vmstat numa_miss",
)
NUMA_FOREIGN = FamilySpec(
    "host_numa_foreign_total",
    "counter",
    "Pages wanted on a node and allocated on another. Absent on kernels without NUMA.",
    source="/proc/vmstat numa_foreign",
)
SPECS = (FAULTS, SCANNED, STOLEN, OOM_KILLS, NUMA_HIT, NUMA_MISS, NUMA_FOREIGN)

OPTIONAL = {
    OOM_KILLS: "oom_kill",
    NUMA_HIT: "numa_hit",
    NUMA_MISS: "numa_miss",
    NUMA_FOREIGN: "numa_foreign",
}
RECLAIM = {
    spec: re.compile(
        rf"{prefix}_(kswapd|direct|khugepaged|proactive)(_(dma|dma32|normal|high|movable|device))?"
    )
    for spec, prefix in ((SCANNED, "pgscan"), (STOLEN, "pgsteal"))
}


class VmCollector:
    """Reads /proc/vmstat.

    Args:
        proc: Where procfs is mounted.
    """

    name = "vm"
    specs = SPECS
    reasons = FILE_REASONS

    def __init__(self, *, proc: Path = Path("/proc")) -> None:
        self._path = proc / "vmstat"
        self._marks = HighWater()

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
        values = named_values(text, " ")
        with draft.part():
            major = self._count(values, "pgmajfault")
            minor = self._marks.hold("minor", max(0, self._count(values, "pgfault") - major))
            draft.add_family(FAULTS, {("minor",): minor, ("major",): major})
        for spec, pattern in RECLAIM.items():
            with draft.part():
                found = [self._count(values, name) for name in values if pattern.fullmatch(name)]
                if found:
                    draft.add(spec, sum(found))
                else:
                    draft.unsupported(f"{self._path}: no {pattern.pattern.partition('_')[0]}")
        for spec, name in OPTIONAL.items():
            if name not in values:
                draft.unsupported(f"{self._path}: no {name}")
                continue
            with draft.part():
                draft.add(spec, self._count(values, name))
        return draft.finish()

    def _count(self, values: Mapping[str, str], name: str) -> int:
        return parse_count(values.get(name, ""), self._path, name)
