"""Cgroup tree: where a process stands in it, and the way up from there.

Used in the sidecar by the cgroup collector. /proc/self/cgroup (where in each hierarchy) and mountinfo (what of
each hierarchy can be seen, and at which directory) come in. No threads, no state.

A cgroup namespace shows paths from its own root: the process of a container reads `/`, and what is mounted
there is its own cgroup. Without a namespace the path is that of the host, and a container sees only the part
of the tree that mountinfo names as the root of the mount. Above the mount nothing can be read.

Source: man 7 cgroups; man 7 cgroup_namespaces; Documentation/admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from exporter.collectors.host.mounts import Mount, parse_mounts, printable, visible
from exporter.collectors.kernel_files import (
    named_values,
    parse_count,
    procfs,
    read_bytes,
    read_file,
    refuse,
    source,
)
from exporter.errors import CollectError
from exporter.families import Collected, FamilySpec

UNIFIED = ""
"""The name of cgroup v2 beside the controllers of v1, as in /proc/self/cgroup."""

CONTROLLERS = frozenset(("blkio", "cpu", "cpuacct", "cpuset", "memory", "pids"))
"""Those of v1 that are read; systemd has a hierarchy without any, others count devices and packets."""

NO_LIMIT = 2**62
"""From here on a number is the kernel's word for none (v1: the largest page count)."""


class Level(NamedTuple):
    """A cgroup.

    Attributes:
        path: As /proc/<pid>/cgroup shows it.
        directory: Where its files are.
    """

    path: str
    directory: Path

    def read(self, name: str) -> str | None:
        """Read one of its files, without the end of the line; None when there is none.

        Raises:
            CollectError: It exists and cannot be read.
        """
        text = read_file(self.directory / name)
        return None if text is None else text.strip()


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A cgroup and all above it that can be seen.

    Attributes:
        version: Of cgroups.
        levels: From the cgroup itself up to the mount.
    """

    version: Literal["1", "2"]
    levels: tuple[Level, ...]

    def exists(self) -> bool:
        """Whether the cgroup is still there."""
        return self.levels[0].directory.is_dir()

    def lowest(self, name: str) -> Level:
        """Find the first cgroup on the way up that has a file: there, what is further down is counted.

        Where none has, the cgroup itself is given.
        """
        return next((level for level in self.levels if (level.directory / name).exists()), self.levels[0])

    def at(self, path: str) -> Level | None:
        """Find a cgroup on the way by its path."""
        return next((level for level in self.levels if level.path == path), None)

    def tightest(self, limit_of: Callable[[Level], float | None]) -> tuple[float, Level] | None:
        """Find the smallest limit on the way up and where it stands, the lowest of several; None without any.

        The cgroup's own files are not enough: Slurm puts a step's limits on its parent.
        """
        found = [(limit, level) for level in self.levels if (limit := limit_of(level)) is not None]
        return min(found, key=lambda each: each[0], default=None)


class CgroupTree:
    """Finds the cgroup of this process, or another one, in every hierarchy that is mounted.

    Args:
        proc: Where procfs is mounted; None asks psutil.
        sys: Where sysfs is, for mounts below it.
        path: That of another cgroup, as /proc/<pid>/cgroup shows it, or its directory.
    """

    def __init__(self, *, proc: Path | None = None, sys: Path, path: str | None = None) -> None:
        proc = proc or procfs()
        self._membership = proc / "self/cgroup"
        self._mountinfo = proc / "self/mountinfo"
        self._sys = sys
        self._path = path
        self._sources: tuple[bytes | None, bytes | None] | None = None
        self._found: Mapping[str, Hierarchy] = {}

    def hierarchies(self) -> Mapping[str, Hierarchy]:
        """Look where the process is now; the way is sought again when something has changed.

        Returns:
            By controller of v1, and `UNIFIED` for v2; without those that cannot be seen.

        Raises:
            CollectError: Something cannot be read, or there is no such cgroup (`missing`).
        """
        sources = (read_bytes(self._membership), read_bytes(self._mountinfo))
        if sources != self._sources or not all(each.exists() for each in self._found.values()):
            self._sources = None
            self._found = self._find(*sources)
            self._sources = sources
        return self._found

    def _find(self, membership: bytes | None, mountinfo: bytes | None) -> Mapping[str, Hierarchy]:
        groups = _groups((membership or b"").decode("utf-8", "surrogateescape"), self._membership)
        hierarchies: dict[str, Hierarchy] = {}
        for mount in visible(parse_mounts(mountinfo or b"", self._mountinfo, ("cgroup", "cgroup2"))):
            old = mount.fstype == "cgroup"
            for controller in sorted(mount.super_options & CONTROLLERS) if old else (UNIFIED,):
                own = groups.get(controller) if self._path is None else _named(self._path, mount)
                names = None if own is None else _below(own, mount.root)
                if names is None or controller in hierarchies:
                    continue
                levels = _levels(names, mount, self._sys)
                if levels and (self._path is None or len(levels) == len(names) + 1):
                    hierarchies[controller] = Hierarchy("1" if old else "2", levels)
        if self._path is not None and not hierarchies:
            raise CollectError(f"no cgroup {self._path!r} in any mounted hierarchy", reason="missing")
        return hierarchies


def limit_in(name: str) -> Callable[[Level], int | None]:
    """Make the reader of a limit; it gives None for `max`, for what stands for it in v1, and where there is no file."""

    def read(level: Level) -> int | None:
        text = level.read(name)
        if text is None or text == "max":
            return None
        count = parse_count(text, level.directory, name)
        return count if count < NO_LIMIT else None

    return read


def cpu_limit(level: Level) -> float | None:
    """Read the limit on CPU time that stands at a cgroup of either version, in CPUs; None without one.

    Raises:
        CollectError: It cannot be read.
    """
    text, name = level.read("cpu.max"), "cpu.max"
    if text is None:
        name = "cpu.cfs_quota_us"
        text = f"{level.read(name) or '-1'} {level.read('cpu.cfs_period_us') or ''}"
    quota, _, period = text.partition(" ")
    if quota in {"max", "-1"}:
        return None
    if parse_count(period, level.directory, name) == 0:
        raise CollectError(f"{level.directory / name}: a period of 0", reason="malformed")
    return parse_count(quota, level.directory, name) / int(period)


def cpu_quota(tree: CgroupTree) -> float | None:
    """Find the tightest CPU limit on the way from this process's cgroup up to the root, in CPUs; None without one.

    Raises:
        CollectError: A limit cannot be read.
    """
    found = tree.hierarchies()
    hierarchy = found.get("cpu", found.get(UNIFIED))
    tightest = None if hierarchy is None else hierarchy.tightest(cpu_limit)
    return None if tightest is None else tightest[0]


def line_count(level: Level, name: str, file: str) -> int | None:
    """Parse a line `name 12` of a file; None when there is no file or no such line.

    Raises:
        CollectError: The value is no number.
    """
    value = named_values(level.read(file) or "", " ").get(name)
    return None if value is None else parse_count(value, level.directory, file, name)


def add_count(collected: Collected, spec: FamilySpec, level: Level, name: str) -> bool:
    """Publish a file that holds one number, or note that there is none; whether there is one."""
    with source(collected, level.directory / name):
        text = level.read(name)
        if text is None:
            collected.unsupported.append(f"no {level.directory / name}")
            return False
        collected.add(spec, parse_count(text, level.directory, name))
    return True  # also where it cannot be read


def add_limit(
    collected: Collected, spec: FamilySpec, hierarchy: Hierarchy, limit_of: Callable[[Level], float | None]
) -> Level | None:
    """Publish the tightest limit on the way up; where it stands, None without any."""
    with source(collected, hierarchy.levels[0].directory):
        tightest = hierarchy.tightest(limit_of)
        if tightest is not None:
            collected.add(spec, tightest[0])
            return tightest[1]
    return None


def device_name(number: str, sys: Path) -> str:
    """Give the name of a block device, or its number (`8:0`) where sysfs does not know it."""
    try:
        return (sys / "dev/block" / number).readlink().name.replace("!", "/")
    except (OSError, ValueError):
        return number


def _groups(text: str, path: Path) -> Mapping[str, str]:
    """Split lines like `4:cpu,cpuacct:/path` and `0::/path`."""
    found = {}
    for line in filter(None, text.split("\n")):  # a name may hold other ends of lines, of those Python knows
        parts = line.split(":", 2)
        if len(parts) != 3:
            refuse(line, (path,), "lines like `0::/path`")
        # A cgroup that was removed under the process keeps its name, with a note behind it.
        group = parts[2].removesuffix(" (deleted)")
        found.update(dict.fromkeys(parts[1].split(","), group))
    return found


def _named(path: str, mount: Mount) -> str | None:
    """A cgroup as the user wrote it: by its directory too; None for what cannot be one."""
    if ".." in path.split("/"):
        return None
    inside = f"{path.rstrip('/')}/"
    if inside.startswith(f"{mount.path}/"):
        return mount.root.rstrip("/") + inside[len(mount.path) :].rstrip("/") or "/"
    return path


def _below(group: str, root: str) -> Sequence[str] | None:
    """The names from a mount's root down to a cgroup; None where the way cannot be known."""
    names, above = _names(group), _names(root)
    rest = names[len(above) :]
    if names[: len(above)] == above and ".." not in rest:
        return rest
    if ".." in names and ".." not in above:
        return ()  # outside of the namespace's root: of what can be seen, only that is known
    # Another part of the tree is mounted, or that of the host into our namespace: which of it is ours, nobody
    # says.
    return None


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name]


def _levels(names: Sequence[str], mount: Mount, sys: Path) -> tuple[Level, ...]:
    directory = Path(mount.path)
    if directory.is_relative_to("/sys"):
        directory = sys / directory.relative_to("/sys")
    levels = []
    for depth in range(len(names), -1, -1):
        place = directory.joinpath(*names[:depth])
        if place.is_dir():
            path = "/" + "/".join((*_names(mount.root), *names[:depth]))
            levels.append(Level(printable(path), place))
    return tuple(levels)
