"""Mounts: what is mounted where, of which kind, and which of it can be seen.

Used in the sidecar by collectors of filesystems and cgroups. /proc/self/mountinfo comes in.
Source: Documentation/filesystems/proc.rst, "/proc/<pid>/mountinfo".
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from exporter.collectors.kernel_files import printable

_ESCAPE = re.compile(rb"\\([0-3][0-7]{2})")


class Mount(NamedTuple):
    """One line of mountinfo; names that are not UTF-8 hold surrogates, as the system calls want them.

    Attributes:
        id: Unique among the mounts of the moment.
        parent: The mount it stands on.
        device: `major:minor`, the same for all mounts of one filesystem.
        root: Which directory of the filesystem is mounted.
        path: Where.
        fstype: `ext4`, `nfs4`, `fuse.sshfs` …
        source: The block device, the server's export, or any word.
        options: Those of the mount and of the filesystem.
    """

    id: int
    parent: int
    device: str
    root: str
    path: str
    fstype: str
    source: str
    options: frozenset[str]

    @property
    def label(self) -> str:
        """The path as a label value."""
        return printable(self.path)


def parse_mounts(text: str, fs_types: Collection[str] = ()) -> list[Mount]:
    """List the mounts of a mountinfo in the kernel's order.

    Raises:
        ValueError: It is not what is documented.
    """
    wanted = [f" - {fs_type} " for fs_type in fs_types]
    return [
        _mount(line)
        for line in text.split("\n")
        if line and (not wanted or any(word in line for word in wanted))
    ]


def visible(mounts: Sequence[Mount]) -> list[Mount]:
    """Leave out what other mounts cover: to look at such a path would be to look at another filesystem.

    Of two mounts on the same parent, the one further up in the tree covers the one below it: had it been
    there first, it would be the parent. A mount on a mount's very own path covers that.
    """
    by_id = {mount.id: mount for mount in mounts}
    beside: dict[int, set[str]] = {}
    for mount in mounts:
        beside.setdefault(mount.parent, set()).add(mount.path)
    shadowed = {
        mount.id
        for mount in mounts
        if not beside[mount.parent].isdisjoint(map(str, PurePosixPath(mount.path).parents))
    }

    def can_be_seen(mount: Mount) -> bool:
        if mount.id != mount.parent and mount.path in beside.get(mount.id, ()):
            return False
        stands_on: set[int] = set()
        step: Mount | None = mount
        while step is not None and step.id not in stands_on:  # the root of all may be its own parent
            stands_on.add(step.id)
            step = by_id.get(step.parent)
        return shadowed.isdisjoint(stands_on)

    return [mount for mount in mounts if can_be_seen(mount)]


def unescape(field: str) -> str:
    r"""Undo the kernel's octal escapes (`\040` for a blank) in a name."""
    return os.fsdecode(_ESCAPE.sub(lambda found: bytes((int(found[1], 8),)), os.fsencode(field)))


def _mount(line: str) -> Mount:
    # Optional fields stand before the dash, at least three fields behind it.
    before, after = line.split(" - ", 1)
    number, parent, device, root, path, options = before.split(" ")[:6]
    fstype, origin, super_options = after.split(" ")[:3]
    return Mount(
        int(number),
        int(parent),
        device,
        unescape(root),
        unescape(path),
        printable(unescape(fstype)),
        printable(unescape(origin)),
        frozenset(f"{options},{super_options}".split(",")),
    )
