"""Cgroup v1: reads the files of separate hierarchies, one or several controllers each.

Used in the sidecar by the cgroup collector, within one pass. Hierarchies come in; families go into the draft,
and each function gives the cgroup it has read. No threads.

Source: Documentation/admin-guide/cgroup-v1/{memory,cpuacct,blkio-controller,pids}.rst;
Documentation/scheduler/sched-bwc.rst.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from exporter.collectors.cgroup_families import (
    CPU_LIMIT,
    CPU_PERIODS,
    CPU_THROTTLED,
    CPU_THROTTLED_PERIODS,
    CPU_USAGE,
    IO_OPERATIONS,
    IO_READ,
    IO_WRITTEN,
    MEMORY_CURRENT,
    MEMORY_EVENTS,
    MEMORY_LIMIT,
    MEMORY_PEAK,
    MEMORY_STAT,
    MEMORY_WORKING_SET,
    SWAP_CURRENT,
    SWAP_LIMIT,
)
from exporter.collectors.cgroup_tree import NO_LIMIT, Hierarchy, Level, add_count, limit, line_count
from exporter.collectors.cgroup_v2 import device_name
from exporter.collectors.draft import Draft
from exporter.collectors.high_water import HighWater
from exporter.collectors.kernel_files import named_values, parse_count, parse_signed, refuse
from exporter.errors import CollectError

NANOSECONDS_PER_SECOND = 1e9

CPUSET_FILES = ("cpuset.effective_cpus", "cpuset.cpus")

_TYPES = {"anon": "total_rss", "file": "total_cache", "shmem": "total_shmem"}
_BYTES = ("blkio.throttle.io_service_bytes_recursive", "blkio.throttle.io_service_bytes")
_OPERATIONS = ("blkio.throttle.io_serviced_recursive", "blkio.throttle.io_serviced")
_DIRECTIONS = {"Read": IO_READ, "Write": IO_WRITTEN}


def add_cpu(draft: Draft, cpu: Hierarchy, cpuacct: Hierarchy | None, marks: HighWater) -> Level:
    """Read limit and throttling where the tightest limit stands, and the use there or as near as possible.

    Args:
        draft: Takes the families.
        cpu: Where the limits are.
        cpuacct: Where the use is counted; the same place when both are mounted together.
        marks: Keeps modes from stepping back, whose proportion is coarse.
    """
    level = cpu.levels[0]
    with draft.part():
        tightest = cpu.tightest(cpus)
        if tightest is not None:
            level = tightest[1]
            draft.add(CPU_LIMIT, tightest[0])
    with draft.part():
        path = level.directory / "cpu.stat"
        text = level.read("cpu.stat")
        if text is None:
            draft.unsupported(f"no {path}")
        else:
            values = named_values(text, " ")
            for spec, name in ((CPU_PERIODS, "nr_periods"), (CPU_THROTTLED_PERIODS, "nr_throttled")):
                with draft.part():
                    draft.add(spec, parse_count(values.get(name, ""), path, name))
            with draft.part():
                nanoseconds = parse_count(values.get("throttled_time", ""), path, "throttled_time")
                draft.add(CPU_THROTTLED, nanoseconds / NANOSECONDS_PER_SECOND)
    with draft.part():
        if cpuacct is None:
            draft.unsupported("no cpuacct controller of cgroup v1 can be seen")
        else:
            _add_usage(draft, cpuacct.at(level.path) or cpuacct.levels[0], marks)
    return level


def add_memory(draft: Draft, hierarchy: Hierarchy) -> Level:
    """Read limits, use and events of memory, where the tightest limit stands."""
    own = hierarchy.levels[0]
    level = own
    with draft.part():
        # The kernel's own answer also knows of limits above the mount, and of those that do not apply here
        # (use_hierarchy 0).
        tightest = line_count(own, "hierarchical_memory_limit", "memory.stat")
        if tightest is not None and tightest < NO_LIMIT:
            level = next(
                (each for each in hierarchy.levels if _limit(each) == tightest), hierarchy.levels[-1]
            )
            draft.add(MEMORY_LIMIT, tightest)
            with_swap = line_count(own, "hierarchical_memsw_limit", "memory.stat")
            if with_swap is not None and with_swap < NO_LIMIT:
                draft.add(SWAP_LIMIT, max(0, with_swap - tightest))
    with draft.part():
        _add_memory_use(draft, level)
    add_count(draft, MEMORY_PEAK, level, "memory.max_usage_in_bytes")
    with draft.part():
        events: dict[tuple[str, ...], float] = {}
        failures = level.read("memory.failcnt")
        if failures is not None:
            events["max",] = parse_count(failures, level.directory, "memory.failcnt")
        # A kill is counted where the victim was, not above.
        kills = [line_count(each, "oom_kill", "memory.oom_control") for each in hierarchy.levels]
        if any(kill is not None for kill in kills):
            events["oom_kill",] = sum(kill or 0 for kill in kills)
        draft.add_family(MEMORY_EVENTS, events)
    return level


def add_io(draft: Draft, level: Level, sys: Path) -> bool:
    """Read what was read from and written to each device; whether the I/O controller is there."""
    with draft.part():
        sizes, counts = _first(level, _BYTES), _first(level, _OPERATIONS)
        if sizes is None or counts is None:
            draft.unsupported(f"no {level.directory / _BYTES[-1]}")
            return False
        samples: dict[str, dict[tuple[str, ...], float]] = {direction: {} for direction in _DIRECTIONS}
        for (device, direction), size in _by_device(sizes, level).items():
            samples[direction][device_name(device, sys),] = size
        operations: dict[tuple[str, ...], float] = {}
        for (device, _), count in _by_device(counts, level).items():
            label = (device_name(device, sys),)
            operations[label] = operations.get(label, 0) + count
        for direction, spec in _DIRECTIONS.items():
            draft.add_family(spec, samples[direction])
        draft.add_family(IO_OPERATIONS, operations)
    return True


def cpus(level: Level) -> float | None:
    """Read the limit on CPU time that stands at a cgroup, in CPUs; None without one.

    Raises:
        CollectError: It cannot be read.
    """
    path = level.directory / "cpu.cfs_quota_us"
    quota, period = level.read("cpu.cfs_quota_us"), level.read("cpu.cfs_period_us")
    if quota is None or period is None:
        return None
    microseconds = parse_signed(quota, path)
    if microseconds < 0:
        return None
    if parse_count(period, level.directory, "cpu.cfs_period_us") == 0:
        raise CollectError(f"{path}: a period of 0", reason="malformed")
    return microseconds / int(period)


def _add_usage(draft: Draft, level: Level, marks: HighWater) -> None:
    text, stat = level.read("cpuacct.usage"), level.read("cpuacct.stat")
    if text is None or stat is None:
        draft.unsupported(f"no {level.directory / 'cpuacct.usage'}")
        return
    seconds = parse_count(text, level.directory, "cpuacct.usage") / NANOSECONDS_PER_SECOND
    ticks = named_values(stat, " ")
    # The total is exact; of the modes old kernels know only at which of them the timer's ticks have come.
    user, system = (
        parse_count(ticks.get(mode, ""), level.directory, "cpuacct.stat", mode) for mode in ("user", "system")
    )
    of_system = seconds * system / (user + system) if user + system else 0.0
    modes = {"user": seconds - of_system, "system": of_system}
    draft.add_family(
        CPU_USAGE, {(mode,): marks.hold((level.path, mode), value) for mode, value in modes.items()}
    )


def _add_memory_use(draft: Draft, level: Level) -> None:
    text, stat = level.read("memory.usage_in_bytes"), level.read("memory.stat")
    if text is None or stat is None:
        draft.unsupported(f"no {level.directory / 'memory.usage_in_bytes'}")
        return
    values, path = named_values(stat, " "), level.directory / "memory.stat"
    with draft.part():
        current = parse_count(text, level.directory, "memory.usage_in_bytes")
        draft.add(MEMORY_CURRENT, current)
        inactive = parse_count(values.get("total_inactive_file", ""), path, "total_inactive_file")
        draft.add(MEMORY_WORKING_SET, max(0, current - inactive))
    with draft.part():
        types: dict[tuple[str, ...], float] = {
            (kind,): parse_count(values[name], path, name) for kind, name in _TYPES.items() if name in values
        }
        kernel = level.read("memory.kmem.usage_in_bytes")
        if kernel is not None:
            types["kernel",] = parse_count(kernel, level.directory, "memory.kmem.usage_in_bytes")
        draft.add_family(MEMORY_STAT, types)
    if "total_swap" not in values:
        draft.unsupported(f"{path}: no total_swap, swap is not accounted")
        return
    with draft.part():
        draft.add(SWAP_CURRENT, parse_count(values["total_swap"], path, "total_swap"))


def _limit(level: Level) -> int | None:
    return limit(level.read("memory.limit_in_bytes"), level.directory, "memory.limit_in_bytes")


def _first(level: Level, names: tuple[str, ...]) -> str | None:
    """Read the first of several files that there is: what counts the cgroups below, on kernels that can."""
    return next((text for name in names if (text := level.read(name)) is not None), None)


def _by_device(text: str, level: Level) -> Mapping[tuple[str, str], int]:
    """Split lines like `8:0 Read 4096`; a device has further kinds, and the whole a total."""
    found = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 3 and words[1] in _DIRECTIONS:
            found[words[0], words[1]] = parse_count(words[2], level.directory, "blkio", words[0])
        elif len(words) < 2:
            refuse(line, (level.directory, "blkio"), "lines like `8:0 Read 4096`")
    return found
