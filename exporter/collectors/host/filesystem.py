"""Filesystem: how large the mounted filesystems are, and how much of them is left.

Used in the sidecar. /proc/self/mountinfo and one `statvfs` per mount come in: what the exporter sees in its own
mount namespace. (psutil's list of partitions does not tell which mount covers which, nor which are one filesystem.)
Threads: those of `statvfs`, which a dead server may keep; such a mount has an error instead of sizes, and the others
are served. It holds the mounts, as long as the kernel lists the same.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from exporter.collectors.host.mounts import Mount, parse_mounts, visible
from exporter.collectors.host.statvfs import Answer, Silence, StatvfsPool
from exporter.collectors.kernel_files import failure, procfs, read_bytes, source
from exporter.collectors.selection import EVERYTHING, Selection
from exporter.errors import CollectError
from exporter.families import Collected, FamilySpec, family

_LABELS = ("mountpoint", "fstype", "device")
_ABSENT = "Absent where the filesystem does not say or does not answer"


SIZE = family(
    "host_filesystem_size_bytes",
    f"Size of the filesystem. {_ABSENT}.",
    "statvfs f_blocks * f_frsize",
    *_LABELS,
)
AVAIL = family(
    "host_filesystem_avail_bytes",
    f"What users other than root can still write. {_ABSENT}.",
    "statvfs f_bavail * f_frsize",
    *_LABELS,
)
FILES = family(
    "host_filesystem_files",
    f"Files that the filesystem can hold (inodes). {_ABSENT}, and where nothing limits them (btrfs).",
    "statvfs f_files",
    *_LABELS,
)
FILES_FREE = family(
    "host_filesystem_files_free",
    "Files that can still be made. Absent where host_filesystem_files is.",
    "statvfs f_ffree",
    *_LABELS,
)
READONLY = family(
    "host_filesystem_readonly",
    "Whether the mount refuses writes (1), as ext4 does after an error, or not (0).",
    "/proc/self/mountinfo, options of mount and filesystem",
    *_LABELS,
)
DEVICE_ERROR = family(
    "host_filesystem_device_error",
    "Whether the filesystem refused to tell its size or has not answered (1), or told it (0).",
    "statvfs",
    *_LABELS,
)
SPECS = (SIZE, AVAIL, FILES, FILES_FREE, READONLY, DEVICE_ERROR)

MOUNT_POINTS_EXCLUDE = (
    "/dev",
    "/dev/*",
    "/proc",
    "/proc/*",
    "/sys",
    "/sys/*",
    "/etc/hostname",
    "/etc/hosts",
    "/etc/resolv.conf",
    "/run/containerd/*",
    "/run/credentials/*",
    "/run/netns/*",
    "/var/lib/containerd/*",
    "/var/lib/containers/storage/*",
    "/var/lib/docker/*",
    "/var/lib/kubelet/pods/*",
)
"""What belongs to the kernel, and what a container runtime mounts once more for every container."""

FS_TYPES_EXCLUDE = (
    "autofs",
    "binfmt_misc",
    "bpf",
    "cgroup",
    "cgroup2",
    "configfs",
    "debugfs",
    "devpts",
    "devtmpfs",
    "efivarfs",
    "fuse.lxcfs",
    "fusectl",
    "hugetlbfs",
    "iso9660",
    "mqueue",
    "nsfs",
    "proc",
    "pstore",
    "ramfs",
    "rpc_pipefs",
    "securityfs",
    "selinuxfs",
    "squashfs",
    "sysfs",
    "tracefs",
)
"""Pseudo filesystems, and images that are always full. Overlays are shown: a container's / is one."""

_NONSENSE = 2**63
"""Larger counts are -1 in the kernel's unsigned fields: the filesystem does not know."""

GONE = frozenset((errno.ENOENT, errno.ENOTDIR))
FORBIDDEN = frozenset((errno.EACCES, errno.EPERM))
"""A FUSE mount answers its own user only, not even root."""


class FilesystemCollector:
    """Asks every mounted filesystem for its size.

    Args:
        pool: Makes the calls.
        mount_points_include: Patterns of the mount points to show.
        mount_points_exclude: Patterns of those to leave out.
        fs_types_include: Patterns of the kinds of filesystem to show.
        fs_types_exclude: Patterns of those to leave out.
    """

    name = "filesystem"
    specs = SPECS

    def __init__(
        self,
        *,
        pool: StatvfsPool | None = None,
        mount_points_include: Sequence[str] = EVERYTHING,
        mount_points_exclude: Sequence[str] = MOUNT_POINTS_EXCLUDE,
        fs_types_include: Sequence[str] = EVERYTHING,
        fs_types_exclude: Sequence[str] = FS_TYPES_EXCLUDE,
    ) -> None:
        self._path = procfs() / "self/mountinfo"
        self._pool = pool or StatvfsPool()
        self._mount_points = Selection(mount_points_include, mount_points_exclude)
        self._fs_types = Selection(fs_types_include, fs_types_exclude)
        self._listed: tuple[bytes, Sequence[Mount]] = (b"", ())

    def collect(self) -> Collected:
        """Ask once."""
        collected = Collected()
        with source(collected, self._path):
            chosen = self._choose(read_bytes(self._path) or b"")
            if not chosen:
                collected.unsupported.append(f"{self._path}: no mount, or none that is to be shown")
            answers = self._pool.ask(chosen)
            samples: dict[FamilySpec, dict[tuple[str, ...], float]] = {spec: {} for spec in SPECS}
            for mount in chosen:
                with collected.part():
                    _add_mount(collected, samples, mount, answers[mount.path])
            for spec, values in samples.items():
                collected.add_family(spec, values)
        return collected

    def _choose(self, content: bytes) -> Sequence[Mount]:
        if content != self._listed[0]:  # a node with a thousand containers has thousands of mounts
            mounts = visible(parse_mounts(content, self._path))
            self._listed = (
                content,
                [
                    mount
                    for mount in mounts
                    if mount.label in self._mount_points and mount.fstype in self._fs_types
                ],
            )
        return self._listed[1]


def _add_mount(
    collected: Collected,
    samples: Mapping[FamilySpec, dict[tuple[str, ...], float]],
    mount: Mount,
    answer: Answer,
) -> None:
    if isinstance(answer, OSError) and answer.errno in GONE:
        return  # unmounted since the list was made
    labels = (mount.label, mount.fstype, mount.source)
    samples[READONLY][labels] = int(mount.readonly)
    samples[DEVICE_ERROR][labels] = int(not isinstance(answer, os.statvfs_result))
    if isinstance(answer, os.statvfs_result):
        for spec, value in measured(answer).items():
            samples[spec][labels] = value
    elif isinstance(answer, Silence):
        raise CollectError(f"{mount.label} ({mount.fstype}): {answer.value}", reason="hanging")
    elif answer.errno in FORBIDDEN:
        collected.unsupported.append(f"{mount.label} ({mount.fstype}): {answer.strerror}")
    else:
        raise failure(Path(mount.label), answer)


def measured(found: os.statvfs_result) -> dict[FamilySpec, int]:
    """Turn an answer into samples, without what the filesystem does not know."""
    values: dict[FamilySpec, int] = {}
    if found.f_blocks:  # a filesystem without blocks stores nothing (autofs, lxcfs)
        for spec, blocks in ((SIZE, found.f_blocks), (AVAIL, found.f_bavail)):
            if blocks < _NONSENSE:
                values[spec] = blocks * found.f_frsize
    if 0 < found.f_files < _NONSENSE:
        values[FILES] = found.f_files
        if found.f_ffree < _NONSENSE:
            values[FILES_FREE] = found.f_ffree
    return values
