"""Fair shares of the reader's limits: no large file delays small files, and no user exhausts the memory of other users."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest
from feed_support import (
    TOTAL,
    definition_json,
    feed_file_bytes,
    file_with_many_stats,
    file_with_unknown_keys,
    needs_root,
    new_identity,
    new_recording,
    with_process_number,
)
from hypothesis import given
from hypothesis import strategies as st

from exporter.feed.encoder import MAX_BYTES, encode
from exporter.feed.reader import FIRST_PASS_BYTES, FeedReader
from exporter.feed.shares import (
    ChangedFile,
    FileMemory,
    select_files_of_pass,
    select_files_of_users,
    select_files_to_displace,
)
from exporter.feed.snapshot import Snapshot
from exporter.feed.writer import FeedWriter

SIZES = st.lists(st.integers(0, MAX_BYTES), max_size=30)
PASS_BYTES = 8 << 20


@given(SIZES)
def test_every_file_is_read_within_a_bounded_number_of_passes(sizes: list[int]) -> None:
    unread_files = {f"f{index}": ChangedFile(f"f{index}", size, False, 0) for index, size in enumerate(sizes)}
    passes = 0
    while unread_files:
        selected_names = select_files_of_pass(unread_files.values(), PASS_BYTES)
        assert sum(unread_files[name].size for name in selected_names) <= PASS_BYTES
        assert len(set(selected_names)) == len(selected_names) > 0
        for name in selected_names:
            del unread_files[name]
        passes += 1

    assert passes <= 1 + len(sizes)


def test_a_large_file_is_read_even_if_small_files_change_in_each_pass() -> None:
    small_files = [ChangedFile(f"s{index}", 100_000, True, 0) for index in range(200)]

    assert "large" in select_files_of_pass(
        [*small_files, ChangedFile("large", MAX_BYTES, False, 3)], PASS_BYTES
    )


def test_users_with_few_files_are_not_displaced_by_a_user_with_many_files() -> None:
    user_by_file = {f"a{index}": 1 for index in range(5000)} | {"mine": 2}

    assert "mine" in select_files_of_users(user_by_file, 4096)
    assert len(select_files_of_users(user_by_file, 4096)) == 4096


def test_a_new_file_displaces_the_largest_file_of_its_user_and_not_a_smaller_one() -> None:
    other_files = [FileMemory("large", 1, 900), FileMemory("small", 1, 50)]

    assert select_files_to_displace(FileMemory("new", 1, 100), other_files, excess_bytes=80) == ["large"]
    assert select_files_to_displace(FileMemory("new", 1, 1000), other_files, excess_bytes=80) == []


def test_a_new_file_displaces_small_files_of_a_user_who_has_many() -> None:
    other_files = [FileMemory(f"{index}", 1, 20) for index in range(100)]

    assert len(select_files_to_displace(FileMemory("new", 2, 100), other_files, excess_bytes=100)) == 5


@pytest.mark.parametrize("uid_of_new_file", [1, 2], ids=["same user", "another user"])
def test_files_of_equal_memory_do_not_displace_each_other(uid_of_new_file: int) -> None:
    other_files = [FileMemory("old", 1, 100)]

    assert (
        select_files_to_displace(FileMemory("new", uid_of_new_file, 100), other_files, excess_bytes=80) == []
    )


def test_an_honest_file_is_read_in_the_first_pass_beside_large_files(tmp_path: Path) -> None:
    large_file = file_with_unknown_keys()
    for process_number in range(20):
        (tmp_path / f"{process_number:032x}.feed").write_bytes(
            with_process_number(large_file, process_number)
        )
    writer = FeedWriter(tmp_path, new_identity())
    writer.publish(new_recording())
    reader = FeedReader(tmp_path)
    first_scan = reader.scan()
    passes = 1
    while reader.scan().unread_files:
        passes += 1

    assert writer.identity.id in {entry.snapshot.process.id for entry in first_scan.entries}
    assert 20 - FIRST_PASS_BYTES // MAX_BYTES <= len(first_scan.unread_files) < 20
    assert passes <= 20
    writer.close()


def test_a_process_that_writes_is_not_stale_while_its_file_waits(tmp_path: Path) -> None:
    now_seconds = time.monotonic()
    reader = FeedReader(tmp_path, monotonic=lambda: now_seconds)
    identity = new_identity(id=f"{99:032x}")
    path = tmp_path / f"{identity.id}.feed"
    large_recording = new_recording(stats=4000, help_characters=400)
    path.write_bytes(encode(Snapshot(identity, 1, 1.0, 1.0, large_recording)))
    reader.scan()
    small_file = feed_file_bytes([definition_json()], [TOTAL])
    for sequence in range(2, 8):
        now_seconds += 5.0
        path.write_bytes(encode(Snapshot(identity, sequence, 1.0, 1.0, large_recording)))
        for process_number in range(40):
            (tmp_path / f"{process_number:032x}.feed").write_bytes(
                with_process_number(small_file, process_number)
            )
        (entry,) = [entry for entry in reader.scan().entries if entry.snapshot.process.id == identity.id]

        assert entry.age_seconds < 5.0


@pytest.mark.slow
def test_an_honest_file_is_read_beside_many_files_that_exhaust_the_memory(tmp_path: Path) -> None:
    many_stats = file_with_many_stats()
    for process_number in range(40):
        (tmp_path / f"{process_number:032x}.feed").write_bytes(
            with_process_number(many_stats, process_number)
        )
    reader = FeedReader(tmp_path)
    while reader.scan().unread_files:
        pass
    writer = FeedWriter(tmp_path, new_identity())
    writer.publish(new_recording(stats=50))
    entries = {entry.snapshot.process.id: entry for entry in reader.scan().entries}

    assert len(entries[writer.identity.id].snapshot.recording.stats) == 50
    writer.close()


@needs_root
def test_an_honest_file_is_read_beside_more_files_of_another_user_than_the_limit() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        directory.chmod(0o1777)
        small_file = feed_file_bytes([definition_json()], [TOTAL])
        for process_number in range(200):
            path = directory / f"{process_number:032x}.feed"
            path.write_bytes(with_process_number(small_file, process_number))
            os.chown(path, 12345, 12345)
        reader = FeedReader(directory, max_files=100)
        reader.scan()
        writer = FeedWriter(directory, new_identity())
        writer.publish(new_recording())
        scan = reader.scan()

        assert writer.identity.id in {entry.snapshot.process.id for entry in scan.entries}
        assert len(scan.entries) == 100
        writer.close()
