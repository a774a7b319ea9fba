"""Feed writer: files, permissions, failed writes, limits and removal of old files."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from feed_support import (
    mounted_filesystem,
    new_identity,
    new_recording,
    only_entry,
    publish_once,
    redirect_default_directory,
    training_process,
)

from exporter.feed import writer as writer_module
from exporter.feed.decoder import decode
from exporter.feed.encoder import HEADER, MAGIC, VERSION
from exporter.feed.reader import FeedReader
from exporter.feed.writer import FeedWriter


def test_published_snapshots_are_read_until_a_normal_exit(tmp_path: Path) -> None:
    identity = new_identity(labels=(("team", "vision"),))
    writer = FeedWriter(tmp_path, identity, flush_seconds=0.5, clock=lambda: 12.5)
    assert not list(tmp_path.iterdir())  # construction touches no file
    reader, entries = FeedReader(tmp_path), []

    for recording in (new_recording(3), new_recording(final=True)):
        assert writer.publish(recording)
        entries.append(only_entry(reader))
        assert entries[-1].snapshot.recording == recording
    writer.close()

    snapshot = entries[0].snapshot
    assert (snapshot.process, snapshot.written, snapshot.flush_seconds) == (identity, 12.5, 0.5)
    entries.append(only_entry(reader))
    assert [(entry.is_alive, entry.snapshot.sequence) for entry in entries] == [
        (True, 1),
        (True, 2),
        (False, 2),
    ]
    assert not writer.publish(new_recording())


def test_files_are_private_in_the_default_directory_and_follow_the_umask_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default_directory, shared_directory = (
        redirect_default_directory(tmp_path, monkeypatch),
        tmp_path / "shared",
    )
    shared_directory.mkdir()
    previous_umask = os.umask(0o027)
    try:
        for directory in (default_directory, shared_directory):
            writer = FeedWriter(directory, new_identity())
            assert writer.publish(new_recording())
            writer.close()
    finally:
        os.umask(previous_umask)

    modes = [
        {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
        for directory in (default_directory, shared_directory)
    ]
    assert modes == [{0o600}, {0o640}]
    assert stat.S_IMODE(default_directory.stat().st_mode) == 0o700


def test_a_relative_directory_is_resolved_before_the_job_changes_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "feed").mkdir()
    monkeypatch.chdir(tmp_path)
    writer = FeedWriter("feed", new_identity())
    monkeypatch.chdir("/")

    assert writer.publish(new_recording())

    assert only_entry(FeedReader(tmp_path / "feed")).is_alive
    writer.close()


def test_a_full_tmpfs_makes_the_feed_stale_and_is_counted(tmp_path: Path) -> None:
    with (
        mounted_filesystem(tmp_path, "-t", "tmpfs", "-o", "size=64k", "tmpfs"),
        training_process(tmp_path) as child,
    ):
        reader = FeedReader(tmp_path)
        assert child.execute("publish 20") == "True"
        filesystem = os.statvfs(tmp_path)
        (tmp_path / "other").write_bytes(bytes(filesystem.f_bavail * filesystem.f_bsize))

        outcomes = [child.execute("publish 20") for _ in range(3)]
        entry = only_entry(reader)
        (tmp_path / "other").unlink()
        outcomes.append(child.execute("publish 20"))

        assert outcomes == ["False", "False", "False", "True"]
        assert (entry.is_alive, entry.snapshot.sequence, entry.snapshot.dropped) == (True, 1, {})
        assert (entry.is_outdated, only_entry(reader).is_outdated) == (True, False)
        assert only_entry(reader).snapshot.dropped == {"write_failed": 3}
        assert only_entry(reader).snapshot.sequence == 2
        assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(("samples", "is_written"), [(20, True), (2000, False)])
def test_the_final_snapshot_overwrites_the_last_one_on_a_full_tmpfs_if_it_fits(
    tmp_path: Path, samples: int, is_written: bool
) -> None:
    with mounted_filesystem(tmp_path, "-t", "tmpfs", "-o", "size=64k", "tmpfs"):
        writer = FeedWriter(tmp_path, new_identity())
        assert writer.publish(new_recording(20))
        filesystem = os.statvfs(tmp_path)
        (tmp_path / "other").write_bytes(bytes(filesystem.f_bavail * filesystem.f_bsize))
        assert not writer.publish(new_recording(20))
        final_recording = new_recording(samples, final=True)

        assert writer.publish(final_recording) == is_written
        writer.close()
        snapshot = only_entry(FeedReader(tmp_path)).snapshot
        assert snapshot.recording == (final_recording if is_written else new_recording(20))
        assert snapshot.dropped == ({"write_failed": 1} if is_written else {})


def test_a_job_without_free_descriptors_continues(tmp_path: Path) -> None:
    with training_process(tmp_path) as child:
        child.execute("publish")
        child.execute("limit_descriptors 4")
        outcomes = [child.execute("publish")]
        child.execute("limit_descriptors 100")
        outcomes.append(child.execute("publish"))

        assert outcomes == ["False", "True"]
        assert only_entry(FeedReader(tmp_path)).snapshot.dropped == {"write_failed": 1}


def test_a_directory_is_created_again_once_its_parent_exists(tmp_path: Path) -> None:
    directory = tmp_path / "shared" / "feed"
    directory.mkdir(parents=True)
    writer = FeedWriter(directory, new_identity())
    outcomes = [writer.publish(new_recording())]
    shutil.rmtree(directory.parent)
    outcomes.append(writer.publish(new_recording()))
    problem = writer.problem
    directory.parent.mkdir()
    outcomes.append(writer.publish(new_recording()))

    assert outcomes == [True, False, True]
    assert "cannot create the feed directory" in str(problem)
    entry = only_entry(FeedReader(directory))
    assert (entry.is_alive, entry.snapshot.dropped, writer.problem) == (True, {"write_failed": 1}, None)
    writer.close()


@pytest.mark.parametrize(
    "remove_directory", [shutil.rmtree, lambda directory: directory.rename(f"{directory}-moved")]
)
def test_the_default_directory_is_created_again_when_removed(
    tmp_path: Path, remove_directory: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = redirect_default_directory(tmp_path, monkeypatch)
    writer = FeedWriter(directory, new_identity())
    assert writer.publish(new_recording())
    remove_directory(directory)

    assert writer.publish(new_recording())

    assert only_entry(FeedReader(directory)).is_alive
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    writer.close()


@pytest.mark.parametrize("suffix", [".feed", ".lock"])
def test_a_directory_in_place_of_the_file_is_a_counted_failure(tmp_path: Path, suffix: str) -> None:
    identity = new_identity()
    (tmp_path / (identity.id + suffix)).mkdir()
    writer = FeedWriter(tmp_path, identity)

    assert not writer.publish(new_recording())

    assert writer.dropped_counts == {"write_failed": 1}
    assert not [path for path in tmp_path.glob("*.tmp") if path.is_file()]
    writer.close()


@pytest.mark.parametrize("suffix", [".feed", ".tmp"])
def test_a_link_in_place_of_the_file_is_replaced_and_not_followed(tmp_path: Path, suffix: str) -> None:
    identity = new_identity()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / (identity.id + suffix)).symlink_to(victim)
    writer = FeedWriter(tmp_path, identity)

    assert writer.publish(new_recording())

    assert victim.read_text() == "precious"
    assert only_entry(FeedReader(tmp_path)).snapshot.process == identity
    writer.close()


def test_a_snapshot_above_the_limit_drops_and_counts_its_newest_stats(tmp_path: Path) -> None:
    identity = new_identity()
    writer = FeedWriter(tmp_path, identity, max_bytes=20_000)
    outcomes = [writer.publish(new_recording(stats)) for stats in (10, 200, 200)]

    snapshot = only_entry(FeedReader(tmp_path, max_bytes=20_000)).snapshot
    kept_count = len(snapshot.recording.stats)
    assert outcomes == [True, True, True]
    assert 10 < kept_count < 200
    assert snapshot.recording == new_recording(kept_count)
    assert snapshot.dropped == writer.dropped_counts == {"too_large": 2 * (200 - kept_count)}
    assert f"{200 - kept_count} Stats, starting with" in str(writer.notice)
    writer.close()


def test_an_encoding_error_is_counted_and_not_raised(tmp_path: Path) -> None:
    writer = FeedWriter(tmp_path, new_identity())
    recording = new_recording(1)
    invalid_recording = recording.replace(stats=(recording.stats[0].replace(count=object()),))

    assert not writer.publish(invalid_recording)
    assert writer.publish(recording)

    assert only_entry(FeedReader(tmp_path)).snapshot.dropped == {"write_failed": 1}
    writer.close()


def test_a_hanging_write_delays_another_thread_for_a_limited_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "MAX_WAIT_SECONDS", 0.01)
    writer = FeedWriter(tmp_path, new_identity())
    writer._write_lock.acquire()

    assert not writer.publish(new_recording())
    writer.close()
    writer._write_lock.release()
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(60)
def test_the_last_snapshot_survives_sigkill_at_any_instant(tmp_path: Path) -> None:
    sequences = []
    for delay_seconds in itertools.chain([0.0, 0.0005], (0.0035 * index for index in range(13))):
        with training_process(tmp_path) as child:
            child.send("flood")
            time.sleep(delay_seconds)
            reported_sequences = child.kill().split()
            if reported_sequences:
                snapshot = decode((tmp_path / f"{child.id}.feed").read_bytes())
                assert snapshot.sequence - int(reported_sequences[-1]) in {0, 1}
                assert snapshot.recording.stats[-1].count == snapshot.sequence
                sequences.append(snapshot.sequence)

    assert max(sequences) > 1  # killed during the writes, not only before them
    assert len(FeedReader(tmp_path).scan().entries) >= len(sequences)


def test_a_writer_removes_only_files_dead_for_a_day(tmp_path: Path) -> None:
    old_id, new_id = publish_once(tmp_path), publish_once(tmp_path)
    incomplete_id = "0" * 32
    for leftover in (f"{incomplete_id}.lock", f"{incomplete_id}.tmp", "notes.txt", "overrides.json"):
        (tmp_path / leftover).touch()
    with training_process(tmp_path) as child:
        child.execute("publish")
        yesterday = time.time() - 90_000
        for path in tmp_path.iterdir():
            if new_id not in path.name:
                os.utime(path, (yesterday, yesterday))

        publish_once(tmp_path)

        process_ids = {path.name.split(".")[0] for path in tmp_path.iterdir()}
        assert {new_id, child.id, "notes", "overrides"} < process_ids
        assert not {old_id, incomplete_id} & process_ids
        assert len(process_ids) == 5  # and the file of the cleaning process


def test_without_record_locks_the_feed_can_be_imported() -> None:
    program = "import sys; sys.modules['fcntl'] = None; import exporter.feed.writer"

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    "process_json",
    ["[" * 100_000, '{"run":"r","rank":0,"trains":true,"started":0,"pid":Infinity}'],
    ids=["deep nesting", "infinite pid"],
)
def test_an_invalid_feed_file_of_another_process_does_not_disturb_the_search_for_rivals(
    tmp_path: Path, process_json: str
) -> None:
    other_identity = new_identity()
    other_writer = FeedWriter(tmp_path, other_identity)
    assert other_writer.publish(new_recording())
    section = f'{{"process":{process_json}}}'.encode()
    header = HEADER.pack(MAGIC, VERSION, 0, 0, bytes.fromhex(other_identity.id), 1, len(section), 0, 0)
    (tmp_path / f"{other_identity.id}.feed").write_bytes(header + section)
    times = itertools.count(100.0, writer_module.CONFLICT_SECONDS)
    identity = new_identity(run="r", rank=0, trains=True, run_given=True)
    writer = FeedWriter(tmp_path, identity, clock=lambda: next(times))

    outcomes = [writer.publish(new_recording()) for _ in range(3)]

    assert outcomes == [True, True, True]
    assert writer.notice is None
    writer.close()
    other_writer.close()
