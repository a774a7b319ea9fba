"""Cgroup of this process in every mounted hierarchy, and the tightest limits above it.

The tightest limit between the cgroup and the root applies, and it is often set on a parent: Slurm limits the parent
of a step. In a cgroup namespace, paths start at the root of the namespace. Without a namespace, a container reads the
path of the host, but sees only the subtree that mountinfo names as the root of the mount.
Source: cgroup-v2.rst, cgroup-v1/{memory,cpuacct}.rst, sched-bwc.rst, man 7 cgroups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from exporter.collectors.kernel_files import parse, printable, procfs, read_optional
from exporter.collectors.mounts import Mount, parse_mounts, visible_mounts

UNIFIED = ""
"""Key of the cgroup v2 hierarchy in a mapping by v1 controller, as in /proc/self/cgroup."""
CONTROLLERS = frozenset(("cpu", "cpuacct", "memory"))
"""Controllers of cgroup v1 that the exporter reads."""
NO_LIMIT = 2**62
"""Smallest value that means no limit: without a limit, cgroup v1 reports the largest number of bytes in whole pages."""


@dataclass(frozen=True, slots=True)
class CgroupLevel:
    """Cgroup, with its path in /proc/<pid>/cgroup and the directory of its files."""

    path: str
    directory: Path

    def read(self, name: str) -> str | None:
        """Return the content of a file, or None if there is no such file."""
        return read_optional(self.directory / name)


@dataclass(frozen=True, slots=True)
class TightestLimit:
    """Smallest limit between a cgroup and the root, and the cgroup with this limit."""

    value: float
    level: CgroupLevel


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Cgroup of this process with its visible ancestors."""

    version: str  # of the cgroup interface, "1" or "2"
    levels: tuple[CgroupLevel, ...]  # from the cgroup itself up to the mount

    def level_at(self, path: str) -> CgroupLevel:
        """Return the level with this path, or the innermost level if no level has this path."""
        return next((level for level in self.levels if level.path == path), self.levels[0])

    def tightest(self, limit_of: Callable[[CgroupLevel], float | None]) -> TightestLimit | None:
        """Return the smallest limit with its level, or None without a limit. Of equal limits, the innermost is returned."""
        limits = [
            TightestLimit(limit, level) for level in self.levels if (limit := limit_of(level)) is not None
        ]
        return min(limits, key=lambda candidate: candidate.value, default=None)


class CgroupTree:
    """Cgroups of this process in the mounted hierarchies."""

    def __init__(self, *, proc: Path | None = None, sys: Path) -> None:
        self._proc_self = (proc or procfs()) / "self"
        self._sys = sys

    def hierarchies(self) -> Mapping[str, Hierarchy]:
        """Return the visible hierarchies of this process by controller of v1, and by `UNIFIED` for v2."""
        path = self._proc_self / "cgroup"
        cgroup_paths = parse(path, _parse_cgroup_paths, read_optional(path) or "")
        hierarchies: dict[str, Hierarchy] = {}
        path = self._proc_self / "mountinfo"
        mounts = parse(
            path, lambda text: parse_mounts(text, ("cgroup", "cgroup2")), read_optional(path) or ""
        )
        for mount in visible_mounts(mounts):
            version = "1" if mount.fstype == "cgroup" else "2"
            for controller in (UNIFIED,) if version == "2" else sorted(mount.options & CONTROLLERS):
                if controller not in cgroup_paths or controller in hierarchies:
                    continue
                names = _names_below(cgroup_paths[controller], mount.root)
                if names is not None:
                    levels = self._levels(names, mount)
                    if levels:
                        hierarchies[controller] = Hierarchy(version, levels)
        return hierarchies

    def _levels(self, names: Sequence[str], mount: Mount) -> tuple[CgroupLevel, ...]:
        """Return the cgroup of these names below a mount and its ancestors, innermost first. Missing directories are omitted."""
        directory = Path(mount.path)
        if directory.is_relative_to("/sys"):
            directory = self._sys / directory.relative_to("/sys")
        root_names = _names(mount.root)
        prefixes = [names[:depth] for depth in range(len(names), -1, -1)]
        return tuple(
            CgroupLevel(printable("/" + "/".join((*root_names, *prefix))), directory.joinpath(*prefix))
            for prefix in prefixes
            if directory.joinpath(*prefix).is_dir()
        )


def limit_in(name: str) -> Callable[[CgroupLevel], int | None]:
    """Return a function that reads the limit in a file. The function returns None without a limit or without the file."""

    def read(level: CgroupLevel) -> int | None:
        text = level.read(name)
        if text is None or text == "max":
            return None
        limit = parse(level.directory / name, int, text)
        return None if limit >= NO_LIMIT else limit

    return read


def cpu_limit(level: CgroupLevel) -> float | None:
    """Return the limit on CPU time of a cgroup of either version, in CPUs, or None without a limit."""
    text = level.read("cpu.max")
    if text is None:
        text = f"{level.read('cpu.cfs_quota_us') or 'max'} {level.read('cpu.cfs_period_us')}"
    return parse(f"CPU limit of {level.directory}", _parse_cpu_limit, text)


def cpu_quota(tree: CgroupTree) -> float | None:
    """Return the tightest CPU limit that applies to this process, in CPUs, or None without a limit."""
    hierarchies = tree.hierarchies()
    hierarchy = hierarchies.get("cpu", hierarchies.get(UNIFIED))
    tightest = None if hierarchy is None else hierarchy.tightest(cpu_limit)
    return None if tightest is None else tightest.value


def _parse_cgroup_paths(text: str) -> dict[str, str]:
    """Parse /proc/self/cgroup and return the path of the cgroup by controller, and by `UNIFIED` for cgroup v2."""
    paths: dict[str, str] = {}
    for line in filter(None, text.split("\n")):  # `4:cpu,cpuacct:/path`, `0::/path`
        _, controllers, path = line.split(":", 2)
        # The kernel appends a note to the path of a cgroup that was removed while the process is in it.
        paths.update(dict.fromkeys(controllers.split(","), path.removesuffix(" (deleted)")))
    return paths


def _parse_cpu_limit(text: str) -> float | None:
    """Parse `150000 100000` (1.5 CPUs), quota and period in microseconds. A quota of `max` or -1 is no limit."""
    quota, period = text.split()
    if quota in {"max", "-1"}:
        return None
    if int(period) == 0:
        raise ValueError("the period is 0")
    return int(quota) / int(period)


def _names_below(cgroup_path: str, root: str) -> Sequence[str] | None:
    """Return the path components from a mount's root down to a cgroup, or None if the cgroup is not below the root."""
    names, root_names = _names(cgroup_path), _names(root)
    remaining = names[len(root_names) :]
    if names[: len(root_names)] == root_names and ".." not in remaining:
        return remaining
    if ".." in names and ".." not in root_names:
        return ()  # outside the root of the namespace: only the root is visible
    return None  # the mount shows another subtree


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name]
