"""CPU count: how many CPUs there are, and how many of them this container may use.

Used in the sidecar. /sys/devices/system/cpu, the scheduler's affinity and the cgroup's quota come in. No
threads; the physical cores are counted again only when CPUs come or go.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from exporter.collectors.cpu_topology import core_of
from exporter.collectors.draft import Draft
from exporter.collectors.family import Collected, FamilySpec
from exporter.collectors.kernel_files import (
    FILE_REASONS,
    numbered_entries,
    parse_count,
    parse_list_length,
    parse_signed,
    read_file,
    refuse,
)
from exporter.errors import CollectError

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
        self._proc = proc
        self._cpus = sys / "devices/system/cpu"
        self._cgroup = sys / "fs/cgroup"
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
            quota = cgroup_quota(self._proc, self._cgroup)
            if quota is not None:
                counts["quota",] = quota
        draft.add_family(CPUS, counts)
        return draft.finish()

    def _count_cores(self, online: str) -> int:
        if self._physical is None or self._physical[0] != online:
            cores = {core_of(cpu) for _, cpu in numbered_entries(self._cpus, "cpu")}
            self._physical = (online, len(cores - {None}))
        return self._physical[1]


def cgroup_quota(proc: Path, mount: Path) -> float | None:
    """Find the tightest CPU limit on the way from this process's cgroup up to the root, in CPUs.

    The leaf alone is not enough: Slurm puts the limit of a step on its parent. Within a cgroup namespace, and
    in a container that sees only its own part of the tree, the way is short and ends at the mount.

    Args:
        proc: Where procfs is mounted.
        mount: Where cgroups are mounted.

    Returns:
        The limit; None when there is none.

    Raises:
        CollectError: A limit cannot be read.
    """
    path = proc / "self/cgroup"
    text = read_file(path)
    if text is None:
        return None
    limits = []
    for line in text.splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            refuse(line, (path,), "lines like `0::/path`")
        _, controllers, group = parts
        if not controllers:
            limits += [_limit_v2(directory) for directory in _upwards(mount, group)]
        elif "cpu" in controllers.split(","):
            for root in (mount / "cpu", mount / controllers):
                limits += [_limit_v1(directory) for directory in _upwards(root, group)]
    return min((limit for limit in limits if limit is not None), default=None)


def _upwards(mount: Path, group: str) -> list[Path]:
    names = [name for name in group.split("/") if name]
    if ".." in names:  # outside of the namespace's root: only the mount itself is known to be ours
        names = []
    return [mount.joinpath(*names[:depth]) for depth in range(len(names), -1, -1)]


def _limit_v2(directory: Path) -> float | None:
    path = directory / "cpu.max"
    text = read_file(path)
    if text is None:
        return None
    quota, _, period = text.strip().partition(" ")
    if quota == "max":
        return None
    return _ratio(parse_count(quota, path), parse_count(period, path), path)


def _limit_v1(directory: Path) -> float | None:
    path = directory / "cpu.cfs_quota_us"
    quota, period = read_file(path), read_file(directory / "cpu.cfs_period_us")
    if quota is None or period is None:
        return None
    microseconds = parse_signed(quota.strip(), path)
    if microseconds < 0:
        return None
    return _ratio(microseconds, parse_count(period.strip(), directory / "cpu.cfs_period_us"), path)


def _ratio(quota: int, period: int, path: Path) -> float:
    if period == 0:
        raise CollectError(f"{path}: a period of 0", reason="malformed")
    return quota / period
