"""CPU count: how many CPUs there are, and how many of them this container may use.

Used in the sidecar. /sys/devices/system/cpu, the scheduler's affinity and the cgroup's quota come in. No
threads; the physical cores are counted again only when CPUs come or go.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from exporter.collectors import cgroup_v1, cgroup_v2
from exporter.collectors.cgroup_tree import UNIFIED, CgroupTree
from exporter.collectors.cpu_topology import core_of
from exporter.collectors.draft import Draft
from exporter.collectors.family import Collected, FamilySpec
from exporter.collectors.kernel_files import FILE_REASONS, numbered_entries, parse_list_length, read_file

CPUS = FamilySpec(
    "host_cpus",
    "gauge",
    "CPUs by kind: online logical ones, physical cores, those the exporter may run on (affinity), and the cgroup's tightest limit (quota). A kind is absent where the system does not say; quota also where there is no limit.",
    ("kind",),
    source="/sys/devices/system/cpu, sched_getaffinity, cpu.max or cpu.cfs_quota_us",
)
SPECS = (CPUS,)


def own_affinity() -> int | None:
    """Count the CPUs on which this process may run; None off Linux."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


class CpuCountCollector:
    """Counts CPUs.

    Args:
        proc: Where procfs is mounted.
        sys: Where sysfs is mounted.
        affinity: Counts the CPUs that may be used.
    """

    name = "cpu_count"
    specs = SPECS
    reasons = FILE_REASONS

    def __init__(
        self,
        *,
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
        affinity: Callable[[], int | None] = own_affinity,
    ) -> None:
        self._cpus = sys / "devices/system/cpu"
        self._tree = CgroupTree(proc=proc, sys=sys)
        self._affinity = affinity
        self._physical: tuple[str, int] | None = None  # the list of CPUs they were counted for, and how many

    def collect(self) -> Collected:
        """Count once.

        Raises:
            CollectError: Nothing could be counted.
        """
        draft = Draft()
        counts: dict[tuple[str, ...], float] = {}
        with draft.part():
            online = read_file(self._cpus / "online")
            if online is None:
                draft.unsupported(f"no {self._cpus / 'online'}")
            else:
                counts["online",] = parse_list_length(online, self._cpus / "online")
                physical = self._count_cores(online)
                if physical:
                    counts["physical",] = physical
                else:
                    draft.unsupported(f"no topology in {self._cpus}")
        affinity = self._affinity()
        if affinity is not None:
            counts["affinity",] = affinity
        with draft.part():
            quota = cgroup_quota(self._tree)
            if quota is not None:
                counts["quota",] = quota
        draft.add_family(CPUS, counts)
        return draft.finish()

    def _count_cores(self, online: str) -> int:
        if self._physical is None or self._physical[0] != online:
            cores = {core_of(cpu) for _, cpu in numbered_entries(self._cpus, "cpu")}
            self._physical = (online, len(cores - {None}))
        return self._physical[1]


def cgroup_quota(tree: CgroupTree) -> float | None:
    """Find the tightest CPU limit on the way from this process's cgroup up to the root, in CPUs; None without one.

    Raises:
        CollectError: A limit cannot be read.
    """
    found = tree.hierarchies()
    hierarchy = found.get("cpu", found.get(UNIFIED))
    if hierarchy is None:
        return None
    tightest = hierarchy.tightest(cgroup_v1.cpus if hierarchy.version == "1" else cgroup_v2.cpus)
    return None if tightest is None else tightest[0]
