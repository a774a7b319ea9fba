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

from collections.abc import Mapping
from pathlib import Path

from exporter.collectors import cgroup_v1, cgroup_v2
from exporter.collectors.cgroup_families import (
    CPUSET_CPUS,
    INFO,
    PIDS,
    PIDS_LIMIT,
    PIDS_MAX_EVENTS,
    RESOURCES,
    SPECS,
)
from exporter.collectors.cgroup_tree import (
    UNIFIED,
    CgroupTree,
    Hierarchy,
    Level,
    add_count,
    limit,
    line_count,
)
from exporter.collectors.draft import Draft
from exporter.collectors.family import Collected
from exporter.collectors.high_water import HighWater
from exporter.collectors.kernel_files import FILE_REASONS, parse_list_length

_CONTROLLERS = ("cpu", "memory", "io", "pids", "cpuset")


class CgroupCollector:
    """Reads the cgroup that limits the job.

    Args:
        proc: Where procfs is mounted.
        sys: Where sysfs is mounted.
        path: Another cgroup than the exporter's own, as /proc/<pid>/cgroup shows it, or its directory.
    """

    name = "cgroup"
    specs = SPECS
    reasons = (*FILE_REASONS, "missing")

    def __init__(
        self, *, proc: Path = Path("/proc"), sys: Path = Path("/sys"), path: Path | None = None
    ) -> None:
        self._tree = CgroupTree(proc=proc, sys=sys, path=None if path is None else str(path))
        self._sys = sys
        self._marks = HighWater()

    def collect(self) -> Collected:
        """Read the sources once.

        Raises:
            CollectError: Nothing of them could be read, or there is no cgroup of the configured name.
        """
        draft = Draft()
        found = self._tree.hierarchies()
        if not found:
            draft.unsupported("no cgroup can be seen: none is mounted, or only those of others")
            return draft.finish()
        # Where v1 has the controller, v2 has not (hybrid).
        places = {
            resource: found.get("blkio" if resource == "io" else resource, found.get(UNIFIED))
            for resource in _CONTROLLERS
        }
        levels: dict[str, Level] = {}
        for resource, hierarchy in places.items():
            if hierarchy is None:
                draft.unsupported(f"no {resource} controller of cgroup v1 can be seen, and no cgroup v2")
                continue
            level = self._add(draft, resource, hierarchy, found, levels.get("memory"))
            if level is not None:
                levels[resource] = level
        self._add_pressure(draft, found.get(UNIFIED), levels)
        versions = {resource: hierarchy.version for resource, hierarchy in places.items() if hierarchy}
        draft.add_family(
            INFO, {(versions[resource], level.path, resource): 1 for resource, level in levels.items()}
        )
        return draft.finish()

    def _add(
        self,
        draft: Draft,
        resource: str,
        hierarchy: Hierarchy,
        found: Mapping[str, Hierarchy],
        memory: Level | None,
    ) -> Level | None:
        old = hierarchy.version == "1"
        if resource == "cpu":
            if old:
                return cgroup_v1.add_cpu(draft, hierarchy, found.get("cpuacct"), self._marks)
            return cgroup_v2.add_cpu(draft, hierarchy)
        if resource == "memory":
            return cgroup_v1.add_memory(draft, hierarchy) if old else cgroup_v2.add_memory(draft, hierarchy)
        if resource == "io":
            # I/O has no limit that everybody sets: it is read where memory is, if that is on the way.
            level = (hierarchy.at(memory.path) if memory is not None else None) or hierarchy.levels[0]
            add_io = cgroup_v1.add_io if old else cgroup_v2.add_io
            return level if add_io(draft, level, self._sys) else None
        if resource == "pids":
            return _add_pids(draft, hierarchy)
        return _add_cpuset(draft, hierarchy)

    def _add_pressure(self, draft: Draft, unified: Hierarchy | None, levels: dict[str, Level]) -> None:
        if unified is None:
            draft.unsupported("no pressure of cgroups: no cgroup v2 can be seen")
            return
        for resource in RESOURCES:
            place = levels.get(resource)
            level = (unified.at(place.path) if place is not None else None) or unified.levels[0]
            cgroup_v2.add_pressure(draft, resource, level)


def _add_pids(draft: Draft, hierarchy: Hierarchy) -> Level | None:
    level = hierarchy.lowest("pids.current")
    with draft.part():
        tightest = hierarchy.tightest(lambda each: limit(each.read("pids.max"), each.directory, "pids.max"))
        if tightest is not None:
            level = tightest[1]
            draft.add(PIDS_LIMIT, tightest[0])
    if not add_count(draft, PIDS, level, "pids.current"):
        return None
    with draft.part():
        refused = line_count(level, "max", "pids.events")
        if refused is not None:
            draft.add(PIDS_MAX_EVENTS, refused)
    return level


def _add_cpuset(draft: Draft, hierarchy: Hierarchy) -> Level | None:
    files = cgroup_v1.CPUSET_FILES if hierarchy.version == "1" else cgroup_v2.CPUSET_FILES
    with draft.part():
        # What a cgroup may use is within what those above it may; an empty list says: as above.
        for level in hierarchy.levels:
            for name in files:
                text = level.read(name)
                if text:
                    draft.add(CPUSET_CPUS, parse_list_length(text, level.directory, name))
                    return level
        draft.unsupported(f"no {hierarchy.levels[0].directory / files[0]}")
    return None
