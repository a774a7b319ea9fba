from __future__ import annotations

import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from feed_support import (
    make_default,
    needs_root,
    new_identity,
    new_recording,
    only_entry,
    publish_once,
    training_process,
)

from exporter.errors import FeedDirectoryError
from exporter.feed.encoder import encode
from exporter.feed.reader import LEFTOVER_SECONDS, SETTLE_SECONDS, FeedReader
from exporter.feed.snapshot import Snapshot
from exporter.feed.writer import FeedWriter


class Clock:
    """A monotonic clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def owner_of(
    directory: Path, clock: Callable[[], float] = time.monotonic, max_files: int = 4096
) -> FeedReader:
    reader = FeedReader(directory, monotonic=clock, max_files=max_files)
    assert reader.acquire_ownership()
    return reader


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} - {"owner.lock"}


# What is read, and when again


def test_an_unchanged_file_is_not_decoded_again(tmp_path: Path) -> None:
    writer, reader = FeedWriter(tmp_path, new_identity()), FeedReader(tmp_path)
    writer.publish(new_recording())
    first, second = only_entry(reader).snapshot, only_entry(reader).snapshot
    writer.publish(new_recording())
    third = only_entry(reader).snapshot

    assert first is second
    assert third is not first
    assert third.recording.stats[0].definition is first.recording.stats[0].definition
    writer.close()


def test_a_change_shows_even_where_inode_time_and_size_stay(tmp_path: Path) -> None:
    identity, reader = new_identity(), FeedReader(tmp_path)
    path = tmp_path / f"{identity.id}.feed"
    snapshot = Snapshot(identity, 1, 1.0, 1.0, new_recording(count=1))
    path.write_bytes(encode(snapshot))
    os.utime(path, ns=(0, 0))
    assert only_entry(reader).snapshot.sequence == 1
    path.write_bytes(encode(snapshot.replace(sequence=2, recording=new_recording(count=2))))
    os.utime(path, ns=(0, 0))

    assert only_entry(reader).snapshot.recording.stats[0].count == 2


def test_other_files_are_nobodys_business(tmp_path: Path) -> None:
    for name in ("state.json", "notes", ".feed.swp", f"{'0' * 32}.tmp", "owner.lock"):
        (tmp_path / name).write_text("x")
    (tmp_path / "runs").mkdir()

    scan = FeedReader(tmp_path).scan()

    assert (scan.entries, scan.refused) == ((), ())


# Age


def test_age_is_counted_from_the_last_change_by_the_readers_own_clock(tmp_path: Path) -> None:
    clock = Clock()
    writer = FeedWriter(tmp_path, new_identity(), clock=lambda: 5e9)  # a writer far in the future
    reader = FeedReader(tmp_path, monotonic=clock, clock=lambda: 0.0)
    writer.publish(new_recording())
    ages = [only_entry(reader).age_seconds]
    clock.now += 7
    ages.append(only_entry(reader).age_seconds)
    writer.publish(new_recording())
    ages.append(only_entry(reader).age_seconds)
    clock.now += 2
    ages.append(only_entry(reader).age_seconds)

    assert ages == [0.0, 7.0, 0.0, 2.0]
    writer.close()


def test_at_first_sight_the_age_is_that_of_the_file(tmp_path: Path) -> None:
    process = publish_once(tmp_path)
    os.utime(tmp_path / f"{process}.feed", (1000, 1000))

    assert only_entry(FeedReader(tmp_path, clock=lambda: 1090.0)).age_seconds == pytest.approx(90, abs=1)


# What is refused


def refused(directory: Path, **options: object) -> dict[str, str]:
    """Scan twice, as a refusal is told every time; the good file beside must be read."""
    good = publish_once(directory)
    reader = FeedReader(directory, **options)  # type: ignore[arg-type]  # each test's own options
    first, second = reader.scan(), reader.scan()
    assert [entry.snapshot.process.id for entry in first.entries] == [good]
    assert first.refused == second.refused
    return dict(first.refused)


def feed_name() -> str:
    return f"{os.urandom(16).hex()}.feed"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: b"", "truncated"),
        (lambda data: data[:-1], "truncated"),
        (lambda data: b"GIF89a" + data, "magic"),
        (lambda data: data[:-1] + b" ", "checksum"),
        (lambda data: data + b" ", "content"),
        (lambda data: data[:8] + struct.pack("<H", 99) + data[10:], "version"),
    ],
)
def test_a_damaged_file_costs_itself_only(
    tmp_path: Path, damage: Callable[[bytes], bytes], reason: str
) -> None:
    identity = new_identity()
    path = tmp_path / f"{identity.id}.feed"
    path.write_bytes(damage(encode(Snapshot(identity, 1, 1.0, 1.0, new_recording()))))

    assert refused(tmp_path) == {path.name: reason}


@pytest.mark.parametrize(
    ("put", "reason"),
    [
        (lambda path, other: path.symlink_to(other), "symlink"),
        (lambda path, other: path.symlink_to("nowhere"), "symlink"),
        (lambda path, other: path.hardlink_to(other), "links"),
        (lambda path, other: path.mkdir(), "not_regular"),
        (lambda path, other: os.mkfifo(path), "not_regular"),
    ],
)
def test_what_is_no_plain_file_is_refused(
    tmp_path: Path, put: Callable[[Path, Path], object], reason: str
) -> None:
    feed, other = tmp_path / "feed", tmp_path / "other"
    feed.mkdir()
    other.touch()
    path = feed / feed_name()
    put(path, other)

    assert refused(feed) == {path.name: reason}


def test_a_copy_under_another_name_does_not_count_twice(tmp_path: Path) -> None:
    source, copy = publish_once(tmp_path), feed_name()
    shutil.copy(tmp_path / f"{source}.feed", tmp_path / copy)
    (tmp_path / f"{source}.feed").unlink()

    assert refused(tmp_path) == {copy: "name"}


def test_a_name_that_is_no_process_id_is_refused_and_printable(tmp_path: Path) -> None:
    for name in (b"x.feed", b"\xff\n.feed", b"A" * 32 + b".feed", b".feed"):
        (tmp_path / os.fsdecode(name)).touch()

    assert refused(tmp_path) == {
        "x.feed": "name",
        "\\udcff\\n.feed": "name",
        "A" * 32 + ".feed": "name",
        ".feed": "name",
    }


def test_a_file_above_the_limit_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / feed_name()
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: reading it would take for ever

    assert refused(tmp_path) == {path.name: "too_large"}


@needs_root
def test_a_file_of_somebody_else_is_refused_in_the_default_directory_and_read_in_a_chosen_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = make_default(tmp_path, monkeypatch)
    foreign = [publish_once(where) for where in (default, tmp_path)]
    for name, where in zip(foreign, (default, tmp_path), strict=True):
        os.chown(where / f"{name}.feed", 12345, 12345)

    assert len(FeedReader(tmp_path).scan().entries) == 1
    assert refused(default) == {f"{foreign[0]}.feed": "owner"}


@needs_root
def test_a_reader_who_may_not_read_a_file_says_so() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own directories are closed to other users
        directory = Path(name)
        directory.chmod(0o755)
        process = publish_once(directory)
        (directory / f"{process}.feed").chmod(0o600)
        os.seteuid(12345)
        try:
            scan = FeedReader(directory).scan()
        finally:
            os.seteuid(0)

    assert scan.refused == ((f"{process}.feed", "unreadable"),)


def test_a_process_whose_life_cannot_be_told_is_refused(tmp_path: Path) -> None:
    process = publish_once(tmp_path)
    (tmp_path / f"{process}.lock").unlink()
    (tmp_path / f"{process}.lock").symlink_to("nowhere")

    assert refused(tmp_path) == {f"{process}.feed": "lock"}


def test_a_file_that_becomes_good_is_read_and_one_that_becomes_damaged_is_not_shown_as_it_was(
    tmp_path: Path,
) -> None:
    reader, process = FeedReader(tmp_path), publish_once(tmp_path)
    path = tmp_path / f"{process}.feed"
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    assert reader.scan().refused
    path.write_bytes(good)
    assert only_entry(reader).snapshot.process.id == process
    path.write_bytes(b"x")

    assert reader.scan().entries == ()


# Crowds


def test_files_beyond_the_limit_are_refused_and_never_those_that_were_read_before(tmp_path: Path) -> None:
    reader = FeedReader(tmp_path, max_files=3)
    before = {publish_once(tmp_path) for _ in range(3)}
    reader.scan()
    for number in range(5):
        (tmp_path / f"{number:032x}.feed").write_bytes(b"in front of all by name")

    scan = reader.scan()

    assert {entry.snapshot.process.id for entry in scan.entries} == before
    assert [reason for _, reason in scan.refused] == ["too_many"] * 5


def test_a_crowd_of_empty_files_hides_no_later_job_and_is_cleared(tmp_path: Path) -> None:
    clock = Clock()
    reader = owner_of(tmp_path, clock, max_files=40)
    for number in range(42):
        (tmp_path / f"{number:032x}.feed").touch()
    reader.scan()
    later = {publish_once(tmp_path), publish_once(tmp_path)}
    found = {entry.snapshot.process.id for entry in reader.scan().entries}
    for _ in range(3):
        clock.now += LEFTOVER_SECONDS
        reader.scan()

    assert found == later
    assert {name for name in names(tmp_path) if name.endswith(".feed")} == {f"{one}.feed" for one in later}
    reader.release_ownership()


# The directory itself


def test_a_missing_default_directory_holds_nothing_and_a_missing_chosen_one_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert FeedReader(make_default(tmp_path, monkeypatch)).scan().entries == ()
    with pytest.raises(FeedDirectoryError):
        FeedReader(tmp_path / "feed").scan()


# Ownership and removal


def test_of_two_readers_both_read_and_one_owns(tmp_path: Path) -> None:
    with training_process(tmp_path) as child:
        child.tell("publish")
        first, second = FeedReader(tmp_path), FeedReader(tmp_path)
        assert first.acquire_ownership()

        assert not second.acquire_ownership()
        assert first.acquire_ownership()
        assert (first.owns, second.owns) == (True, False)
        assert only_entry(first).alive
        assert only_entry(second).alive
        assert not second.remove(child.id)
        first.release_ownership()
        assert second.acquire_ownership()
        second.release_ownership()


def test_a_removed_owner_lock_is_made_again(tmp_path: Path) -> None:
    reader = owner_of(tmp_path)
    (tmp_path / "owner.lock").unlink()

    assert reader.acquire_ownership()
    assert not FeedReader(tmp_path).acquire_ownership()
    reader.release_ownership()


def test_the_owner_removes_what_a_dead_process_left(tmp_path: Path) -> None:
    clock = Clock()
    reader = owner_of(tmp_path, clock)
    with training_process(tmp_path) as child:
        child.tell("publish")
        only_entry(reader)
        child.kill()
        clock.now += SETTLE_SECONDS
        (tmp_path / f"{child.id}.tmp").touch()  # killed while writing
        (tmp_path / "notes").touch()
        only_entry(reader)

        assert reader.remove(child.id)
        assert names(tmp_path) == {"notes"}
        assert reader.remove(child.id)
    reader.release_ownership()


def test_removal_never_takes_the_files_of_the_living(tmp_path: Path) -> None:
    reader = owner_of(tmp_path)
    with training_process(tmp_path) as child:
        child.tell("publish")
        before_any_scan = reader.remove(child.id)
        only_entry(reader)

        assert not before_any_scan
        assert not reader.remove(child.id)
        assert names(tmp_path) == {f"{child.id}.feed", f"{child.id}.lock"}
    reader.release_ownership()


def test_removal_waits_for_a_job_that_has_only_lost_its_lock(tmp_path: Path) -> None:
    clock = Clock()
    reader = owner_of(tmp_path, clock)
    with training_process(tmp_path) as child:
        child.tell("publish")
        only_entry(reader)
        child.tell("close_all")
        lost = only_entry(reader)
        too_early = reader.remove(child.id)
        child.tell("publish")
        found = only_entry(reader)
        child.tell("close_all")
        only_entry(reader)
        clock.now += SETTLE_SECONDS
        much_later = reader.remove(child.id)

        assert (lost.alive, too_early) == (False, False)
        assert (found.alive, found.snapshot.sequence) == (True, 2)
        assert much_later
    reader.release_ownership()


def test_removal_waits_until_the_last_snapshot_was_read(tmp_path: Path) -> None:
    reader, writer = owner_of(tmp_path), FeedWriter(tmp_path, new_identity())
    process = f"{writer.identity.id}"
    writer.publish(new_recording(final=True))
    only_entry(reader)
    writer.publish(new_recording(final=True, count=2))
    writer.close()
    unread = reader.remove(process)
    last = only_entry(reader)

    assert not unread
    assert last.snapshot.recording.stats[0].count == 2
    assert reader.remove(process)
    reader.release_ownership()


def test_nothing_is_lost_of_processes_that_come_and_go_while_the_owner_reads_and_removes(
    tmp_path: Path,
) -> None:
    reader, lives = owner_of(tmp_path), 1500
    ended: set[str] = set()
    last_counts: set[int] = set()
    with training_process(tmp_path) as child:
        assert child.process.stdin is not None
        child.process.stdin.write(f"short_lives {lives}\n")
        child.process.stdin.flush()
        while len(ended) < lives:
            for entry in reader.scan().entries:
                if not entry.alive:
                    ended.add(entry.snapshot.process.id)
                    last_counts.add(entry.snapshot.recording.stats[0].count)
                    assert reader.remove(entry.snapshot.process.id)

        assert child.answer() == "lived"
    assert last_counts == {2}
    assert names(tmp_path) == set()
    reader.release_ownership()


@pytest.mark.parametrize("name", ["../victim", "", "x" * 32, "owner"])
def test_only_files_of_a_process_are_removed(tmp_path: Path, name: str) -> None:
    feed = tmp_path / "feed"
    feed.mkdir()
    (tmp_path / "victim.feed").touch()
    reader = owner_of(feed)

    assert not reader.remove(name)
    assert (tmp_path / "victim.feed").exists()
    reader.release_ownership()


def test_the_owner_clears_what_never_became_a_feed_after_a_while(tmp_path: Path) -> None:
    clock = Clock()
    reader = owner_of(tmp_path, clock)
    dead = f"{1:032x}"
    for leftover in (f"{dead}.lock", f"{dead}.tmp"):
        (tmp_path / leftover).touch()
    with training_process(tmp_path) as child:
        child.tell("publish")
        (tmp_path / f"{child.id}.feed").unlink()
        reader.scan()
        clock.now += LEFTOVER_SECONDS - 1
        reader.scan()
        early = names(tmp_path)
        clock.now += 1
        reader.scan()

        assert early == {f"{dead}.lock", f"{dead}.tmp", f"{child.id}.lock"}
        assert names(tmp_path) == {f"{child.id}.lock"}
    reader.release_ownership()


def test_readers_never_disturb_a_writer_that_writes_as_fast_as_it_can(tmp_path: Path) -> None:
    readers = [FeedReader(tmp_path), owner_of(tmp_path)]
    with training_process(tmp_path) as child:
        assert child.process.stdin is not None
        child.process.stdin.write("flood\n")
        child.process.stdin.flush()
        assert child.answer() == "1"
        sequences: list[int] = []
        while len(sequences) < 200 or sequences[-1] == sequences[0]:
            for reader in readers:
                entry = only_entry(reader)
                assert entry.alive
                sequences.append(entry.snapshot.sequence)
        told = [int(line) for line in child.kill().split()]

    assert told == list(range(2, len(told) + 2))  # no snapshot failed
    assert sequences == sorted(sequences)
    readers[1].release_ownership()
