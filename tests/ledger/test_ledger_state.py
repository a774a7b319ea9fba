"""State files of the ledger: real files, locks and SIGKILL."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from feed_support import mounted_filesystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from waiting import WAIT_LIMIT_SECONDS

from exporter.errors import StateError
from exporter.ledger.state.files import file_name
from exporter.ledger.state.store import StateStore

KEY = ("rank", "run", "0", "", "")
ANY_CHARACTER = st.characters(exclude_categories=())  # also lone surrogates
few_examples = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    return StateStore(tmp_path, sidecar="here")


def save_record(store: StateStore, content: bytes = b"seven", key: tuple[str, ...] = KEY) -> Path:
    assert store.claim(key)
    store.save(key, content)
    return store.directory / file_name(key)


@few_examples
@given(st.lists(st.text(ANY_CHARACTER, max_size=300), min_size=2, max_size=4))
def test_any_key_becomes_a_short_ascii_file_name(parts: list[str]) -> None:
    name = file_name(tuple(parts))

    assert len(name) < 120  # file systems limit a name to 255 bytes, including the suffix of a damaged file
    assert name.isascii()
    assert "/" not in name
    assert not name.startswith(".")


@few_examples
@given(data=st.data())
def test_a_damaged_byte_other_than_white_space_is_detected_and_the_file_moved_aside(
    tmp_path: Path, data: st.DataObject
) -> None:
    store = StateStore(tmp_path)
    path = save_record(store, b'{"some": "content", "of": 17}')
    valid_content = path.read_bytes()
    position = data.draw(st.integers(0, len(valid_content) - 1))
    new_byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != valid_content[position]))
    damaged_content = valid_content[:position] + bytes([new_byte]) + valid_content[position + 1 :]
    path.write_bytes(damaged_content)
    initial_count = store.damaged_files
    loaded_content = store.load(KEY, bytes)

    # Other white space between the fields of the first line is accepted.
    assert loaded_content in {None, b'{"some": "content", "of": 17}'}
    assert store.damaged_files - initial_count == (loaded_content is None)
    if loaded_content is None:
        assert not path.exists()
        assert damaged_content in [file.read_bytes() for file in path.parent.glob("*.damaged-*")]
    store.close()


def test_a_file_of_a_later_version_is_moved_aside_and_logged(
    store: StateStore, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_record(store)
    later_content = path.read_bytes().replace(b"ledger 3", b"ledger 4", 1)
    path.write_bytes(later_content)
    loaded_content = store.load(KEY, bytes)

    (preserved_file,) = path.parent.glob("*.damaged-*")
    assert loaded_content is None
    assert preserved_file.read_bytes() == later_content
    assert "format version 4" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_a_symbolic_link_is_neither_read_nor_followed_by_a_write(store: StateStore, tmp_path: Path) -> None:
    path = save_record(store)
    target = tmp_path / "precious"
    valid_content = path.read_bytes()
    target.write_bytes(valid_content)
    path.unlink()
    path.symlink_to(target)
    loaded_content = store.load(KEY, bytes)
    store.save(KEY, b"new")

    assert loaded_content is None
    assert target.read_bytes() == valid_content
    assert not path.is_symlink()
    assert store.load(KEY, bytes) == b"new"


def test_a_linked_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "ledger").symlink_to(tmp_path / "elsewhere")
    store = StateStore(tmp_path)

    with pytest.raises(StateError, match=str(tmp_path / "ledger")):
        store.claim(KEY)
    assert store.errors == 1
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_recent_keys_are_those_that_this_sidecar_saved_recently(tmp_path: Path) -> None:
    own_store, other_store = StateStore(tmp_path, sidecar="here"), StateStore(tmp_path, sidecar="there")
    old_path = save_record(own_store, key=("rank", "old", "0", "", ""))
    os.utime(old_path, (0, 0))
    save_record(own_store, key=("rank", "ours", "0", "", ""))
    save_record(other_store, key=("rank", "theirs", "0", "", ""))

    assert list(own_store.recent("rank", 60.0)) == [("rank", "ours", "0", "", "")]


def test_cleanup_removes_old_records_and_old_incomplete_files_that_are_not_claimed(store: StateStore) -> None:
    paths = {run: save_record(store, key=("rank", run, "0", "", "")) for run in ("old", "recent", "claimed")}
    incomplete_file = paths["old"].with_name(paths["old"].name + ".tmp")
    incomplete_file.write_bytes(b"hal")
    for path in (paths["old"], incomplete_file, paths["claimed"]):
        os.utime(path, (0, 0))
    store.release(("rank", "old", "0", "", ""))
    store.release(("rank", "recent", "0", "", ""))
    store.tidy()

    assert set(store.directory.glob("*.ledger*")) == {paths["recent"], paths["claimed"]}


WRITER_PROGRAM = """
import sys
from pathlib import Path
from exporter.ledger.state.store import StateStore
store, key = StateStore(Path(sys.argv[1]), sidecar="child"), ("rank", "run", "0", "", "")
if not store.claim(key):
    sys.exit("another process has claimed the key")
save_count = store.load(key, int) or 0
print(save_count, flush=True)
while True:
    save_count += 1
    store.save(key, b"%20000d" % save_count)
    print(save_count, flush=True)
"""


def start_writer(directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER_PROGRAM, str(directory)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.timeout(60)
def test_a_repeatedly_killed_sidecar_loses_no_save(tmp_path: Path) -> None:
    last_saved = 0
    for attempt in range(12):
        child = start_writer(tmp_path)
        assert child.stdout is not None
        first_saved = int(child.stdout.readline())
        time.sleep(0.003 * attempt)
        child.kill()
        output_lines = child.communicate()[0].split()

        assert first_saved >= last_saved, "a completed save was lost"
        last_saved = int(output_lines[-1]) if output_lines and output_lines[-1].isdigit() else first_saved
    store = StateStore(tmp_path)
    assert (store.load(KEY, int) or 0) >= last_saved > 12
    assert not list(store.directory.glob("*.damaged-*"))


def test_claims_survive_a_removed_lock_file(store: StateStore, tmp_path: Path) -> None:
    save_record(store)
    (store.directory / "locks").unlink()
    store.save(KEY, b"new")
    child = start_writer(tmp_path)
    try:
        assert child.wait(WAIT_LIMIT_SECONDS) == 1, "the child has claimed a key that is already claimed"
    finally:
        child.kill()
        child.communicate()


def test_cleanup_continues_after_a_file_that_cannot_be_removed_and_releases_its_lock(
    store: StateStore, tmp_path: Path
) -> None:
    path = save_record(store)
    store.release(KEY)
    path.unlink()
    path.mkdir()
    os.utime(path, (2, 2))
    older_path = save_record(store, key=("rank", "old", "0", "", ""))
    store.release(("rank", "old", "0", "", ""))
    os.utime(older_path, (1, 1))
    store.tidy()
    child = start_writer(tmp_path)
    assert child.stdout is not None
    first_line = child.stdout.readline()
    child.kill()
    child.communicate()

    assert first_line == "0\n", "the cleanup has not released the lock of the key"
    assert not older_path.exists()


def test_a_save_on_a_full_tmpfs_fails_and_keeps_the_previous_content(tmp_path: Path) -> None:
    small_filesystem = tmp_path / "small"
    small_filesystem.mkdir()
    with mounted_filesystem(small_filesystem, "-t", "tmpfs", "-o", "size=64k", "tmpfs"):
        store = StateStore(small_filesystem)
        path = save_record(store, b"x" * 20_000)

        with pytest.raises(StateError, match="No space left"):
            store.save(KEY, b"y" * 50_000)
        assert store.load(KEY, bytes) == b"x" * 20_000
        assert sorted(file.name for file in path.parent.iterdir()) == sorted([path.name, "locks"])
        store.save(KEY, b"z" * 20_000)
        store.close()
