"""Mounts: what is mounted where, of which kind, and which of it can be seen.

Used in the sidecar by collectors of filesystems and cgroups. /proc/self/mountinfo comes in. No threads, no
state.

Source: Documentation/filesystems/proc.rst, "/proc/<pid>/mountinfo".
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from exporter.collectors.kernel_files import parse_count, read_bytes, refuse

_ESCAPE = re.compile(rb"\\([0-3][0-7]{2})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo.

    Attributes:
        id: Unique among the mounts of the moment.
        parent: The mount it stands on.
        device: `major:minor`, the same for all mounts of one filesystem.
        root: Which directory of the filesystem is mounted.
        path: Where, as the system calls want it: bytes that are not UTF-8 are surrogates.
        fstype: `ext4`, `nfs4`, `fuse.sshfs` …
        source: The block device, the server's export, or any word.
        options: Those of the mount.
        super_options: Those of the filesystem.
    """

    id: int
    parent: int
    device: str
    root: str
    path: str
    fstype: str
    source: str
    options: frozenset[str]
    super_options: frozenset[str]

    @property
    def label(self) -> str:
        """The path as a label value; what is not UTF-8 shows as U+FFFD."""
        return printable(self.path)

    @property
    def readonly(self) -> bool:
        """Whether the mount or its filesystem, also after an error, refuses to be written to."""
        return "ro" in self.options or "ro" in self.super_options


def read_mounts(proc: Path, fs_types: Collection[str] = ()) -> list[Mount] | None:
    """List mounts in the kernel's order; None where there is no mountinfo.

    Args:
        proc: Where procfs is mounted.
        fs_types: Only those of these kinds; a node with a thousand containers has thousands of mounts.

    Raises:
        CollectError: They cannot be read, or are not what is documented.
    """
    path = proc / "self/mountinfo"
    content = read_bytes(path)
    return None if content is None else parse_mounts(content, path, fs_types)


def parse_mounts(content: bytes, path: Path, fs_types: Collection[str] = ()) -> list[Mount]:
    """List the mounts of a mountinfo that has been read; else as `read_mounts`.

    Raises:
        CollectError: It is not what is documented.
    """
    wanted = [f" - {fs_type} ".encode() for fs_type in fs_types]
    return [
        _mount(line, path)
        for line in content.split(b"\n")
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
    shadowed = {mount.id for mount in mounts if not beside[mount.parent].isdisjoint(_above(mount.path))}
    return [
        mount
        for mount in mounts
        if not _is_topped(mount, beside) and shadowed.isdisjoint(_line_of(mount, by_id))
    ]


def printable(text: str) -> str:
    """Make a name of the system fit for a label."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def unescape(field: bytes) -> str:
    r"""Undo the kernel's octal escapes (`\040` for a blank) in a name."""
    return os.fsdecode(_ESCAPE.sub(lambda found: bytes((int(found[1], 8),)), field))


def _mount(line: bytes, path: Path) -> Mount:
    words = line.split(b" ")
    # Optional fields stand before the dash, at least three fields behind it; a name is never a bare dash here,
    # since the six fields before are fixed.
    try:
        dash = words.index(b"-", 6)
    except ValueError:
        dash = len(words)
    if len(words) < dash + 4:
        refuse(line.decode("utf-8", "replace"), (path,), "the fields of a mount")
    fstype, source, super_options = words[dash + 1 : dash + 4]
    return Mount(
        id=parse_count(words[0].decode("ascii", "replace"), path),
        parent=parse_count(words[1].decode("ascii", "replace"), path),
        device=words[2].decode("ascii", "replace"),
        root=unescape(words[3]),
        path=unescape(words[4]),
        fstype=printable(unescape(fstype)),
        source=printable(unescape(source)),
        options=_options(words[5]),
        super_options=_options(super_options),
    )


def _options(field: bytes) -> frozenset[str]:
    return frozenset(field.decode("utf-8", "replace").split(","))


def _is_topped(mount: Mount, beside: dict[int, set[str]]) -> bool:
    # The root of all may be its own parent.
    return mount.id != mount.parent and mount.path in beside.get(mount.id, ())


def _above(path: str) -> list[str]:
    """All directories above a path."""
    names = path.strip("/").split("/")
    return ["/" + "/".join(names[:depth]) for depth in range(len(names))] if path != "/" else []


def _line_of(mount: Mount, by_id: dict[int, Mount]) -> set[int]:
    """A mount and all that it stands on."""
    line: set[int] = set()
    step: Mount | None = mount
    while step is not None and step.id not in line:
        line.add(step.id)
        step = by_id.get(step.parent)
    return line
