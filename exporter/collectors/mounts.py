"""Mounted filesystems as /proc/<pid>/mountinfo lists them."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from exporter.collectors.kernel_files import printable

_OCTAL = re.compile(rb"\\([0-3][0-7]{2})")


@dataclass(frozen=True, slots=True)
class Mount:
    """Line of mountinfo. Bytes that are not UTF-8 are surrogates in `root` and `path`, as system calls require.

    Source: Documentation/filesystems/proc.rst, "/proc/<pid>/mountinfo".
    """

    id: int
    parent: int  # id of the mount that contains the mount point
    device: str  # `major:minor`, the same for all mounts of one filesystem
    root: str  # directory of the filesystem that is mounted
    path: str  # mount point
    fstype: str  # `ext4`, `nfs4`, `fuse.sshfs` …
    source: str  # block device, export of a server, or arbitrary text
    options: frozenset[str]  # of the mount and of the filesystem

    @property
    def label(self) -> str:
        """Mount point as a label value."""
        return printable(self.path)


def parse_mounts(text: str, fs_types: Collection[str] = ()) -> list[Mount]:
    """Parse a mountinfo file and return the mounts in the kernel's order: all, or those of `fs_types`. Raises ValueError."""
    markers = [f" - {fs_type} " for fs_type in fs_types]
    return [
        _mount(line)
        for line in text.split("\n")
        if line and (not markers or any(marker in line for marker in markers))
    ]


def visible_mounts(mounts: Sequence[Mount]) -> list[Mount]:
    """Return the mounts that no later mount covers.

    A later mount covers a mount on the same path and on directories below that path. If two mounts have the same parent, the one on the
    higher directory is the later one, because an earlier one would be the parent of the other.
    """
    by_id = {mount.id: mount for mount in mounts}
    paths_by_parent: dict[int, set[str]] = {}
    for mount in mounts:
        paths_by_parent.setdefault(mount.parent, set()).add(mount.path)
    covered_ids = {
        mount.id
        for mount in mounts
        if not paths_by_parent[mount.parent].isdisjoint(map(str, PurePosixPath(mount.path).parents))
    }

    def is_visible(mount: Mount) -> bool:
        if mount.id != mount.parent and mount.path in paths_by_parent.get(mount.id, ()):
            return False
        ancestors: set[int] = set()
        current: Mount | None = mount
        # The parent of the root mount may be the root mount itself.
        while current is not None and current.id not in ancestors:
            ancestors.add(current.id)
            current = by_id.get(current.parent)
        return covered_ids.isdisjoint(ancestors)

    return [mount for mount in mounts if is_visible(mount)]


def unescape(field: str) -> str:
    r"""Return a name without the kernel's octal escapes (`\040` for a blank)."""
    return os.fsdecode(_OCTAL.sub(lambda match: bytes((int(match[1], 8),)), os.fsencode(field)))


def _mount(line: str) -> Mount:
    """Parse a line such as `36 35 98:0 /root /mnt rw,noatime master:1 - ext4 /dev/sda1 rw`."""
    # The number of fields before the dash varies; three fields follow the dash.
    mount_fields, source_fields = line.split(" - ", 1)
    mount_id, parent, device, root, path, options = mount_fields.split(" ")[:6]
    fstype, mount_source, super_options = source_fields.split(" ")[:3]
    return Mount(
        id=int(mount_id),
        parent=int(parent),
        device=device,
        root=unescape(root),
        path=unescape(path),
        fstype=printable(unescape(fstype)),
        source=printable(unescape(mount_source)),
        options=frozenset(f"{options},{super_options}".split(",")),
    )
