"""Filesystems: visible mounts, checkpoint directories, and filesystems that hang."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from collectors_support import MACHINES, assert_sound, recorded_statvfs, value_of
from hypothesis import given
from hypothesis import strategies as st
from places import TESTS
from waiting import WAIT_LIMIT_SECONDS, wait_until

from exporter.collectors.catalogue import CATALOGUE
from exporter.collectors.host.checkpoint_dirs import CheckpointDirsCollector
from exporter.collectors.host.filesystem import FilesystemCollector
from exporter.collectors.host.statvfs import StatvfsPool
from exporter.collectors.mounts import Mount, parse_mounts, unescape, visible_mounts

SIZE_BYTES, DEVICE_ERROR = "host_filesystem_size_bytes", "host_filesystem_device_error"
STATVFS_RESULT = os.statvfs_result((4096, 4096, 1000, 500, 400, 100, 50, 50, 0, 255))


def collector_of(
    root: Path, pool: StatvfsPool | None = None, **options: Sequence[str]
) -> FilesystemCollector:
    psutil.PROCFS_PATH = str(root / "proc" if (root / "proc").is_dir() else root)
    try:
        return FilesystemCollector(pool=pool or StatvfsPool(statvfs=recorded_statvfs(root)), **options)
    finally:
        psutil.PROCFS_PATH = "/proc"


def call_statvfs(pool: StatvfsPool, *paths: str) -> Mapping[str, os.statvfs_result | OSError | None]:
    """Call statvfs for each path and for `/`."""
    return pool.call({path: path for path in (*paths, "/")})


def machine_of(root: Path, *lines: str) -> Path:
    """Write a mountinfo with these lines, and return the root of the machine."""
    (root / "self").mkdir()
    (root / "self/mountinfo").write_text("".join(f"{line}\n" for line in lines))
    return root


class HangingStatvfs:
    """Implementation of statvfs that hangs for some paths until it is released."""

    def __init__(self, *paths: str) -> None:
        self.paths = set(paths)
        self.calls: list[str] = []
        self.release = threading.Event()

    def __call__(self, path: str) -> os.statvfs_result:
        self.calls.append(path)
        if path in self.paths:
            self.release.wait(60)
        return STATVFS_RESULT


@pytest.fixture
def hanging_statvfs() -> Iterator[Callable[..., HangingStatvfs]]:
    instances: list[HangingStatvfs] = []

    def hang_for(*paths: str) -> HangingStatvfs:
        instances.append(HangingStatvfs(*paths))
        return instances[-1]

    yield hang_for
    for instance in instances:
        instance.release.set()
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "exporter-statvfs"])


def test_a_dead_server_affects_only_its_own_mount(
    tmp_path: Path, hanging_statvfs: Callable[..., HangingStatvfs]
) -> None:
    root = machine_of(
        tmp_path,
        "20 1 8:1 / / rw - ext4 /dev/sda1 rw",
        "21 20 0:40 / /dead rw - nfs4 filer:/x ro",
        "22 20 0:41 / /alive rw - nfs4 filer:/y rw",
    )
    statvfs = hanging_statvfs("/dead")
    pool = StatvfsPool(statvfs=statvfs, deadline_seconds=0.3)
    collector = collector_of(root, pool)
    collected = collector.collect()

    assert_sound(collector, collected)
    dead_mount = ("/dead", "nfs4", "filer:/x")
    assert value_of(collected, SIZE_BYTES, *dead_mount) is None
    assert value_of(collected, DEVICE_ERROR, *dead_mount) == 1
    assert value_of(collected, "host_filesystem_readonly", *dead_mount) == 1
    assert value_of(collected, SIZE_BYTES, "/alive", "nfs4", "filer:/y") == 4096000
    assert value_of(collected, DEVICE_ERROR, "/", "ext4", "/dev/sda1") == 0
    assert [reason for reason, _ in collected.problems] == ["hanging"]


def test_a_hanging_mount_receives_no_second_call_until_the_first_returns(
    hanging_statvfs: Callable[..., HangingStatvfs],
) -> None:
    statvfs = hanging_statvfs("/dead")
    deadline_seconds = 3.0
    pool, call_seconds = StatvfsPool(statvfs=statvfs, deadline_seconds=deadline_seconds), []
    for _ in range(4):
        start_time = time.monotonic()
        assert call_statvfs(pool, "/dead", "/alive") == {
            "/dead": None,
            "/alive": STATVFS_RESULT,
            "/": STATVFS_RESULT,
        }
        call_seconds.append(time.monotonic() - start_time)
    assert statvfs.calls.count("/dead") == 1
    assert statvfs.calls.count("/alive") == 4
    assert call_seconds[0] >= deadline_seconds
    assert min(call_seconds[1:]) < deadline_seconds  # later calls do not wait for the hanging mount

    statvfs.paths.clear()
    statvfs.release.set()
    wait_until(lambda: call_statvfs(pool, "/dead")["/dead"] == STATVFS_RESULT)

    assert statvfs.calls.count("/dead") == 2


def test_a_reloaded_collector_does_not_call_a_hanging_mount_again(
    tmp_path: Path, hanging_statvfs: Callable[..., HangingStatvfs]
) -> None:
    root = machine_of(tmp_path, "1 0 0:40 / /dead rw - nfs4 filer:/x rw")
    statvfs = hanging_statvfs("/dead")
    pool = StatvfsPool(statvfs=statvfs, deadline_seconds=0.2)
    collector_of(root, pool).collect()
    collected = collector_of(root, pool, fs_types_include=["nfs*"]).collect()
    catalogue_entry = next(entry for entry in CATALOGUE if entry.name == "filesystem")
    instances = [catalogue_entry.factory() for _ in range(2)]

    assert value_of(collected, DEVICE_ERROR, "/dead", "nfs4", "filer:/x") == 1
    assert statvfs.calls == ["/dead"]
    assert len({id(vars(instance)["_pool"]) for instance in instances}) == 1


def test_patterns_choose_mount_points_and_filesystem_types() -> None:
    collected = collector_of(
        MACHINES / "node", mount_points_include=["/home/team?one", "/scratch"], fs_types_exclude=["xfs"]
    ).collect()

    assert value_of(collected, DEVICE_ERROR, "/home/team one", "nfs4", "filer.example:/export/team one") == 0
    assert sum(len(metric.samples) for metric in collected if metric.name == DEVICE_ERROR) == 1


def test_each_run_has_the_free_space_of_each_responding_checkpoint_directory(
    tmp_path: Path, hanging_statvfs: Callable[..., HangingStatvfs]
) -> None:
    pool = StatvfsPool(statvfs=hanging_statvfs("/dead"), deadline_seconds=0.2)
    paths = [Path("/dead"), Path("/data")]
    collected = CheckpointDirsCollector(paths, runs=lambda: {"b", "a"}, pool=pool).collect()
    missing = CheckpointDirsCollector([tmp_path / "missing"], runs=lambda: {"r"}).collect()

    samples = [sample for metric in collected for sample in metric.samples]
    sample_values = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
    assert sample_values == {
        (f"training_checkpoint_dir_{quantity}_bytes", run, "/data"): size
        for quantity, size in (("available", 400 * 4096), ("size", 1000 * 4096))
        for run in ("a", "b")
    }
    assert [reason for reason, _ in collected.problems] == ["hanging"]
    assert missing.problems == [("unreadable", f"{tmp_path}/missing: No such file or directory")]


@pytest.mark.parametrize(("paths", "runs"), [((), {"r"}), ((Path("/"),), set()), ((Path("/"),), None)])
def test_without_checkpoint_directories_or_runs_no_series_are_published(
    paths: tuple[Path, ...], runs: set[str] | None
) -> None:
    collected = CheckpointDirsCollector(paths, runs=lambda: runs).collect()

    assert not collected
    assert not collected.problems


@given(st.binary(max_size=30))
def test_every_name_survives_the_escaping_of_the_kernel(name: bytes) -> None:
    escaped_name = b"".join(b"\\%03o" % byte if byte in b" \t\n\\#" else bytes((byte,)) for byte in name)

    assert os.fsencode(unescape(os.fsdecode(escaped_name))) == name


@given(st.lists(st.sampled_from(["/", "/a", "/a/b", "/a/b/c", "/d"]), max_size=6))
def test_each_path_has_at_most_one_visible_mount_after_any_sequence_of_mounts(
    mount_points: list[str],
) -> None:
    # As in the kernel, a mount has as its parent the visible mount that its path lies in.
    mounts: list[Mount] = parse_mounts("10 1 0:10 / / rw - ext4 x rw")
    for mount_id, path in enumerate(mount_points, 100):
        parents = [
            mount
            for mount in visible_mounts(mounts)
            if mount.path == path or path.startswith(mount.path.rstrip("/") + "/")
        ]
        parent = max(parents, key=lambda mount: len(mount.path))
        mounts = [*mounts, *parse_mounts(f"{mount_id} {parent.id} 0:{mount_id} / {path} rw - ext4 x rw")]
        paths = [mount.path for mount in visible_mounts(mounts)]

        assert len(paths) == len(set(paths))
        assert mounts[-1] in visible_mounts(mounts)
        assert not [below for below in paths if below != path and below.startswith(path.rstrip("/") + "/")]


# A real FUSE filesystem whose daemon never responds --------------------------------------------------

CHILD = TESTS / "fuse_child.py"
FUSE_NOT_PERMITTED = 77

needs_fuse = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None or not Path("/dev/fuse").exists(),
    reason="mounting needs root, unshare and /dev/fuse",
)


def run_fuse_child(program: str, directory: Path) -> Any:
    """Run a program beside a filesystem that hangs, and return its report."""
    completed = subprocess.run(
        ["unshare", "--mount", "--propagation=private", sys.executable, CHILD, program, directory],
        env={**os.environ, "PYTHONPATH": str(CHILD.parent.parent)},
        capture_output=True,
        text=True,
        timeout=3 * WAIT_LIMIT_SECONDS,
        check=False,
    )
    if completed.returncode == FUSE_NOT_PERMITTED or "unshare failed" in completed.stderr:
        pytest.skip("mounting is not permitted on this machine")
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout)


@needs_fuse
def test_a_fuse_filesystem_that_hangs_is_called_once_and_affects_only_itself(tmp_path: Path) -> None:
    report = run_fuse_child("collect", tmp_path)

    assert report["calls"] == 1
    for collected in report["passes"]:
        assert collected["errors"] == {"/": 0.0, str(tmp_path): 1.0}
        assert collected["reasons"] == ["hanging"]
        assert collected["seconds"] < WAIT_LIMIT_SECONDS  # without the deadline, statvfs would never return


@needs_fuse
def test_a_sidecar_that_no_signal_can_end_does_not_delay_the_job(tmp_path: Path) -> None:
    report = run_fuse_child("run", tmp_path)

    assert report["status"] == 3, report["log"]
    assert "does not exit after SIGKILL" in report["log"]
    assert report["seconds"] < WAIT_LIMIT_SECONDS
