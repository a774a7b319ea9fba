"""Feed reader: changed, refused and removed files, and ownership of the directory."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from feed_support import (
    needs_root,
    new_identity,
    new_recording,
    only_entry,
    publish_once,
    redirect_default_directory,
    training_process,
)

from exporter.errors import FeedDirectoryError
from exporter.feed.encoder import encode
from exporter.feed.reader import LEFTOVER_SECONDS, REMOVAL_DELAY_SECONDS, FeedReader
from exporter.feed.snapshot import Snapshot
from exporter.feed.writer import FeedWriter


class Clock:
    """Monotonic clock that advances only on request."""

    seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    """Return the clock of the owner."""
    return Clock()


@pytest.fixture
def owner(tmp_path: Path, clock: Clock) -> Iterator[FeedReader]:
    """Yield a reader that owns the test directory."""
    reader = FeedReader(tmp_path, monotonic=clock)
    assert reader.ownership.acquire()
    yield reader
    reader.ownership.release()


def file_names(directory: Path) -> set[str]:
    """Return the names of all files but the lock of the owner."""
    return {path.name for path in directory.iterdir()} - {"owner.lock"}


# Reading and re-reading


def test_an_unchanged_file_is_not_decoded_again(tmp_path: Path) -> None:
    writer, reader = FeedWriter(tmp_path, new_identity()), FeedReader(tmp_path)
    writer.publish(new_recording())
    snapshot, snapshot_of_unchanged_file = only_entry(reader).snapshot, only_entry(reader).snapshot
    writer.publish(new_recording())
    changed_snapshot = only_entry(reader).snapshot

    assert snapshot_of_unchanged_file is snapshot
    assert changed_snapshot is not snapshot
    assert changed_snapshot.recording.stats[0].definition is snapshot.recording.stats[0].definition
    writer.close()


def test_a_change_is_detected_even_with_equal_inode_time_and_size(tmp_path: Path) -> None:
    identity, reader = new_identity(), FeedReader(tmp_path)
    path = tmp_path / f"{identity.id}.feed"
    for count in (1, 2):
        path.write_bytes(encode(Snapshot(identity, count, 1.0, 1.0, new_recording(count=count))))
        os.utime(path, ns=(0, 0))

        assert only_entry(reader).snapshot.recording.stats[0].count == count


def test_other_files_are_ignored(tmp_path: Path) -> None:
    for name in ("state.json", "notes", ".feed.swp", f"{'0' * 32}.tmp", "owner.lock"):
        (tmp_path / name).write_text("x")
    (tmp_path / "runs").mkdir()

    scan = FeedReader(tmp_path).scan()

    assert (scan.entries, scan.refused_files) == ((), ())


def test_age_starts_at_the_file_time_and_then_follows_the_clock_of_the_reader(
    tmp_path: Path, clock: Clock
) -> None:
    writer = FeedWriter(tmp_path, new_identity(), clock=lambda: 5e9)  # a writer far in the future
    reader = FeedReader(tmp_path, monotonic=clock, clock=lambda: 1090.0)
    writer.publish(new_recording())
    os.utime(tmp_path / f"{writer.identity.id}.feed", (1000, 1000))
    ages = [only_entry(reader).age_seconds]
    clock.seconds += 7
    ages.append(only_entry(reader).age_seconds)
    writer.publish(new_recording())
    ages.append(only_entry(reader).age_seconds)
    clock.seconds += 2
    ages.append(only_entry(reader).age_seconds)

    assert ages == pytest.approx([90.0, 97.0, 0.0, 2.0])
    writer.close()


# Refused files


def refused_files(directory: Path) -> dict[str, str]:
    """Scan twice, and return the reason of each refused file by file name.

    Both scans must give the same reasons, and read a valid file in the same directory.
    """
    valid_id = publish_once(directory)
    reader = FeedReader(directory)
    scan, repeated_scan = reader.scan(), reader.scan()
    assert [entry.snapshot.process.id for entry in scan.entries] == [valid_id]
    assert repeated_scan.refused_files == scan.refused_files
    return dict(scan.refused_files)


def make_sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)  # 1 TiB, too large to be read


ENCODED_SNAPSHOT = encode(Snapshot(new_identity(), 1, 1.0, 1.0, new_recording()))


@pytest.mark.parametrize(
    ("replace_file", "reason"),
    [
        (lambda path, other_file: path.touch(), "truncated"),
        (lambda path, other_file: path.write_bytes(ENCODED_SNAPSHOT[:-1]), "truncated"),
        (lambda path, other_file: path.write_bytes(b"GIF89a" + ENCODED_SNAPSHOT), "magic"),
        (lambda path, other_file: path.write_bytes(ENCODED_SNAPSHOT[:-1] + b" "), "checksum"),
        (lambda path, other_file: path.write_bytes(ENCODED_SNAPSHOT + b" "), "content"),
        (
            lambda path, other_file: path.write_bytes(
                ENCODED_SNAPSHOT[:8] + struct.pack("<H", 99) + ENCODED_SNAPSHOT[10:]
            ),
            "version",
        ),
        # The samples of a copy under another name would count twice.
        (lambda path, other_file: path.write_bytes(ENCODED_SNAPSHOT), "name"),
        (lambda path, other_file: path.symlink_to(other_file), "symlink"),
        (lambda path, other_file: path.symlink_to("nowhere"), "symlink"),
        (lambda path, other_file: path.hardlink_to(other_file), "links"),
        (lambda path, other_file: path.mkdir(), "not_regular"),
        (lambda path, other_file: os.mkfifo(path), "not_regular"),
        (lambda path, other_file: make_sparse(path), "too_large"),
        (lambda path, other_file: path.touch() or path.with_suffix(".lock").symlink_to("nowhere"), "lock"),
    ],
)
def test_a_bad_file_affects_only_itself_and_is_reported_with_the_reason(
    tmp_path: Path, replace_file: Callable[[Path, Path], object], reason: str
) -> None:
    feed, other_file = tmp_path / "feed", tmp_path / "other"
    feed.mkdir()
    other_file.touch()
    path = feed / f"{os.urandom(16).hex()}.feed"
    replace_file(path, other_file)

    assert refused_files(feed) == {path.name: reason}


def test_a_file_name_without_a_process_id_is_refused_and_printable(tmp_path: Path) -> None:
    for name in (b"x.feed", b"\xff\n.feed", b"A" * 32 + b".feed", b".feed"):
        (tmp_path / os.fsdecode(name)).touch()

    printable_names = ("x.feed", "\\udcff\\n.feed", "A" * 32 + ".feed", ".feed")
    assert refused_files(tmp_path) == dict.fromkeys(printable_names, "name")


@needs_root
def test_a_file_of_another_user_is_refused_in_the_default_directory_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = redirect_default_directory(tmp_path, monkeypatch)
    foreign_ids = [publish_once(directory) for directory in (default, tmp_path)]
    for name, directory in zip(foreign_ids, (default, tmp_path), strict=True):
        os.chown(directory / f"{name}.feed", 12345, 12345)

    assert len(FeedReader(tmp_path).scan().entries) == 1
    assert refused_files(default) == {f"{foreign_ids[0]}.feed": "owner"}


@needs_root
def test_a_file_without_read_permission_is_reported() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own directories are closed to other users
        directory = Path(name)
        directory.chmod(0o755)
        process_id = publish_once(directory)
        (directory / f"{process_id}.feed").chmod(0o600)
        os.seteuid(12345)
        try:
            scan = FeedReader(directory).scan()
        finally:
            os.seteuid(0)

    assert scan.refused_files == ((f"{process_id}.feed", "unreadable"),)


def test_a_repaired_file_is_read_and_a_damaged_one_loses_its_last_value(
    tmp_path: Path,
) -> None:
    reader, process_id = FeedReader(tmp_path), publish_once(tmp_path)
    path = tmp_path / f"{process_id}.feed"
    valid_bytes = path.read_bytes()
    path.write_bytes(valid_bytes[:-1])
    assert reader.scan().refused_files
    path.write_bytes(valid_bytes)
    assert only_entry(reader).snapshot.process.id == process_id
    path.write_bytes(b"x")

    assert reader.scan().entries == ()


# Limits of the number of files


def test_new_files_beyond_the_limit_are_refused_and_known_files_stay(tmp_path: Path) -> None:
    reader = FeedReader(tmp_path, max_files=3)
    initial_ids = {publish_once(tmp_path) for _ in range(3)}
    reader.scan()
    for process_number in range(5):
        (tmp_path / f"{process_number:032x}.feed").write_bytes(b"sorted before the other files")

    scan = reader.scan()

    assert {entry.snapshot.process.id for entry in scan.entries} == initial_ids
    assert [reason for _, reason in scan.refused_files] == ["too_many"] * 5


def test_many_empty_files_hide_no_later_job_and_are_removed(tmp_path: Path, clock: Clock) -> None:
    reader = FeedReader(tmp_path, monotonic=clock, max_files=40)
    assert reader.ownership.acquire()
    for process_number in range(42):
        (tmp_path / f"{process_number:032x}.feed").touch()
    reader.scan()
    later_ids = {publish_once(tmp_path), publish_once(tmp_path)}
    process_ids = {entry.snapshot.process.id for entry in reader.scan().entries}
    for _ in range(3):
        clock.seconds += LEFTOVER_SECONDS
        reader.scan()

    assert process_ids == later_ids
    assert {name for name in file_names(tmp_path) if name.endswith(".feed")} == {
        f"{process_id}.feed" for process_id in later_ids
    }
    reader.ownership.release()


def test_a_missing_default_directory_is_empty_and_a_missing_configured_one_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert FeedReader(redirect_default_directory(tmp_path, monkeypatch)).scan().entries == ()
    with pytest.raises(FeedDirectoryError):
        FeedReader(tmp_path / "feed").scan()


# Ownership and removal


def test_two_readers_both_read_and_one_owns_the_directory(tmp_path: Path) -> None:
    with training_process(tmp_path) as child:
        child.execute("publish")
        owner, other_reader = FeedReader(tmp_path), FeedReader(tmp_path)
        assert owner.ownership.acquire()

        assert not other_reader.ownership.acquire()
        assert owner.ownership.acquire()
        assert (owner.ownership.is_held, other_reader.ownership.is_held) == (True, False)
        assert only_entry(owner).is_alive
        assert only_entry(other_reader).is_alive
        assert not other_reader.remove(child.id)
        owner.ownership.release()
        assert other_reader.ownership.acquire()
        other_reader.ownership.release()


def test_a_removed_owner_lock_is_created_again(tmp_path: Path, owner: FeedReader) -> None:
    (tmp_path / "owner.lock").unlink()

    assert owner.ownership.acquire()
    assert not FeedReader(tmp_path).ownership.acquire()


def test_the_owner_removes_files_of_dead_processes_only(
    tmp_path: Path, owner: FeedReader, clock: Clock
) -> None:
    with training_process(tmp_path) as child:
        child.execute("publish")
        early_removals = [owner.remove(child.id)]
        only_entry(owner)
        early_removals.append(owner.remove(child.id))
        child.kill()
        clock.seconds += REMOVAL_DELAY_SECONDS
        (tmp_path / f"{child.id}.tmp").touch()  # killed while writing
        (tmp_path / "notes").touch()
        only_entry(owner)

        assert early_removals == [False, False]
        assert owner.remove(child.id)
        assert file_names(tmp_path) == {"notes"}
        assert owner.remove(child.id)


def test_removal_waits_for_a_job_that_has_only_lost_its_lock(
    tmp_path: Path, owner: FeedReader, clock: Clock
) -> None:
    with training_process(tmp_path) as child:
        child.execute("publish")
        only_entry(owner)
        child.execute("close_all")
        lost_entry = only_entry(owner)
        early_removal = owner.remove(child.id)
        child.execute("publish")
        entry = only_entry(owner)
        child.execute("close_all")
        only_entry(owner)
        clock.seconds += REMOVAL_DELAY_SECONDS
        late_removal = owner.remove(child.id)

        assert (lost_entry.is_alive, early_removal) == (False, False)
        assert (entry.is_alive, entry.snapshot.sequence) == (True, 2)
        assert late_removal


def test_removal_waits_until_the_last_snapshot_was_read(tmp_path: Path, owner: FeedReader) -> None:
    writer = FeedWriter(tmp_path, new_identity())
    writer.publish(new_recording(final=True))
    only_entry(owner)
    writer.publish(new_recording(final=True, count=2))
    writer.close()
    early_removal = owner.remove(writer.identity.id)
    last_entry = only_entry(owner)

    assert not early_removal
    assert last_entry.snapshot.recording.stats[0].count == 2
    assert owner.remove(writer.identity.id)


def test_short_lived_processes_lose_nothing_while_the_owner_removes_files(
    tmp_path: Path, owner: FeedReader
) -> None:
    finished_ids: set[str] = set()
    last_counts: set[int] = set()
    with training_process(tmp_path) as child:
        child.send("simulate_processes 500")
        while len(finished_ids) < 500:
            for entry in owner.scan().entries:
                if not entry.is_alive:
                    finished_ids.add(entry.snapshot.process.id)
                    last_counts.add(entry.snapshot.recording.stats[0].count)
                    assert owner.remove(entry.snapshot.process.id)

        assert child.read_line() == "simulated"
    assert last_counts == {2}
    assert file_names(tmp_path) == set()


@pytest.mark.parametrize("name", ["runs/../victim", "victim", ""])
def test_only_files_of_a_process_are_removed(tmp_path: Path, owner: FeedReader, name: str) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "victim.feed").touch()

    assert not owner.remove(name)
    assert (tmp_path / "victim.feed").exists()


def test_the_owner_removes_leftovers_without_a_feed_file(
    tmp_path: Path, owner: FeedReader, clock: Clock
) -> None:
    dead_id = f"{1:032x}"
    for leftover in (f"{dead_id}.lock", f"{dead_id}.tmp"):
        (tmp_path / leftover).touch()
    with training_process(tmp_path) as child:
        child.execute("publish")
        (tmp_path / f"{child.id}.feed").unlink()
        owner.scan()
        clock.seconds += LEFTOVER_SECONDS - 1
        owner.scan()
        early_names = file_names(tmp_path)
        clock.seconds += 1
        owner.scan()

        assert early_names == {f"{dead_id}.lock", f"{dead_id}.tmp", f"{child.id}.lock"}
        assert file_names(tmp_path) == {f"{child.id}.lock"}


def test_readers_do_not_disturb_a_writer_that_writes_continuously(tmp_path: Path, owner: FeedReader) -> None:
    readers = [FeedReader(tmp_path), owner]
    with training_process(tmp_path) as child:
        child.send("flood")
        assert child.read_line() == "1"
        sequences: list[int] = []
        while len(sequences) < 200 or sequences[-1] == sequences[0]:
            for reader in readers:
                entry = only_entry(reader)
                assert entry.is_alive
                sequences.append(entry.snapshot.sequence)
        reported_sequences = [int(line) for line in child.kill().split()]

    assert reported_sequences == list(range(2, len(reported_sequences) + 2))  # no snapshot failed
    assert sequences == sorted(sequences)
