"""Cgroup: the job's own limits on CPU and memory, and how near it is to them. The job's cgroup is the exporter's own.

Limits often stand further up (Slurm puts those of a step on its parent), so the tightest on the way up counts, and what
counts against it is read where it stands. A cgroup namespace shows paths from its own root; without one the path is the
host's, and a container sees only the part of the tree that mountinfo names as the root of the mount.
Source: cgroup-v2.rst, cgroup-v1/{memory,cpuacct}.rst, sched-bwc.rst, man 7 cgroups.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from exporter.collectors.host.pressure import total_seconds
from exporter.collectors.kernel_files import (
    Mount,
    named_counts,
    parse_mounts,
    printable,
    procfs,
    read_file,
    read_optional,
    source,
    visible,
)
from exporter.families import Collected, FamilySpec, table

UNIFIED = ""
"""The name of cgroup v2 beside the controllers of v1, as in /proc/self/cgroup."""
CONTROLLERS = frozenset(("cpu", "cpuacct", "memory"))
"""Those of v1 that are read."""
NO_LIMIT = 2**62
"""From here on a number is the kernel's word for none (v1: the largest page count)."""

SPECS = table("""
cgroup_info{version,path,scope}: Which cgroup the families of a resource (scope: cpu, memory) are of: the
    one with the tightest limit on the way up from the exporter's own, or without limits the exporter's own.
    <- /proc/self/cgroup, mountinfo
cgroup_cpu_limit_cpus: CPUs' worth of time that the job may use. Absent without a limit. <- v2 cpu.max quota
    / period; v1 cpu.cfs_quota_us / cpu.cfs_period_us
cgroup_cpu_usage_seconds_total{mode}: CPU time used by mode (user, system), which add up to all of it. <- v2
    cpu.stat user_usec, system_usec; v1 cpuacct.stat user, system
cgroup_cpu_periods_total: Periods of the limit in which something ran. Absent where the CPU controller is
    off. <- v2 cpu.stat nr_periods; v1 cpu.stat nr_periods
cgroup_cpu_throttled_periods_total: Periods in which the limit stopped the job. Absent where the CPU
    controller is off. <- v2 cpu.stat nr_throttled; v1 cpu.stat nr_throttled
cgroup_cpu_throttled_seconds_total: Time that CPUs stood still because of the limit. Absent where the CPU
    controller is off. <- v2 cpu.stat throttled_usec / 1e6; v1 cpu.stat throttled_time / 1e9
cgroup_memory_current_bytes: Memory that counts against the limit, page cache included. <- v2
    memory.current; v1 memory.usage_in_bytes
cgroup_memory_limit_bytes: Memory at which the kernel kills. Absent without a limit. <- v2 memory.max; v1
    memory.stat hierarchical_memory_limit
cgroup_memory_high_bytes: Memory at which the kernel slows the job down to get some back. Absent without
    such a limit, and in v1. <- v2 memory.high
cgroup_memory_working_set_bytes: Memory that cannot be had back by dropping files nobody has used lately;
    what Kubernetes goes by. <- v2 memory.current - memory.stat inactive_file; v1 memory.usage_in_bytes -
    memory.stat total_inactive_file
cgroup_memory_stat_bytes{kind}: Memory by kind: anon (no file behind it), file (page cache, shared memory
    included), shmem (tmpfs and /dev/shm), kernel, slab (part of kernel). A kind is absent where the kernel
    does not say. <- v2 memory.stat; v1 memory.stat total_rss, total_cache, total_shmem
cgroup_memory_events_total{event}: Events of the cgroup and all below it: below low, over high, at the limit
    (max), out of memory (oom), processes killed (oom_kill), cgroups killed as a whole (oom_group_kill). In
    v1 only max and oom_kill, the latter of the cgroups on the way only. An event is absent where the kernel
    does not count it. <- v2 memory.events; v1 memory.failcnt, memory.oom_control oom_kill
cgroup_pressure_io_waiting_seconds_total: Time in which at least one thread of the job had to wait for I/O.
    Absent without pressure accounting, and in v1 alone. <- v2 io.pressure some total
""")
INFO, SPEC = SPECS[0], {spec.name.removeprefix("cgroup_"): spec for spec in SPECS}

KINDS = {
    "1": {"anon": "total_rss", "file": "total_cache", "shmem": "total_shmem"},
    "2": {kind: kind for kind in ("anon", "file", "shmem", "kernel", "slab")},
}
"""By version, what memory.stat calls a kind of memory."""
EVENTS = ("low", "high", "max", "oom", "oom_kill", "oom_group_kill")


class Level(NamedTuple):
    """A cgroup: its path as /proc/<pid>/cgroup shows it, and where its files are."""

    path: str
    directory: Path

    def read(self, name: str) -> str | None:
        """Read one of its files; None when there is none."""
        return read_optional(self.directory / name)


class Hierarchy(NamedTuple):
    """A cgroup and all above it that can be seen."""

    version: str
    levels: tuple[Level, ...]  # from the cgroup itself up to the mount

    def at(self, path: str) -> Level:
        """Find a cgroup on the way by its path; the cgroup itself where there is none of that path."""
        return next((level for level in self.levels if level.path == path), self.levels[0])

    def tightest(self, limit_of: Callable[[Level], float | None]) -> tuple[float, Level] | None:
        """Find the smallest limit on the way up and where it stands, the lowest of several; None without any.

        The cgroup's own files are not enough: Slurm puts a step's limits on its parent.
        """
        found = [(limit, level) for level in self.levels if (limit := limit_of(level)) is not None]
        return min(found, key=lambda each: each[0], default=None)


class CgroupTree:
    """Finds the cgroup of this process in every hierarchy that is mounted."""

    def __init__(self, *, proc: Path | None = None, sys: Path) -> None:
        self._own = (proc or procfs()) / "self"
        self._sys = sys

    def hierarchies(self) -> Mapping[str, Hierarchy]:
        """Look where the process is now, by controller of v1, and `UNIFIED` for v2; without what cannot be seen."""
        groups: dict[str, str] = {}
        membership = read_optional(self._own / "cgroup") or ""
        for line in filter(None, membership.split("\n")):  # `4:cpu,cpuacct:/path`, `0::/path`
            _, controllers, own = line.split(":", 2)
            # A cgroup that was removed under the process keeps its name, with a note behind it.
            groups.update(dict.fromkeys(controllers.split(","), own.removesuffix(" (deleted)")))
        found: dict[str, Hierarchy] = {}
        mountinfo = read_optional(self._own / "mountinfo") or ""
        for mount in visible(parse_mounts(mountinfo, ("cgroup", "cgroup2"))):
            version = "1" if mount.fstype == "cgroup" else "2"
            for controller in (UNIFIED,) if version == "2" else sorted(mount.options & CONTROLLERS):
                names = _below(groups[controller], mount.root) if controller in groups else None
                if names is not None and controller not in found:
                    levels = self._levels(names, mount)
                    if levels:
                        found[controller] = Hierarchy(version, levels)
        return found

    def _levels(self, names: Sequence[str], mount: Mount) -> tuple[Level, ...]:
        directory = Path(mount.path)
        if directory.is_relative_to("/sys"):
            directory = self._sys / directory.relative_to("/sys")
        root = _names(mount.root)
        places = [(names[:depth], directory.joinpath(*names[:depth])) for depth in range(len(names), -1, -1)]
        return tuple(
            Level(printable("/" + "/".join((*root, *below))), place)
            for below, place in places
            if place.is_dir()
        )


def limit_in(name: str) -> Callable[[Level], int | None]:
    """Make the reader of a limit; it gives None for `max`, for what stands for it in v1, and where there is no file."""

    def read(level: Level) -> int | None:
        text = level.read(name)
        return None if text is None or text == "max" or int(text) >= NO_LIMIT else int(text)

    return read


def cpu_limit(level: Level) -> float | None:
    """Read the limit on CPU time that stands at a cgroup of either version, in CPUs; None without one."""
    text = level.read("cpu.max")
    if text is None:
        text = f"{level.read('cpu.cfs_quota_us') or 'max'} {level.read('cpu.cfs_period_us')}"
    quota, period = text.split()
    return None if quota in {"max", "-1"} else int(quota) / int(period)


def cpu_quota(tree: CgroupTree) -> float | None:
    """Find the tightest CPU limit on the way from this process's cgroup up to the root, in CPUs; None without one."""
    found = tree.hierarchies()
    hierarchy = found.get("cpu", found.get(UNIFIED))
    tightest = None if hierarchy is None else hierarchy.tightest(cpu_limit)
    return None if tightest is None else tightest[0]


def _below(group: str, root: str) -> Sequence[str] | None:
    """The names from a mount's root down to a cgroup; None where the way cannot be known."""
    names, above = _names(group), _names(root)
    rest = names[len(above) :]
    if names[: len(above)] == above and ".." not in rest:
        return rest
    if ".." in names and ".." not in above:
        return ()  # outside of the namespace's root: of what can be seen, only that is known
    return None  # another part of the tree is mounted, or the host's: which of it is ours, nobody says


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name]


class CgroupCollector:
    """Reads the cgroup that limits the job."""

    name = "cgroup"
    specs = SPECS

    def __init__(self, *, proc: Path | None = None, sys: Path = Path("/sys")) -> None:
        self._tree = CgroupTree(proc=proc, sys=sys)

    def collect(self) -> Collected:
        """Read the sources once."""
        collected = Collected()
        with source(collected, "cgroup"):
            found = self._tree.hierarchies()
            unified, memory = found.get(UNIFIED), ""
            for scope in ("cpu", "memory"):
                hierarchy = found.get(scope, unified)  # where v1 has the controller, v2 has not (hybrid)
                if hierarchy is None:
                    collected.unsupported.append(
                        f"no cgroup of {scope} can be seen: none, or only those of others"
                    )
                    continue
                if scope == "cpu":
                    place = _add_cpu(collected, hierarchy, found.get("cpuacct"))
                else:
                    place = memory = _add_memory(collected, hierarchy)
                if place:
                    collected.add(INFO, 1, hierarchy.version, place, scope)
            if unified is None:
                collected.unsupported.append("no pressure of cgroups: no cgroup v2 can be seen")
                return collected
            path = unified.at(memory).directory / "io.pressure"
            with source(collected, path):
                waiting = total_seconds(read_file(path), "some")
                collected.add(SPEC["pressure_io_waiting_seconds_total"], waiting)
        return collected


def _add_limit(
    collected: Collected, spec: FamilySpec, hierarchy: Hierarchy, limit_of: Callable[[Level], float | None]
) -> Level | None:
    """Publish the tightest limit on the way up; where it stands, None without any."""
    with source(collected, f"{spec.source} of {hierarchy.levels[0].directory}"):
        tightest = hierarchy.tightest(limit_of)
        if tightest is not None:
            collected.add(spec, tightest[0])
            return tightest[1]
    return None


def _add_cpu(collected: Collected, hierarchy: Hierarchy, cpuacct: Hierarchy | None) -> str:
    """Read limit, throttling and use where the tightest limit stands, only there is it counted; its path."""
    level = _add_limit(collected, SPEC["cpu_limit_cpus"], hierarchy, cpu_limit) or hierarchy.levels[0]
    path = level.directory / "cpu.stat"
    with source(collected, path):
        counts = named_counts(read_file(path))
        for mode in ("user", "system"):
            if hierarchy.version == "2":
                collected.add(SPEC["cpu_usage_seconds_total"], counts[f"{mode}_usec"] / 1e6, mode)
            elif cpuacct is not None:  # mostly the same mount
                ticks = named_counts(read_file(cpuacct.at(level.path).directory / "cpuacct.stat"))
                collected.add(SPEC["cpu_usage_seconds_total"], ticks[mode] / os.sysconf("SC_CLK_TCK"), mode)
        if "nr_periods" in counts:
            collected.add(SPEC["cpu_periods_total"], counts["nr_periods"])
            collected.add(SPEC["cpu_throttled_periods_total"], counts["nr_throttled"])
            nanoseconds = counts.get("throttled_time")  # v1
            seconds = counts["throttled_usec"] / 1e6 if nanoseconds is None else nanoseconds / 1e9
            collected.add(SPEC["cpu_throttled_seconds_total"], seconds)
        else:
            collected.unsupported.append(f"{path}: no nr_periods, the CPU controller is off")
    return level.path


def _add_memory(collected: Collected, hierarchy: Hierarchy) -> str:
    """Read limits, use and events where the tightest limit stands; its path, "" where none is counted."""
    old = hierarchy.version == "1"
    if old:
        level = _add_old_limit(collected, hierarchy)
    else:
        high = _add_limit(collected, SPEC["memory_high_bytes"], hierarchy, limit_in("memory.high"))
        limited = _add_limit(collected, SPEC["memory_limit_bytes"], hierarchy, limit_in("memory.max")) or high
        # Where the controller is off, the next cgroup on the way up counts.
        counted = (each for each in hierarchy.levels if (each.directory / "memory.current").exists())
        level = limited or next(counted, hierarchy.levels[0])
    path = level.directory / ("memory.usage_in_bytes" if old else "memory.current")
    if not path.exists():
        collected.unsupported.append(f"no {path}")  # the root of all
        return ""
    with source(collected, path):
        current = int(read_file(path))
        collected.add(SPEC["memory_current_bytes"], current)
        stat = named_counts(read_file(level.directory / "memory.stat"))
        inactive = stat["total_inactive_file" if old else "inactive_file"]
        collected.add(SPEC["memory_working_set_bytes"], max(0, current - inactive))
        for kind, name in KINDS[hierarchy.version].items():
            collected.add(SPEC["memory_stat_bytes"], stat.get(name), kind)
    with source(collected, f"events of {level.directory}"):
        if old:
            events = {"max": int(level.read("memory.failcnt") or 0)}
            # A kill is counted where the victim was, not above.
            controls = [named_counts(each.read("memory.oom_control") or "") for each in hierarchy.levels]
            if any("oom_kill" in counts for counts in controls):
                events["oom_kill"] = sum(counts.get("oom_kill", 0) for counts in controls)
        else:
            events = named_counts(read_file(level.directory / "memory.events"))
        for event in EVENTS:
            collected.add(SPEC["memory_events_total"], events.get(event), event)
    return level.path


def _add_old_limit(collected: Collected, hierarchy: Hierarchy) -> Level:
    """The kernel's own answer also knows of limits above the mount, and of those that do not apply here."""
    own = hierarchy.levels[0]
    with source(collected, own.directory / "memory.stat"):
        limit = named_counts(read_file(own.directory / "memory.stat")).get("hierarchical_memory_limit")
        if limit is not None and limit < NO_LIMIT:
            collected.add(SPEC["memory_limit_bytes"], limit)
            own_limit = limit_in("memory.limit_in_bytes")
            return next((each for each in hierarchy.levels if own_limit(each) == limit), hierarchy.levels[-1])
    return own
