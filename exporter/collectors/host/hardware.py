"""Number of CPUs: all CPUs of the machine, and the CPUs that the exporter may use."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from exporter.collectors.host.cgroup_tree import CgroupTree, cpu_quota
from exporter.collectors.kernel_files import from_psutil, source
from exporter.families import Collected, FamilySpec

CPUS = FamilySpec(
    name="host_cpus",
    type="gauge",
    labels=("kind",),
    help="Number of CPUs by kind. The kinds overlap: do not sum them.",
    absent="for a kind that the system does not report, and for `quota` without a limit",
    source="sysconf, /sys/devices/system/cpu, sched_getaffinity, cpu.max or cpu.cfs_quota_us",
    details=(
        "`online`: logical CPUs.",
        "`physical`: cores.",
        "`affinity`: CPUs that the exporter may run on.",
        "`quota`: lowest CPU limit of the cgroup and its ancestors.",
    ),
)
SPECS = (CPUS,)


class HardwareCollector:
    """Collector of the number of CPUs."""

    name = "hardware"
    specs = SPECS

    def __init__(self, *, sys: Path = Path("/sys")) -> None:
        self._tree = CgroupTree(sys=sys)

    def collect(self) -> Collected:
        """Return the number of CPUs of each kind."""
        collected = Collected()
        with source(collected, "CPUs"):
            collected.add(CPUS, from_psutil("CPUs", psutil.cpu_count), "online")
            collected.add(CPUS, from_psutil("CPUs", lambda: psutil.cpu_count(logical=False)), "physical")
            collected.add(CPUS, len(os.sched_getaffinity(0)), "affinity")
        with source(collected, "cgroup"):
            collected.add(CPUS, cpu_quota(self._tree), "quota")
        return collected
