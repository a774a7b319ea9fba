"""Cgroup tree: where a process stands in every hierarchy, the way up from there, and the limits on that way.

Used in the sidecar. A cgroup namespace shows paths from its own root: the process of a container reads `/`, and what is
mounted there is its own cgroup. Without a namespace the path is that of the host, and a container sees only the part of
the tree that mountinfo names as the root of the mount. Above the mount nothing can be read. Source: man 7 cgroups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from exporter.collectors.host.mounts import Mount, parse_mounts, visible
from exporter.collectors.kernel_files import printable, procfs, read_optional

UNIFIED = ""
"""The name of cgroup v2 beside the controllers of v1, as in /proc/self/cgroup."""

CONTROLLERS = frozenset(("cpu", "cpuacct", "memory"))
"""Those of v1 that are read."""

NO_LIMIT = 2**62
"""From here on a number is the kernel's word for none (v1: the largest page count)."""


class Level(NamedTuple):
    """A cgroup: its path as /proc/<pid>/cgroup shows it, and where its files are."""

    path: str
    directory: Path

    def read(self, name: str) -> str | None:
        """Read one of its files; None when there is none."""
        return read_optional(self.directory / name)


class Hierarchy(NamedTuple):
    """A cgroup and all above it that can be seen.

    Attributes:
        version: Of cgroups.
        levels: From the cgroup itself up to the mount.
    """

    version: str
    levels: tuple[Level, ...]

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
