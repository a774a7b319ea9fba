"""Cgroup: the job's own limits on CPU, memory, I/O and processes, and how near it is to them.

Used in the sidecar. The files of cgroup v2, v1 or both (hybrid) come in. No threads. It holds the highest CPU
times of v1.

The job's cgroup is the exporter's own: `run` starts both in one, and a container has one. Limits often stand
further up (Slurm puts those of a step on its parent), so the tightest on the way up counts, and what counts
against it is read at the cgroup where it stands: `cgroup_info` tells which. Where no limit stands, the
exporter's own cgroup is read. When a limit elsewhere becomes the tightest, counters go on with those of
another cgroup.
"""

from __future__ import annotations

from pathlib import Path

from exporter.collectors.cgroup import v1, v2
from exporter.collectors.cgroup.families import INFO, PIDS, PIDS_LIMIT, PRESSURE, SPECS
from exporter.collectors.cgroup.tree import (
    UNIFIED,
    CgroupTree,
    Hierarchy,
    Level,
    add_count,
    add_limit,
    limit_in,
)
from exporter.collectors.host.pressure import total_seconds
from exporter.collectors.kernel_files import HighWater, read_existing, source
from exporter.families import Collected


class CgroupCollector:
    """Reads the cgroup that limits the job.

    Args:
        proc: Where procfs is mounted; None asks psutil.
        sys: Where sysfs is mounted.
        path: Another cgroup than the exporter's own, as /proc/<pid>/cgroup shows it, or its directory.
    """

    name = "cgroup"
    specs = SPECS

    def __init__(
        self, *, proc: Path | None = None, sys: Path = Path("/sys"), path: Path | None = None
    ) -> None:
        self._tree = CgroupTree(proc=proc, sys=sys, path=None if path is None else str(path))
        self._sys = sys
        self._highest = HighWater()

    def collect(self) -> Collected:
        """Read the sources once."""
        collected = Collected()
        with source(collected, "cgroup"):
            found = self._tree.hierarchies()
            if not found:
                collected.unsupported.append(
                    "no cgroup can be seen: none is mounted, or only those of others"
                )
                return collected
            unified = found.get(UNIFIED)
            levels: dict[str, tuple[str, Level]] = {}
            for resource in ("cpu", "memory", "io", "pids"):
                # Where v1 has the controller, v2 has not (hybrid).
                hierarchy = found.get("blkio" if resource == "io" else resource, unified)
                if hierarchy is None:
                    collected.unsupported.append(
                        f"no {resource} controller of cgroup v1 can be seen, and no cgroup v2"
                    )
                    continue
                memory = levels["memory"][1] if "memory" in levels else None
                level = self._add(collected, resource, hierarchy, found.get("cpuacct"), memory)
                if level is not None:
                    levels[resource] = (hierarchy.version, level)
            _add_pressure(collected, unified, {resource: level for resource, (_, level) in levels.items()})
            collected.add_family(
                INFO, {(version, level.path, scope): 1 for scope, (version, level) in levels.items()}
            )
        return collected

    def _add(
        self,
        collected: Collected,
        resource: str,
        hierarchy: Hierarchy,
        cpuacct: Hierarchy | None,
        memory: Level | None,
    ) -> Level | None:
        old = hierarchy.version == "1"
        if resource == "cpu":
            if old:
                return v1.add_cpu(collected, hierarchy, cpuacct, self._highest)
            return v2.add_cpu(collected, hierarchy)
        if resource == "memory":
            return v1.add_memory(collected, hierarchy) if old else v2.add_memory(collected, hierarchy)
        if resource == "io":
            # I/O has no limit that everybody sets: it is read where memory is, if that is on the way.
            place = (hierarchy.at(memory.path) if memory is not None else None) or hierarchy.levels[0]
            add_io = v1.add_io if old else v2.add_io
            return place if add_io(collected, place, self._sys) else None
        level = add_limit(collected, PIDS_LIMIT, hierarchy, limit_in("pids.max"))
        level = level or hierarchy.lowest("pids.current")
        return level if add_count(collected, PIDS, level, "pids.current") else None


def _add_pressure(collected: Collected, unified: Hierarchy | None, levels: dict[str, Level]) -> None:
    if unified is None:
        collected.unsupported.append("no pressure of cgroups: no cgroup v2 can be seen")
        return
    for resource, spec in PRESSURE.items():
        place = levels.get(resource)
        level = (unified.at(place.path) if place is not None else None) or unified.levels[0]
        path = level.directory / f"{resource}.pressure"
        with source(collected, path):
            collected.add(spec, total_seconds(read_existing(path), "some", path))
