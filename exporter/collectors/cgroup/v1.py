"""Cgroup v1: reads the files of separate hierarchies, one or several controllers each.

Used in the sidecar by the cgroup collector, within one pass. Hierarchies come in; families go into the block,
and each function gives the cgroup it has read. No threads.

Source: Documentation/admin-guide/cgroup-v1/{memory,cpuacct,blkio-controller,pids}.rst;
Documentation/scheduler/sched-bwc.rst.
"""

from __future__ import annotations

from pathlib import Path

from exporter.collectors.cgroup.families import (
    CPU_LIMIT,
    CPU_PERIODS,
    CPU_THROTTLED,
    CPU_THROTTLED_PERIODS,
    CPU_USAGE,
    IO_READ,
    IO_WRITTEN,
    MEMORY_CURRENT,
    MEMORY_EVENTS,
    MEMORY_LIMIT,
    MEMORY_PEAK,
    MEMORY_STAT,
    MEMORY_WORKING_SET,
)
from exporter.collectors.cgroup.tree import (
    NO_LIMIT,
    Hierarchy,
    Level,
    add_count,
    add_limit,
    cpu_limit,
    device_name,
    limit_in,
    line_count,
)
from exporter.collectors.kernel_files import HighWater, named_values, parse_count, read_existing, source
from exporter.families import Collected

NANOSECONDS_PER_SECOND = 1e9

_KINDS = {"anon": "total_rss", "file": "total_cache", "shmem": "total_shmem"}
_BYTES = ("blkio.throttle.io_service_bytes_recursive", "blkio.throttle.io_service_bytes")
_DIRECTIONS = {"Read": IO_READ, "Write": IO_WRITTEN}


def add_cpu(collected: Collected, cpu: Hierarchy, cpuacct: Hierarchy | None, highest: HighWater) -> Level:
    """Read limit and throttling where the tightest limit stands, and the use there or as near as possible.

    Args:
        collected: Takes the families.
        cpu: Where the limits are.
        cpuacct: Where the use is counted; the same place when both are mounted together.
        highest: Keeps modes from stepping back, whose proportion is coarse.
    """
    level = add_limit(collected, CPU_LIMIT, cpu, cpu_limit) or cpu.levels[0]
    path = level.directory / "cpu.stat"
    with source(collected, path):
        values = named_values(read_existing(path), " ")
        collected.add(CPU_PERIODS, parse_count(values["nr_periods"], path))
        collected.add(CPU_THROTTLED_PERIODS, parse_count(values["nr_throttled"], path))
        collected.add(CPU_THROTTLED, parse_count(values["throttled_time"], path) / NANOSECONDS_PER_SECOND)
    if cpuacct is None:
        collected.unsupported.append("no cpuacct controller of cgroup v1 can be seen")
    else:
        _add_usage(collected, cpuacct.at(level.path) or cpuacct.levels[0], highest)
    return level


def _add_usage(collected: Collected, level: Level, highest: HighWater) -> None:
    path = level.directory / "cpuacct.usage"
    with source(collected, path):
        seconds = parse_count(read_existing(path).strip(), path) / NANOSECONDS_PER_SECOND
        ticks = named_values(read_existing(level.directory / "cpuacct.stat"), " ")
        # The total is exact; of the modes old kernels know only at which of them the timer's ticks have come.
        user, system = (parse_count(ticks[mode], level.directory, mode) for mode in ("user", "system"))
        of_system = seconds * system / (user + system) if user + system else 0.0
        modes = {"user": seconds - of_system, "system": of_system}
        collected.add_family(
            CPU_USAGE, {(mode,): highest.hold((level.path, mode), value) for mode, value in modes.items()}
        )


def add_memory(collected: Collected, hierarchy: Hierarchy) -> Level:
    """Read limits, use and events of memory, where the tightest limit stands."""
    own = level = hierarchy.levels[0]
    with source(collected, own.directory):
        # The kernel's own answer also knows of limits above the mount, and of those that do not apply here
        # (use_hierarchy 0).
        tightest = line_count(own, "hierarchical_memory_limit", "memory.stat")
        if tightest is not None and tightest < NO_LIMIT:
            limit = limit_in("memory.limit_in_bytes")
            level = next((each for each in hierarchy.levels if limit(each) == tightest), hierarchy.levels[-1])
            collected.add(MEMORY_LIMIT, tightest)
    if add_count(collected, MEMORY_CURRENT, level, "memory.usage_in_bytes"):
        _add_memory_use(collected, level)
    add_count(collected, MEMORY_PEAK, level, "memory.max_usage_in_bytes")
    with source(collected, level.directory):
        events: dict[tuple[str, ...], float] = {}
        failures = level.read("memory.failcnt")
        if failures is not None:
            events["max",] = parse_count(failures, level.directory, "memory.failcnt")
        # A kill is counted where the victim was, not above.
        kills = [line_count(each, "oom_kill", "memory.oom_control") for each in hierarchy.levels]
        if any(kill is not None for kill in kills):
            events["oom_kill",] = sum(kill or 0 for kill in kills)
        collected.add_family(MEMORY_EVENTS, events)
    return level


def _add_memory_use(collected: Collected, level: Level) -> None:
    path = level.directory / "memory.stat"
    with source(collected, path):
        values = named_values(read_existing(path), " ")
        current = parse_count(level.read("memory.usage_in_bytes") or "", level.directory)
        collected.add(MEMORY_WORKING_SET, max(0, current - parse_count(values["total_inactive_file"], path)))
        kinds: dict[tuple[str, ...], float] = {
            (kind,): parse_count(values[name], path, name) for kind, name in _KINDS.items() if name in values
        }
        kernel = level.read("memory.kmem.usage_in_bytes")
        if kernel is not None:
            kinds["kernel",] = parse_count(kernel, level.directory, "memory.kmem.usage_in_bytes")
        collected.add_family(MEMORY_STAT, kinds)


def add_io(collected: Collected, level: Level, sys: Path) -> bool:
    """Read what was read from and written to each device; whether the I/O controller is there."""
    # What counts the cgroups below too, on kernels that can.
    path = next(
        (path for name in _BYTES if (path := level.directory / name).exists()), level.directory / _BYTES[-1]
    )
    with source(collected, path):
        samples: dict[str, dict[tuple[str, ...], float]] = {direction: {} for direction in _DIRECTIONS}
        for line in read_existing(path).splitlines():
            # `8:0 Read 4096`; a device has further kinds, and the whole a total.
            words = line.split()
            if len(words) == 3 and words[1] in _DIRECTIONS:
                samples[words[1]][device_name(words[0], sys),] = parse_count(words[2], path, words[0])
        for direction, spec in _DIRECTIONS.items():
            collected.add_family(spec, samples[direction])
    return path.exists()
