from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from feed_support import only_entry, read_only_view, training_process
from waiting import wait_until

from exporter.feed.files import RecordLock, holder
from exporter.feed.reader import FeedReader


def test_a_fork_that_outlives_its_writer_does_not_keep_it_alive(tmp_path: Path) -> None:
    reader = FeedReader(tmp_path)
    with training_process(tmp_path) as child:
        child.tell("publish")
        worker = int(child.tell("fork"))
        alive_beside_worker = only_entry(reader).alive
        child.process.kill()
        child.process.wait()
        try:
            wait_until(
                (tmp_path / "orphan").exists
            )  # the process has opened the lock file and tried to publish
            entry = only_entry(reader)

            assert alive_beside_worker
            assert (entry.alive, entry.snapshot.sequence) == (False, 1)
        finally:
            os.kill(worker, 9)


def test_a_fork_does_not_release_the_lock_of_its_parent(tmp_path: Path) -> None:
    with training_process(tmp_path) as child:
        child.tell("publish")
        assert child.tell("ask_in_fork") == str(child.process.pid)
        os.kill(int(child.tell("fork 1")), 9)

        assert only_entry(FeedReader(tmp_path)).alive
        assert child.tell("publish") == "True"


def acquired_lock(path: Path) -> RecordLock:
    lock = RecordLock.take(str(path), create_mode=0o600)
    assert lock is not None
    return lock


def test_a_lock_is_never_taken_on_a_removed_file(tmp_path: Path) -> None:
    path, times = str(tmp_path / f"{'0' * 32}.lock"), 0
    with training_process(tmp_path) as child:
        assert child.tell("remove_for_ever") == "removing"
        for _ in range(5000):
            lock = RecordLock.take(path, create_mode=0o600)
            if lock is not None:
                times += 1
                assert lock.keep()
                lock.release()

    assert times > 100


@pytest.mark.parametrize("mishap", ["close_all", "open_own"])
def test_a_lost_lock_is_taken_again_with_the_next_snapshot(tmp_path: Path, mishap: str) -> None:
    with training_process(tmp_path) as child:
        child.tell("publish")
        child.tell(mishap)
        alive_between = only_entry(FeedReader(tmp_path)).alive
        child.tell("publish")

        assert not alive_between
        assert only_entry(FeedReader(tmp_path)).alive


def test_a_descriptor_reused_by_the_job_is_not_closed(tmp_path: Path) -> None:
    lock = acquired_lock(tmp_path / "lock")
    other = os.open(tmp_path / "other", os.O_CREAT | os.O_RDWR)
    os.dup2(other, lock._descriptor)  # equivalent to closing every descriptor and opening a file

    assert not lock.keep()
    lock.release()

    assert os.write(lock._descriptor, b"still open") == 10
    os.close(lock._descriptor)
    os.close(other)


def test_a_process_that_reads_its_own_feed_keeps_its_lock(tmp_path: Path) -> None:
    with training_process(tmp_path) as child:
        child.tell("publish")

        assert child.tell("scan_self") == f"True {child.process.pid}"
        assert only_entry(FeedReader(tmp_path)).alive


def test_a_lock_is_taken_once_even_within_a_process(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    assert (holder(path), list(tmp_path.iterdir())) == (None, [])
    first = acquired_lock(tmp_path / "lock")

    assert RecordLock.take(path, create_mode=0o600) is None
    script = f"from exporter.feed.files import holder; print(holder({path!r}))"
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(completed.stdout) == os.getpid()
    first.release()
    assert holder(path) is None


def test_a_lock_is_lost_when_its_file_is_removed_or_moved(tmp_path: Path) -> None:
    locks = [acquired_lock(tmp_path / name) for name in ("a", "b")]
    assert [lock.keep() for lock in locks] == [True, True]

    (tmp_path / "a").unlink()
    (tmp_path / "b").rename(tmp_path / "c")

    assert [lock.keep() for lock in locks] == [False, False]
    for lock in locks:
        lock.release()


@pytest.mark.parametrize(
    "replace_lock",
    [
        lambda path, other: path.symlink_to(other),
        lambda path, other: path.hardlink_to(other),
        lambda path, other: path.mkdir(),
        lambda path, other: os.mkfifo(path),
    ],
)
def test_only_a_plain_file_is_a_lock(tmp_path: Path, replace_lock: Callable[[Path, Path], object]) -> None:
    path, other = tmp_path / "lock", tmp_path / "other"
    other.touch()
    replace_lock(path, other)

    with pytest.raises(OSError):
        RecordLock.take(str(path), create_mode=0o600)
    with pytest.raises(OSError):
        holder(str(path))


def test_a_reader_on_a_read_only_mount_sees_live_processes(tmp_path: Path) -> None:
    feed = tmp_path / "feed"
    feed.mkdir()
    with training_process(feed) as child, read_only_view(feed, tmp_path / "view") as view:
        child.tell("publish")
        reader = FeedReader(view)

        assert only_entry(reader).alive
        assert not reader.ownership.acquire()
        assert not reader.remove(child.id)
        child.kill()
        assert not only_entry(reader).alive


@pytest.fixture
def namespace() -> tuple[str, ...]:
    """Prefix that runs a command in a separate pid namespace."""
    inside = ("unshare", "--pid", "--fork", "--kill-child")
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("creating a pid namespace is not permitted here")
    return inside


def test_a_reader_in_another_pid_namespace_sees_live_processes(
    tmp_path: Path, namespace: tuple[str, ...]
) -> None:
    with training_process(tmp_path) as child:
        child.tell("publish")
        code = f"from pathlib import Path; from exporter.feed.reader import FeedReader; e, = FeedReader(Path({str(tmp_path)!r})).scan().entries; print(e.alive, e.pid)"
        command = [*namespace, sys.executable, "-c", code]
        completed = subprocess.run(command, capture_output=True, text=True, check=True)

        assert completed.stdout.split() == ["True", "None"]


def test_a_writer_in_a_container_is_seen_to_live_and_die(tmp_path: Path, namespace: tuple[str, ...]) -> None:
    with training_process(tmp_path, *namespace) as child:
        child.tell("publish")
        alive = only_entry(FeedReader(tmp_path)).alive
        child.kill()

        assert alive
        # The namespace ends shortly after its command.
        wait_until(lambda: not only_entry(FeedReader(tmp_path)).alive)


def test_a_read_lock_of_another_process_does_not_count_as_alive(tmp_path: Path) -> None:
    path = tmp_path / "one.lock"
    path.touch()
    program = (
        f"import fcntl, sys; kept = open({str(path)!r}); fcntl.lockf(kept, fcntl.LOCK_SH)\n"
        "print(1, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder_process:
        assert holder_process.stdout is not None
        holder_process.stdout.readline()
        holder_pid = holder(str(path))
        holder_process.kill()

    assert holder_pid is None
