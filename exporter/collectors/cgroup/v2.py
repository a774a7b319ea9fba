"""Cgroup v2: reads the files of the unified hierarchy.

Used in the sidecar by the cgroup collector, within one pass. A hierarchy comes in; families go into the block,
and each function gives the cgroup it has read. No threads, no state.

Source: Documentation/admin-guide/cgroup-v2.rst.
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
    MEMORY_HIGH,
    MEMORY_LIMIT,
    MEMORY_PEAK,
    MEMORY_STAT,
    MEMORY_WORKING_SET,
)
from exporter.collectors.cgroup.tree import (
    Hierarchy,
    Level,
    add_count,
    add_limit,
    cpu_limit,
    device_name,
    limit_in,
)
from exporter.collectors.kernel_files import named_values, parse_count, read_existing, source
from exporter.families import Collected, FamilySpec

MICROSECONDS_PER_SECOND = 1e6

_KINDS = ("anon", "file", "shmem", "kernel", "slab")
_EVENTS = ("low", "high", "max", "oom", "oom_kill", "oom_group_kill")
_IO = {IO_READ: "rbytes", IO_WRITTEN: "wbytes"}


def add_cpu(collected: Collected, hierarchy: Hierarchy) -> Level:
    """Read limit, use and throttling, where the tightest limit stands: only there is it counted."""
    level = add_limit(collected, CPU_LIMIT, hierarchy, cpu_limit) or hierarchy.levels[0]
    path = level.directory / "cpu.stat"
    with source(collected, path):
        values = named_values(read_existing(path), " ")
        usage: dict[tuple[str, ...], float] = {
            (mode,): parse_count(values[f"{mode}_usec"], path, mode) / MICROSECONDS_PER_SECOND
            for mode in ("user", "system")
        }
        collected.add_family(CPU_USAGE, usage)
        if "nr_periods" not in values:
            collected.unsupported.append(f"{path}: no nr_periods, the CPU controller is off")
            return level
        collected.add(CPU_PERIODS, parse_count(values["nr_periods"], path))
        collected.add(CPU_THROTTLED_PERIODS, parse_count(values["nr_throttled"], path))
        collected.add(CPU_THROTTLED, parse_count(values["throttled_usec"], path) / MICROSECONDS_PER_SECOND)
    return level


def add_memory(collected: Collected, hierarchy: Hierarchy) -> Level | None:
    """Read limits, use and events of memory, where the tightest limit stands; None where none is counted."""
    high = add_limit(collected, MEMORY_HIGH, hierarchy, limit_in("memory.high"))
    level = add_limit(collected, MEMORY_LIMIT, hierarchy, limit_in("memory.max")) or high
    level = level or hierarchy.lowest("memory.current")
    if not add_count(collected, MEMORY_CURRENT, level, "memory.current"):
        return None  # the root of all
    add_count(collected, MEMORY_PEAK, level, "memory.peak")
    path = level.directory / "memory.stat"
    with source(collected, path):
        values = named_values(read_existing(path), " ")
        current = parse_count(level.read("memory.current") or "", level.directory, "memory.current")
        collected.add(MEMORY_WORKING_SET, max(0, current - parse_count(values["inactive_file"], path)))
        kinds: dict[tuple[str, ...], float] = {
            (name,): parse_count(values[name], path, name) for name in _KINDS if name in values
        }
        collected.add_family(MEMORY_STAT, kinds)
    path = level.directory / "memory.events"
    with source(collected, path):
        values = named_values(read_existing(path), " ")
        events: dict[tuple[str, ...], float] = {
            (event,): parse_count(values[event], path, event) for event in _EVENTS if event in values
        }
        collected.add_family(MEMORY_EVENTS, events)
    return level


def add_io(collected: Collected, level: Level, sys: Path) -> bool:
    """Read what was read from and written to each device; whether the I/O controller is there."""
    path = level.directory / "io.stat"
    with source(collected, path):
        samples: dict[FamilySpec, dict[tuple[str, ...], float]] = {spec: {} for spec in _IO}
        for line in read_existing(path).splitlines():
            # A device without statistics is a bare number, on some kernels without the end of its line.
            words = line.split()
            counts = dict(word.split("=", 1) for word in words if "=" in word)
            if counts:
                device = next(word for word in reversed(words) if "=" not in word)
                for spec, name in _IO.items():
                    samples[spec][device_name(device, sys),] = parse_count(counts[name], path, device, name)
        for spec, values in samples.items():
            collected.add_family(spec, values)
    return path.exists()
