"""CPU and memory limits of the job's cgroup, and the usage that counts against them.

The exporter assumes that it runs in the cgroup of the job. The families of a resource describe the cgroup with the tightest
limit between the exporter's cgroup and the root (see `cgroup_tree`). Without a limit, they describe the exporter's cgroup.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from exporter.collectors.host.cgroup_tree import (
    NO_LIMIT,
    UNIFIED,
    CgroupLevel,
    CgroupTree,
    Hierarchy,
    cpu_limit,
    limit_in,
)
from exporter.collectors.host.pressure import parse_pressure
from exporter.collectors.kernel_files import counts_in, parse, parse_file, source
from exporter.families import Collected, FamilySpec

INFO = FamilySpec(
    name="cgroup_info",
    type="info",
    labels=("version", "path", "scope"),
    help="Cgroup that the families of a resource (scope: cpu, memory) describe.",
    absent="where no cgroup is visible",
    source="/proc/self/cgroup, mountinfo",
    details=(
        (
            "This is the cgroup with the tightest limit among the exporter's cgroup and its ancestors, or the"
            " exporter's cgroup if none has a limit."
        ),
    ),
)
CPU_LIMIT = FamilySpec(
    name="cgroup_cpu_limit_cpus",
    type="gauge",
    help="CPU time that the job may use per second, in CPUs.",
    absent="without a limit",
    source="v2 cpu.max quota / period; v1 cpu.cfs_quota_us / cpu.cfs_period_us",
)
CPU_USAGE = FamilySpec(
    name="cgroup_cpu_usage_seconds_total",
    type="counter",
    unit="seconds",
    labels=("mode",),
    help="CPU time by mode: user, system. The sum of the modes is all CPU time.",
    absent="where no cgroup is visible, or without the controller cpuacct in cgroup v1",
    source="v2 cpu.stat user_usec, system_usec; v1 cpuacct.stat user, system",
)
CPU_PERIODS = FamilySpec(
    name="cgroup_cpu_periods_total",
    type="counter",
    help="Periods of the CPU limit in which a thread ran.",
    absent="where the CPU controller is off",
    source="v2 cpu.stat nr_periods; v1 cpu.stat nr_periods",
)
CPU_THROTTLED_PERIODS = FamilySpec(
    name="cgroup_cpu_throttled_periods_total",
    type="counter",
    help="Periods in which the job was throttled by the CPU limit.",
    absent="where the CPU controller is off",
    source="v2 cpu.stat nr_throttled; v1 cpu.stat nr_throttled",
)
CPU_THROTTLED = FamilySpec(
    name="cgroup_cpu_throttled_seconds_total",
    type="counter",
    unit="seconds",
    help="Time for which the job was throttled by the CPU limit, summed over CPUs.",
    absent="where the CPU controller is off",
    source="v2 cpu.stat throttled_usec / 1e6; v1 cpu.stat throttled_time / 1e9",
)
MEMORY_CURRENT = FamilySpec(
    name="cgroup_memory_current_bytes",
    type="gauge",
    unit="bytes",
    help="Memory that counts against the limit, page cache included.",
    absent="in the root cgroup",
    source="v2 memory.current; v1 memory.usage_in_bytes",
)
MEMORY_LIMIT = FamilySpec(
    name="cgroup_memory_limit_bytes",
    type="gauge",
    unit="bytes",
    help=("Memory limit. At the limit, the kernel reclaims memory, or kills processes of the job."),
    absent="without a limit",
    source="v2 memory.max; v1 memory.stat hierarchical_memory_limit",
)
MEMORY_HIGH = FamilySpec(
    name="cgroup_memory_high_bytes",
    type="gauge",
    unit="bytes",
    help="Memory above which the kernel throttles the job and reclaims memory (memory.high).",
    absent="without this limit or in cgroup v1",
    source="v2 memory.high",
)
MEMORY_WORKING_SET = FamilySpec(
    name="cgroup_memory_working_set_bytes",
    type="gauge",
    unit="bytes",
    help="Working set as Kubernetes computes it: memory in use without inactive file pages.",
    absent="in the root cgroup",
    source="v2 memory.current - memory.stat inactive_file; v1 memory.usage_in_bytes - memory.stat total_inactive_file",
)
MEMORY_STAT = FamilySpec(
    name="cgroup_memory_stat_bytes",
    type="gauge",
    unit="bytes",
    labels=("kind",),
    help="Memory by kind. The kinds overlap: do not sum them.",
    absent="for a kind that the kernel does not report",
    source="v2 memory.stat; v1 memory.stat total_rss, total_cache, total_shmem",
    details=(
        "`anon`: anonymous memory.",
        "`file`: page cache, including `shmem`.",
        "`shmem`: tmpfs and /dev/shm.",
        "`kernel`: memory of the kernel, including `slab`.",
        "`slab`: slab caches of the kernel.",
    ),
)
MEMORY_EVENTS = FamilySpec(
    name="cgroup_memory_events_total",
    type="counter",
    labels=("event",),
    help="Memory events of the cgroup and its descendants, by event, with the names in memory.events.",
    absent="for an event that the kernel does not count",
    source="v2 memory.events; v1 memory.failcnt, memory.oom_control oom_kill",
    details=(
        "In cgroup v2: `low`, `high`, `max`, `oom`, `oom_kill`, `oom_group_kill`.",
        "In cgroup v1: `max` and `oom_kill`. `oom_kill` is the sum over the exporter's cgroup and its ancestors.",
    ),
)
IO_WAITING = FamilySpec(
    name="cgroup_pressure_io_waiting_seconds_total",
    type="counter",
    unit="seconds",
    help="Time in which at least one thread of the job waited for I/O.",
    absent="without pressure accounting or without cgroup v2",
    source="v2 io.pressure some total",
)
SPECS = (
    *(INFO, CPU_LIMIT, CPU_USAGE, CPU_PERIODS, CPU_THROTTLED_PERIODS, CPU_THROTTLED),
    *(MEMORY_CURRENT, MEMORY_LIMIT, MEMORY_HIGH, MEMORY_WORKING_SET, MEMORY_STAT, MEMORY_EVENTS),
    IO_WAITING,
)

STAT_NAMES_V1 = {"anon": "total_rss", "file": "total_cache", "shmem": "total_shmem"}
"""Names in memory.stat of cgroup v1, by kind of memory."""
STAT_NAMES_V2 = {kind: kind for kind in ("anon", "file", "shmem", "kernel", "slab")}
"""Names in memory.stat of cgroup v2, by kind of memory."""
EVENTS = ("low", "high", "max", "oom", "oom_kill", "oom_group_kill")
"""Names in memory.events of cgroup v2."""


class CgroupCollector:
    """Collector of the cgroup that limits the job."""

    name = "cgroup"
    specs = SPECS

    def __init__(self, *, proc: Path | None = None, sys: Path = Path("/sys")) -> None:
        self._tree = CgroupTree(proc=proc, sys=sys)

    def collect(self) -> Collected:
        """Read limits and usage of CPU and memory, and the I/O pressure."""
        collected = Collected()
        with source(collected, "cgroup"):
            hierarchies = self._tree.hierarchies()
            unified = hierarchies.get(UNIFIED)
            # A hybrid machine has a controller in v1 or in v2, never in both.
            cpu, memory = hierarchies.get("cpu", unified), hierarchies.get("memory", unified)
            if cpu is None:
                collected.unsupported.append("no cgroup with the cpu controller is visible")
            else:
                path = _add_cpu(collected, cpu, hierarchies.get("cpuacct"))
                collected.add(INFO, 1, cpu.version, path, "cpu")
            memory_path = ""
            if memory is None:
                collected.unsupported.append("no cgroup with the memory controller is visible")
            else:
                memory_path = _add_memory(collected, memory)
                if memory_path:
                    collected.add(INFO, 1, memory.version, memory_path, "memory")
            if unified is None:
                collected.unsupported.append("no I/O pressure of the cgroup: no cgroup v2 is visible")
                return collected
            pressure_path = unified.level_at(memory_path).directory / "io.pressure"
            with source(collected, pressure_path):
                collected.add(IO_WAITING, parse_file(pressure_path, parse_pressure).waiting_seconds)
        return collected


def _add_limit(
    collected: Collected,
    spec: FamilySpec,
    hierarchy: Hierarchy,
    limit_of: Callable[[CgroupLevel], float | None],
) -> CgroupLevel | None:
    """Publish the tightest limit, and return the cgroup with this limit, or None without a limit."""
    with source(collected, f"{spec.source} of {hierarchy.levels[0].directory}"):
        tightest = hierarchy.tightest(limit_of)
        if tightest is not None:
            collected.add(spec, tightest.value)
            return tightest.level
    return None


def _add_cpu(collected: Collected, hierarchy: Hierarchy, cpuacct: Hierarchy | None) -> str:
    """Publish limit, throttling and usage of the cgroup with the tightest limit, and return the path of the cgroup."""
    level = _add_limit(collected, CPU_LIMIT, hierarchy, cpu_limit) or hierarchy.levels[0]
    path = level.directory / "cpu.stat"
    with source(collected, path):
        if hierarchy.version == "2":
            counts = counts_in(path, "user_usec", "system_usec")
            collected.add(CPU_USAGE, counts["user_usec"] / 1e6, "user")
            collected.add(CPU_USAGE, counts["system_usec"] / 1e6, "system")
        else:
            counts = counts_in(path)
            if cpuacct is not None:  # usually the same mount
                ticks = counts_in(cpuacct.level_at(level.path).directory / "cpuacct.stat", "user", "system")
                ticks_per_second = os.sysconf("SC_CLK_TCK")
                collected.add(CPU_USAGE, ticks["user"] / ticks_per_second, "user")
                collected.add(CPU_USAGE, ticks["system"] / ticks_per_second, "system")
        if "nr_periods" in counts:
            collected.add(CPU_PERIODS, counts["nr_periods"])
            collected.add(CPU_THROTTLED_PERIODS, counts.get("nr_throttled"))
            collected.add(CPU_THROTTLED, _throttled_seconds(counts))
        else:
            collected.unsupported.append(f"{path}: no nr_periods, the CPU controller is off")
    return level.path


def _throttled_seconds(counts: dict[str, int]) -> float | None:
    """Return the throttled time of cpu.stat in either version, or None without this line."""
    if "throttled_usec" in counts:
        return counts["throttled_usec"] / 1e6
    return counts["throttled_time"] / 1e9 if "throttled_time" in counts else None  # v1


def _add_memory(collected: Collected, hierarchy: Hierarchy) -> str:
    """Publish limits, usage and events of the cgroup with the tightest limit.

    Returns the path of this cgroup, or "" without accounting.
    """
    if hierarchy.version == "1":
        return _add_memory_v1(collected, hierarchy)
    high_level = _add_limit(collected, MEMORY_HIGH, hierarchy, limit_in("memory.high"))
    limited_level = _add_limit(collected, MEMORY_LIMIT, hierarchy, limit_in("memory.max")) or high_level
    # Where the controller is off, the nearest ancestor with accounting counts the memory.
    accounting_levels = (
        ancestor for ancestor in hierarchy.levels if (ancestor.directory / "memory.current").exists()
    )
    level = limited_level or next(accounting_levels, hierarchy.levels[0])
    usage_path = level.directory / "memory.current"
    if not usage_path.exists():
        collected.unsupported.append(f"no {usage_path}")  # the root cgroup
        return ""
    with source(collected, usage_path):
        _add_usage(collected, usage_path, "inactive_file", STAT_NAMES_V2)
    with source(collected, level.directory / "memory.events"):
        events = counts_in(level.directory / "memory.events")
        for event in EVENTS:
            collected.add(MEMORY_EVENTS, events.get(event), event)
    return level.path


def _add_memory_v1(collected: Collected, hierarchy: Hierarchy) -> str:
    """Publish limit, usage and events as `_add_memory` does, from the files of cgroup v1."""
    level = _add_limit_v1(collected, hierarchy)
    usage_path = level.directory / "memory.usage_in_bytes"
    if not usage_path.exists():
        collected.unsupported.append(f"no {usage_path}")
        return ""
    with source(collected, usage_path):
        _add_usage(collected, usage_path, "total_inactive_file", STAT_NAMES_V1)
    with source(collected, f"events of {level.directory}"):
        failures = level.read("memory.failcnt") or "0"
        collected.add(MEMORY_EVENTS, parse(level.directory / "memory.failcnt", int, failures), "max")
        # v1 counts a kill only in the cgroup of the killed process.
        control_paths = [ancestor.directory / "memory.oom_control" for ancestor in hierarchy.levels]
        kills = [counts_in(path).get("oom_kill") for path in control_paths if path.exists()]
        if any(count is not None for count in kills):
            collected.add(MEMORY_EVENTS, sum(count or 0 for count in kills), "oom_kill")
    return level.path


def _add_usage(
    collected: Collected, usage_path: Path, inactive_file_name: str, stat_names: dict[str, str]
) -> None:
    """Publish the memory in use, the working set, and the memory by kind."""
    used_bytes = parse_file(usage_path, int)
    collected.add(MEMORY_CURRENT, used_bytes)
    stat_bytes = counts_in(usage_path.with_name("memory.stat"), inactive_file_name)
    collected.add(MEMORY_WORKING_SET, max(0, used_bytes - stat_bytes[inactive_file_name]))
    for kind, name in stat_names.items():
        collected.add(MEMORY_STAT, stat_bytes.get(name), kind)


def _add_limit_v1(collected: Collected, hierarchy: Hierarchy) -> CgroupLevel:
    """Publish the limit that the kernel computes, and return the cgroup with this limit, or this process's cgroup without a limit.

    The kernel includes the limits of ancestors that are not mounted here: such a limit belongs to the outermost visible cgroup.
    """
    innermost = hierarchy.levels[0]
    with source(collected, innermost.directory / "memory.stat"):
        limit = counts_in(innermost.directory / "memory.stat").get("hierarchical_memory_limit")
        if limit is not None and limit < NO_LIMIT:
            collected.add(MEMORY_LIMIT, limit)
            limit_of = limit_in("memory.limit_in_bytes")
            return next(
                (level for level in hierarchy.levels if limit_of(level) == limit), hierarchy.levels[-1]
            )
    return innermost
