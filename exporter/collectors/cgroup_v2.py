"""Cgroup v2: reads the files of the unified hierarchy.

Used in the sidecar by the cgroup collector, within one pass. A hierarchy comes in; families go into the draft,
and each function gives the cgroup it has read. No threads, no state.

Source: Documentation/admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

from functools import partial
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
    MEMORY_HIGH,
    MEMORY_LIMIT,
    MEMORY_PEAK,
    MEMORY_STAT,
    MEMORY_WORKING_SET,
    PRESSURE,
    SWAP_CURRENT,
    SWAP_LIMIT,
)
from exporter.collectors.cgroup_tree import Hierarchy, Level, add_count, limit
from exporter.collectors.draft import Draft
from exporter.collectors.family import FamilySpec
from exporter.collectors.kernel_files import named_values, parse_count, refuse
from exporter.errors import CollectError

MICROSECONDS_PER_SECOND = 1e6

CPUSET_FILES = ("cpuset.cpus.effective",)

_TYPES = ("anon", "file", "shmem", "kernel", "slab")
_EVENTS = ("low", "high", "max", "oom", "oom_kill", "oom_group_kill")
_IO = {"rbytes": IO_READ, "wbytes": IO_WRITTEN}


def add_cpu(draft: Draft, hierarchy: Hierarchy) -> Level:
    """Read limit, use and throttling, where the tightest limit stands: only there is it counted."""
    level = hierarchy.levels[0]
    with draft.part():
        tightest = hierarchy.tightest(cpus)
        if tightest is not None:
            level = tightest[1]
            draft.add(CPU_LIMIT, tightest[0])
    with draft.part():
        path = level.directory / "cpu.stat"
        text = level.read("cpu.stat")
        if text is None:
            draft.unsupported(f"no {path}")
            return level
        values = named_values(text, " ")
        with draft.part():
            usage: dict[tuple[str, ...], float] = {
                (mode,): parse_count(values.get(f"{mode}_usec", ""), path, mode) / MICROSECONDS_PER_SECOND
                for mode in ("user", "system")
            }
            draft.add_family(CPU_USAGE, usage)
        if "nr_periods" not in values:
            draft.unsupported(f"{path}: no nr_periods, the CPU controller is off")
            return level
        for spec, name in ((CPU_PERIODS, "nr_periods"), (CPU_THROTTLED_PERIODS, "nr_throttled")):
            with draft.part():
                draft.add(spec, parse_count(values.get(name, ""), path, name))
        with draft.part():
            microseconds = parse_count(values.get("throttled_usec", ""), path, "throttled_usec")
            draft.add(CPU_THROTTLED, microseconds / MICROSECONDS_PER_SECOND)
    return level


def add_memory(draft: Draft, hierarchy: Hierarchy) -> Level | None:
    """Read limits, use and events of memory, where the tightest limit stands; None where none is counted."""
    level = hierarchy.lowest("memory.current")
    for spec, name in ((MEMORY_HIGH, "memory.high"), (MEMORY_LIMIT, "memory.max")):
        with draft.part():
            tightest = hierarchy.tightest(partial(_limit, name=name))
            if tightest is not None:
                level = tightest[1]
                draft.add(spec, tightest[0])
    if not add_count(draft, MEMORY_CURRENT, level, "memory.current"):
        return None  # the root of all
    with draft.part():
        swap = hierarchy.tightest(partial(_limit, name="memory.swap.max"))
        if swap is not None:
            draft.add(SWAP_LIMIT, swap[0])
    with draft.part():
        _add_memory_stat(draft, level)
    add_count(draft, MEMORY_PEAK, level, "memory.peak")
    add_count(draft, SWAP_CURRENT, level, "memory.swap.current")
    with draft.part():
        path = level.directory / "memory.events"
        text = level.read("memory.events")
        if text is None:
            draft.unsupported(f"no {path}")
        else:
            counts = named_values(text, " ")
            events: dict[tuple[str, ...], float] = {
                (event,): parse_count(counts[event], path, event) for event in _EVENTS if event in counts
            }
            draft.add_family(MEMORY_EVENTS, events)
    return level


def add_io(draft: Draft, level: Level, sys: Path) -> bool:
    """Read what was read from and written to each device; whether the I/O controller is there."""
    path = level.directory / "io.stat"
    with draft.part():
        text = level.read("io.stat")
        if text is None:
            draft.unsupported(f"no {path}")
            return False
        samples: dict[FamilySpec, dict[tuple[str, ...], float]] = {
            IO_READ: {},
            IO_WRITTEN: {},
            IO_OPERATIONS: {},
        }
        for line in text.splitlines():
            # A device without statistics is a bare number, on some kernels without the end of its line.
            device, counts = "", {}
            for word in line.split():
                name, is_count, value = word.partition("=")
                if is_count:
                    counts[name] = value
                else:
                    device = word
            if not counts:
                continue
            label = (device_name(device, sys),)
            for name, spec in _IO.items():
                samples[spec][label] = parse_count(counts.get(name, ""), path, device, name)
            samples[IO_OPERATIONS][label] = sum(
                parse_count(counts.get(name, ""), path, device, name) for name in ("rios", "wios")
            )
        for spec in (IO_READ, IO_WRITTEN, IO_OPERATIONS):
            draft.add_family(spec, samples[spec])
    return True


def add_pressure(draft: Draft, resource: str, level: Level) -> None:
    """Read how long the job waited for a resource."""
    path = level.directory / f"{resource}.pressure"
    with draft.part():
        text = level.read(f"{resource}.pressure")
        if text is None:
            draft.unsupported(f"no {path}")
            return
        lines = {name: rest for name, _, rest in (line.partition(" ") for line in text.splitlines())}
        for line in ("some", "full"):
            # Kernels before 5.13 have no full line for the CPU.
            if line in lines or line == "some" or resource != "cpu":
                with draft.part():
                    _, found, total = lines.get(line, "").rpartition("total=")
                    if not found:
                        refuse(lines.get(line, ""), (path, line), "avg10= avg60= avg300= total=")
                    microseconds = parse_count(total, path, line)
                    draft.add(PRESSURE[resource, line], microseconds / MICROSECONDS_PER_SECOND)


def cpus(level: Level) -> float | None:
    """Read the limit on CPU time that stands at a cgroup, in CPUs; None without one.

    Raises:
        CollectError: It cannot be read.
    """
    path = level.directory / "cpu.max"
    text = level.read("cpu.max")
    if text is None:
        return None
    quota, _, period = text.partition(" ")
    if quota == "max":
        return None
    if parse_count(period, path) == 0:
        raise CollectError(f"{path}: a period of 0", reason="malformed")
    return parse_count(quota, path) / parse_count(period, path)


def device_name(number: str, sys: Path) -> str:
    """Give the name of a block device, or its number (`8:0`) where sysfs does not know it."""
    try:
        return (sys / "dev/block" / number).readlink().name.replace("!", "/")
    except (OSError, ValueError):
        return number


def _add_memory_stat(draft: Draft, level: Level) -> None:
    path = level.directory / "memory.stat"
    text, current = level.read("memory.stat"), level.read("memory.current")
    if text is None or current is None:
        draft.unsupported(f"no {path}")
        return
    values = named_values(text, " ")
    with draft.part():
        inactive = parse_count(values.get("inactive_file", ""), path, "inactive_file")
        total = parse_count(current, level.directory, "memory.current")
        draft.add(MEMORY_WORKING_SET, max(0, total - inactive))
    with draft.part():
        types: dict[tuple[str, ...], float] = {
            (name,): parse_count(values[name], path, name) for name in _TYPES if name in values
        }
        draft.add_family(MEMORY_STAT, types)


def _limit(level: Level, name: str) -> int | None:
    return limit(level.read(name), level.directory, name)
