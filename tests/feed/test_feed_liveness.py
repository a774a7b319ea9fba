"""Record locks of training processes: forks, lost locks, containers and read-only mounts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from feed_support import only_entry, read_only_view, training_process
from waiting import wait_until

from exporter.feed.files import RecordLock, find_lock_holder
from exporter.feed.reader import FeedReader


def test_a_fork_that_outlives_its_writer_does_not_hold_the_lock(tmp_path: Path) -> None:
    reader = FeedReader(tmp_path)
    with training_process(tmp_path) as child:
        child.execute("publish")
        worker = int(child.execute("fork"))
        is_alive_beside_worker = only_entry(reader).is_alive
        child.process.kill()
        child.process.wait()
        try:
            # The orphan has opened the lock file and tried to publish.
            wait_until((tmp_path / "orphan").exists)
            entry = only_entry(reader)

            assert is_alive_beside_worker
            assert (entry.is_alive, entry.snapshot.sequence) == (False, 1)
        finally:
            os.kill(worker, 9)


def test_a_fork_does_not_release_the_lock_of_its_parent(tmp_path: Path) -> None:
    with training_process(tmp_path) as child:
        child.execute("publish")
        assert child.execute("holder_in_fork") == str(child.process.pid)
        os.kill(int(child.execute("fork 1")), 9)

        assert only_entry(FeedReader(tmp_path)).is_alive
        assert child.execute("publish") == "True"


def acquire_lock(path: Path) -> RecordLock:
    lock = RecordLock.take(str(path), create_mode=0o600)
    assert lock is not None
    return lock


def test_a_lock_on_a_removed_file_is_not_taken(tmp_path: Path) -> None:
    path, acquisition_count = str(tmp_path / f"{'0' * 32}.lock"), 0
    with training_process(tmp_path) as child:
        assert child.execute("remove_repeatedly") == "removing"
        for _ in range(5000):
            lock = RecordLock.take(path, create_mode=0o600)
            if lock is not None:
                acquisition_count += 1
                assert lock.keep()
                lock.release()

    assert acquisition_count > 100


@pytest.mark.parametrize("command", ["close_all", "open_own_lock"])
def test_a_lost_lock_is_taken_again_with_the_next_snapshot(tmp_path: Path, command: str) -> None:
    with training_process(tmp_path) as child:
        child.execute("publish")
        child.execute(command)
        is_alive_without_lock = only_entry(FeedReader(tmp_path)).is_alive
        child.execute("publish")

        assert not is_alive_without_lock
        assert only_entry(FeedReader(tmp_path)).is_alive


def test_a_descriptor_reused_by_the_job_is_not_closed(tmp_path: Path) -> None:
    lock = acquire_lock(tmp_path / "lock")
    other_descriptor = os.open(tmp_path / "other", os.O_CREAT | os.O_RDWR)
    os.dup2(other_descriptor, lock._descriptor)  # equivalent to closing every descriptor and opening a file

    assert not lock.keep()
    lock.release()

    assert os.write(lock._descriptor, b"still open") == 10
    os.close(lock._descriptor)
    os.close(other_descriptor)


def test_a_process_that_reads_its_own_feed_keeps_its_lock(tmp_path: Path) -> None:
    with training_process(tmp_path) as child:
        child.execute("publish")

        assert child.execute("scan_self") == f"True {child.process.pid}"
        assert only_entry(FeedReader(tmp_path)).is_alive


def test_a_lock_is_taken_once_even_within_a_process(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    assert (find_lock_holder(path), list(tmp_path.iterdir())) == (None, [])
    lock = acquire_lock(tmp_path / "lock")

    assert RecordLock.take(path, create_mode=0o600) is None
    program = f"from exporter.feed.files import find_lock_holder; print(find_lock_holder({path!r}))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(result.stdout) == os.getpid()
    lock.release()
    assert find_lock_holder(path) is None


def test_a_lock_is_lost_when_its_file_is_removed_or_moved(tmp_path: Path) -> None:
    locks = [acquire_lock(tmp_path / name) for name in ("a", "b")]
    assert [lock.keep() for lock in locks] == [True, True]

    (tmp_path / "a").unlink()
    (tmp_path / "b").rename(tmp_path / "c")

    assert [lock.keep() for lock in locks] == [False, False]
    for lock in locks:
        lock.release()


@pytest.mark.parametrize(
    "replace_lock",
    [
        lambda path, other_file: path.symlink_to(other_file),
        lambda path, other_file: path.hardlink_to(other_file),
        lambda path, other_file: path.mkdir(),
        lambda path, other_file: os.mkfifo(path),
    ],
)
def test_only_a_regular_file_is_a_lock(tmp_path: Path, replace_lock: Callable[[Path, Path], object]) -> None:
    path, other_file = tmp_path / "lock", tmp_path / "other"
    other_file.touch()
    replace_lock(path, other_file)

    with pytest.raises(OSError):
        RecordLock.take(str(path), create_mode=0o600)
    with pytest.raises(OSError):
        find_lock_holder(str(path))


def test_a_reader_on_a_read_only_mount_sees_live_processes(tmp_path: Path) -> None:
    feed = tmp_path / "feed"
    feed.mkdir()
    with training_process(feed) as child, read_only_view(feed, tmp_path / "view") as view:
        child.execute("publish")
        reader = FeedReader(view)

        assert only_entry(reader).is_alive
        assert not reader.ownership.acquire()
        assert not reader.remove(child.id)
        child.kill()
        assert not only_entry(reader).is_alive


@pytest.fixture
def namespace() -> tuple[str, ...]:
    """Return the prefix that runs a command in a separate pid namespace."""
    prefix = ("unshare", "--pid", "--fork", "--kill-child")
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("creating a pid namespace is not permitted here")
    return prefix


def test_a_reader_in_another_pid_namespace_sees_live_processes(
    tmp_path: Path, namespace: tuple[str, ...]
) -> None:
    with training_process(tmp_path) as child:
        child.execute("publish")
        program = (
            "from pathlib import Path; from exporter.feed.reader import FeedReader;"
            f"(entry,) = FeedReader(Path({str(tmp_path)!r})).scan().entries; print(entry.is_alive, entry.pid)"
        )
        command = [*namespace, sys.executable, "-c", program]
        result = subprocess.run(command, capture_output=True, text=True, check=True)

        assert result.stdout.split() == ["True", "None"]


def test_a_writer_in_a_container_is_alive_until_it_is_killed(
    tmp_path: Path, namespace: tuple[str, ...]
) -> None:
    with training_process(tmp_path, *namespace) as child:
        child.execute("publish")
        assert only_entry(FeedReader(tmp_path)).is_alive
        child.kill()

        # The namespace ends shortly after its command.
        wait_until(lambda: not only_entry(FeedReader(tmp_path)).is_alive)


def test_a_read_lock_of_another_process_does_not_count_as_alive(tmp_path: Path) -> None:
    path = tmp_path / "one.lock"
    path.touch()
    program = (
        f"import fcntl, sys; file = open({str(path)!r}); fcntl.lockf(file, fcntl.LOCK_SH)\n"
        "print(1, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder_process:
        assert holder_process.stdout is not None
        holder_process.stdout.readline()
        holder_pid = find_lock_holder(str(path))
        holder_process.kill()

    assert holder_pid is None
