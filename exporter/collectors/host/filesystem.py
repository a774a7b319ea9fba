"""Filesystem: how large the mounted filesystems are, how much of them is left, also where checkpoints go.

A dead NFS server or FUSE daemon blocks `statvfs` forever, in a thread that nothing can interrupt. So each call has a daemon
thread of its own; one that has not returned at the deadline is left behind, and its filesystem gets no further call.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from exporter.collectors.kernel_files import (
    EVERYTHING,
    Mount,
    Selection,
    failure,
    parse_mounts,
    printable,
    procfs,
    read_optional,
    source,
    visible,
)
from exporter.errors import CollectError
from exporter.families import Collected, FamilySpec, table

FILESYSTEM_SPECS = table("""
host_filesystem_size_bytes{mountpoint,fstype,device}: Size of the filesystem. Absent where the filesystem
    does not say or does not answer. <- statvfs f_blocks * f_frsize
host_filesystem_avail_bytes{mountpoint,fstype,device}: What users other than root can still write. Absent
    where the filesystem does not say or does not answer. <- statvfs f_bavail * f_frsize
host_filesystem_files{mountpoint,fstype,device}: Files that the filesystem can hold (inodes). Absent where
    the filesystem does not say or does not answer, and where nothing limits them (btrfs). <- statvfs
    f_files
host_filesystem_files_free{mountpoint,fstype,device}: Files that can still be made. Absent where
    host_filesystem_files is. <- statvfs f_ffree
host_filesystem_readonly{mountpoint,fstype,device}: Whether the mount refuses writes (1), as ext4 does after
    an error, or not (0). <- /proc/self/mountinfo, options of mount and filesystem
host_filesystem_device_error{mountpoint,fstype,device}: Whether the filesystem refused to tell its size or
    has not answered (1), or told it (0). <- statvfs
""")
(SIZE, AVAIL, FILES, FILES_FREE, READONLY, DEVICE_ERROR) = FILESYSTEM_SPECS
CHECKPOINT_SPECS = table("""
training_checkpoint_dir_available_bytes{run,path}: Room that is left for the job in a directory of
    checkpoints; absent where no path is configured or no run lives, and where its filesystem does not
    answer. <- statvfs: f_bavail * f_frsize
training_checkpoint_dir_size_bytes{run,path}: Size of the filesystem of a directory of checkpoints; absent
    where no path is configured or no run lives, and where its filesystem does not answer. <- statvfs:
    f_blocks * f_frsize
""")
SPECS = (*FILESYSTEM_SPECS, *CHECKPOINT_SPECS)

MOUNT_POINTS_EXCLUDE = (
    *("/dev*", "/proc*", "/sys*"),
    # What a container runtime mounts once more for every container.
    *("/etc/host*", "/etc/resolv.conf", "/run/containerd/*", "/run/credentials/*", "/run/netns/*"),
    *(
        "/var/lib/containerd/*",
        "/var/lib/containers/storage/*",
        "/var/lib/docker/*",
        "/var/lib/kubelet/pods/*",
    ),
)

FS_TYPES_EXCLUDE = (
    # The kernel's, which store nothing. Overlays are shown: a container's / is one.
    *("autofs", "binfmt_misc", "bpf", "cgroup*", "configfs", "debugfs", "dev*", "efivarfs", "fusectl"),
    *("hugetlbfs", "mqueue", "nsfs", "proc", "pstore", "ramfs", "rpc_pipefs", "securityfs", "selinuxfs"),
    *("sysfs", "tracefs", "fuse.lxcfs"),
    # Images, which are always full.
    *("iso9660", "squashfs"),
)

HANGS = "statvfs has not returned"
_NONSENSE = 2**63
"""Larger counts are -1 in the kernel's unsigned fields: the filesystem does not know."""


Answer = os.statvfs_result | OSError | None
"""None: `statvfs` has not returned."""


class StatvfsPool:
    """Calls `statvfs`, all paths side by side, so that a call that hangs costs its own filesystem only."""

    def __init__(
        self,
        *,
        statvfs: Callable[[str], os.statvfs_result] = os.statvfs,
        deadline_seconds: float = 3.0,
    ) -> None:
        self._statvfs = statvfs
        self._deadline = deadline_seconds
        self._returned = threading.Condition()
        self._under_way: set[str] = set()  # calls that have not returned; guarded by the condition

    def ask(self, paths: Mapping[str, str]) -> Mapping[str, Answer]:
        """Ask each filesystem once at its path, from one thread at a time; not those that still owe an answer."""
        answers: dict[str, Answer] = {}
        with self._returned:
            asked = [each for each in paths if each not in self._under_way]
            for each in asked:
                arguments = (each, paths[each], answers)
                try:
                    threading.Thread(
                        target=self._call, args=arguments, name="exporter-statvfs", daemon=True
                    ).start()
                    self._under_way.add(each)
                except RuntimeError:
                    answers[each] = OSError(errno.EAGAIN, "there is no thread to ask it")
            self._returned.wait_for(lambda: self._under_way.isdisjoint(asked), self._deadline)
            return {each: answers.get(each) for each in paths}

    def _call(self, device: str, path: str, answers: dict[str, Answer]) -> None:
        try:
            answer: Answer = self._statvfs(path)
        except OSError as error:
            answer = error
        with self._returned:
            self._under_way.discard(device)
            answers[device] = answer
            self._returned.notify_all()


class FilesystemCollector:
    """Asks every mounted filesystem for its size."""

    name = "filesystem"
    specs = FILESYSTEM_SPECS

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
        """Ask once."""
        collected = Collected()
        with source(collected, self._path):
            mounts = [
                mount
                for mount in visible(parse_mounts(read_optional(self._path) or ""))
                if mount.label in self._mount_points and mount.fstype in self._fs_types
            ]
            if not mounts:
                collected.unsupported.append(f"{self._path}: no mount, or none that is to be shown")
            # Of several mounts of one filesystem the first is asked.
            paths = {mount.device: mount.path for mount in reversed(mounts)}
            answers = self._pool.ask(paths)
            for mount in mounts:
                with collected.part():
                    _add_mount(collected, mount, answers[mount.device])
        return collected


def _add_mount(collected: Collected, mount: Mount, answer: Answer) -> None:
    if isinstance(answer, OSError) and answer.errno in (errno.ENOENT, errno.ENOTDIR):
        return  # unmounted since the list was made
    labels = (mount.label, mount.fstype, mount.source)
    collected.add(READONLY, int("ro" in mount.options), *labels)
    collected.add(DEVICE_ERROR, int(not isinstance(answer, os.statvfs_result)), *labels)
    if isinstance(answer, os.statvfs_result):
        for spec, value in measured(answer).items():
            collected.add(spec, value, *labels)
    elif answer is None:
        raise CollectError(f"{mount.label} ({mount.fstype}): {HANGS}", reason="hanging")
    elif answer.errno in (errno.EACCES, errno.EPERM):  # FUSE answers its own user only, not even root
        collected.unsupported.append(f"{mount.label} ({mount.fstype}): {answer.strerror}")
    else:
        raise failure(mount.label, answer)


def measured(found: os.statvfs_result) -> dict[FamilySpec, int]:
    """Turn an answer into samples, without what the filesystem does not know."""
    values: dict[FamilySpec, int] = {}
    if found.f_blocks:  # a filesystem without blocks stores nothing (autofs, lxcfs)
        values = {SIZE: found.f_blocks * found.f_frsize, AVAIL: found.f_bavail * found.f_frsize}
    if found.f_files:
        values |= {FILES: found.f_files, FILES_FREE: found.f_ffree}
    return {spec: value for spec, value in values.items() if value < _NONSENSE}


class CheckpointDirsCollector:
    """Asks the filesystems of the configured directories of checkpoints, while runs live."""

    name = "checkpoint_dirs"
    specs = CHECKPOINT_SPECS

    def __init__(
        self,
        paths: Sequence[Path] = (),
        *,
        runs: Callable[[], Collection[str] | None] = lambda: None,
        pool: StatvfsPool | None = None,
    ) -> None:
        self._paths = {str(path): str(path) for path in paths}
        self._runs = runs
        self._pool = pool or StatvfsPool()

    def collect(self) -> Collected:
        """Ask once."""
        collected = Collected()
        runs = sorted(self._runs() or ())
        for path, answer in self._pool.ask(self._paths if runs else {}).items():
            label = printable(path)
            if isinstance(answer, os.statvfs_result):
                told = measured(answer)
                for spec, each in zip(CHECKPOINT_SPECS, (AVAIL, SIZE), strict=True):
                    for run in runs:
                        collected.add(spec, told.get(each), run, label)
                if not told:
                    collected.unsupported.append(f"{label}: its filesystem does not tell its size")
            elif answer is None:
                collected.fail(CollectError(f"{label}: {HANGS}", reason="hanging"))
            else:
                collected.fail(failure(label, answer))
        return collected
