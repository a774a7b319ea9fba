"""Size, free space and state of mounted filesystems."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass

from exporter.collectors.host.statvfs import (
    NOT_RETURNED,
    StatvfsPool,
    StatvfsResult,
    available_bytes,
    files,
    files_free,
    size_bytes,
)
from exporter.collectors.kernel_files import (
    EVERYTHING,
    Selection,
    failure,
    parse,
    procfs,
    read_optional,
    source,
)
from exporter.collectors.mounts import Mount, parse_mounts, visible_mounts
from exporter.collectors.options import Patterns, SlowOptions
from exporter.config.options import option
from exporter.errors import CollectError
from exporter.families import Collected, FamilySpec

SIZE = FamilySpec(
    name="host_filesystem_size_bytes",
    type="gauge",
    unit="bytes",
    labels=("mountpoint", "fstype", "device"),
    help="Size of the filesystem.",
    absent="where statvfs fails, has not returned or reports no size",
    source="statvfs f_blocks * f_frsize",
)
AVAIL = FamilySpec(
    name="host_filesystem_avail_bytes",
    type="gauge",
    unit="bytes",
    labels=("mountpoint", "fstype", "device"),
    help="Free space for users other than root.",
    absent="where statvfs fails, has not returned or reports no size",
    source="statvfs f_bavail * f_frsize",
)
FILES = FamilySpec(
    name="host_filesystem_files",
    type="gauge",
    labels=("mountpoint", "fstype", "device"),
    help="Maximum number of files (inodes).",
    absent="where statvfs fails or has not returned, or where the number is unlimited (btrfs)",
    source="statvfs f_files",
)
FILES_FREE = FamilySpec(
    name="host_filesystem_files_free",
    type="gauge",
    labels=("mountpoint", "fstype", "device"),
    help="Number of free inodes.",
    absent="like host_filesystem_files",
    source="statvfs f_ffree",
)
READONLY = FamilySpec(
    name="host_filesystem_readonly",
    type="gauge",
    labels=("mountpoint", "fstype", "device"),
    help="1 if the mount is read-only, as ext4 becomes after an error, else 0.",
    source="/proc/self/mountinfo, options of mount and filesystem",
)
DEVICE_ERROR = FamilySpec(
    name="host_filesystem_device_error",
    type="gauge",
    labels=("mountpoint", "fstype", "device"),
    help="1 if statvfs failed or has not returned, else 0.",
    source="statvfs",
)
SPECS = (SIZE, AVAIL, FILES, FILES_FREE, READONLY, DEVICE_ERROR)

MOUNT_POINTS_EXCLUDE = (
    *("/dev*", "/proc*", "/sys*"),
    # Mounts of container runtimes, of network namespaces and of systemd's credentials.
    *("/etc/host*", "/etc/resolv.conf", "/run/containerd/*", "/run/credentials/*", "/run/netns/*"),
    *(
        "/var/lib/containerd/*",
        "/var/lib/containers/storage/*",
        "/var/lib/docker/*",
        "/var/lib/kubelet/pods/*",
    ),
)

FS_TYPES_EXCLUDE = (
    # Filesystems of the kernel without storage. An overlay is shown, because / of a container is an overlay.
    *("autofs", "binfmt_misc", "bpf", "cgroup*", "configfs", "debugfs", "dev*", "efivarfs", "fusectl"),
    *("hugetlbfs", "mqueue", "nsfs", "proc", "pstore", "ramfs", "rpc_pipefs", "securityfs", "selinuxfs"),
    *("sysfs", "tracefs", "fuse.lxcfs"),
    # Read-only images, which have no free space.
    *("iso9660", "squashfs"),
)


@dataclass(frozen=True, slots=True)
class FilesystemOptions(SlowOptions):
    """Options of the filesystem collector."""

    mount_points_include: Patterns = option(EVERYTHING, "Patterns of mount points to show.")
    mount_points_exclude: Patterns = option(
        MOUNT_POINTS_EXCLUDE, "Patterns of mount points to exclude. * also matches /; use ? for a space."
    )
    fs_types_include: Patterns = option(EVERYTHING, "Patterns of filesystem types to show.")
    fs_types_exclude: Patterns = option(FS_TYPES_EXCLUDE, "Patterns of filesystem types to exclude.")


class FilesystemCollector:
    """Collector of the size and the state of the selected mounted filesystems."""

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

    def collect(self) -> Collected:
        """Call statvfs for the selected filesystems."""
        collected = Collected()
        with source(collected, self._path):
            mounts = [
                mount
                for mount in visible_mounts(parse(self._path, parse_mounts, read_optional(self._path) or ""))
                if mount.label in self._mount_points and mount.fstype in self._fs_types
            ]
            if not mounts:
                collected.unsupported.append(f"{self._path}: no mount, or none selected")
            # A filesystem with several mounts is queried at the first: later entries of the mapping replace earlier ones.
            results = self._pool.call({mount.device: mount.path for mount in reversed(mounts)})
            for mount in mounts:
                with collected.part():
                    _add_mount(collected, mount, results[mount.device])
        return collected


def _add_mount(collected: Collected, mount: Mount, result: StatvfsResult) -> None:
    """Add the families of a mount, unless it was unmounted meanwhile. Raises CollectError for a failed or hanging statvfs."""
    if isinstance(result, OSError) and result.errno in (errno.ENOENT, errno.ENOTDIR):
        return  # unmounted after the list was read
    labels = (mount.label, mount.fstype, mount.source)
    collected.add(READONLY, int("ro" in mount.options), *labels)
    collected.add(DEVICE_ERROR, int(not isinstance(result, os.statvfs_result)), *labels)
    if isinstance(result, os.statvfs_result):
        collected.add(SIZE, size_bytes(result), *labels)
        collected.add(AVAIL, available_bytes(result), *labels)
        collected.add(FILES, files(result), *labels)
        collected.add(FILES_FREE, files_free(result), *labels)
    elif result is None:
        raise CollectError(f"{mount.label} ({mount.fstype}): {NOT_RETURNED}", reason="hanging")
    elif result.errno in (errno.EACCES, errno.EPERM):
        # Without the mount option allow_other, a FUSE filesystem denies access to other users, including root.
        collected.unsupported.append(f"{mount.label} ({mount.fstype}): {result.strerror}")
    else:
        raise failure(mount.label, result)
