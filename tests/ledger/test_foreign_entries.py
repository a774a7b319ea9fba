"""Feed directory that all users can write to, with entries of another user in place of the exporter's."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from energy_support import without_privileges
from ledger_support import Page, Sidecar, make_process

from exporter.feed import runs
from exporter.feed.entries import foreign_uid
from exporter.feed.reader import FeedReader
from exporter.ledger.collector import JobCollector
from exporter.ledger.state.store import StateStore

RANK_0 = {"run": "r", "rank": "0"}
ATTACKER = 12345


@pytest.fixture
def shared_directory() -> Iterator[Path]:
    """Yield a directory of root that all users can write to. The test runs as a user without privileges."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o1777)
        with without_privileges():
            yield Path(directory)


def occupy(path: Path, *, is_directory: bool) -> None:
    """Create an entry owned by a foreign user."""
    os.seteuid(0)
    if is_directory:
        path.mkdir(mode=0o755)
    else:
        path.touch(mode=0o600)
    os.chown(path, ATTACKER, ATTACKER)
    os.seteuid(65534)


@pytest.mark.parametrize("names", [["ledger"], ["ledger", "ledger-65534"]])
def test_a_foreign_ledger_directory_suppresses_no_totals(
    shared_directory: Path, names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    for name in names:
        occupy(shared_directory / name, is_directory=True)
    sidecar = Sidecar(shared_directory)
    sidecar.record_loss(make_process(), 3)
    page = sidecar.collect()
    sidecar.feed.files.clear()
    sidecar.restart()
    later_page = sidecar.collect_after(1.0)

    assert [exposition.count("loss", **RANK_0) for exposition in (page, later_page)] == [3, 3]
    assert page.get("exporter_ledger_suppressed_ranks") == 0
    assert later_page.get("exporter_feed_foreign_entry", entry="ledger") == 1
    assert f"{shared_directory}/ledger belongs to uid {ATTACKER}" in caplog.text


@pytest.mark.parametrize("names", [["owner.lock"], ["owner.lock", "owner-65534.lock"]])
def test_a_foreign_owner_lock_does_not_prevent_ownership(shared_directory: Path, names: list[str]) -> None:
    for name in names:
        occupy(shared_directory / name, is_directory=False)
    owner, other_reader = FeedReader(shared_directory), FeedReader(shared_directory)

    assert owner.ownership.acquire()
    assert not other_reader.ownership.acquire()
    assert runs.owner(shared_directory) == os.getpid()
    owner.ownership.release()
    assert runs.owner(shared_directory) is None
    assert other_reader.ownership.acquire()
    other_reader.ownership.release()


def test_totals_continue_after_the_foreign_ledger_is_removed(shared_directory: Path) -> None:
    occupy(shared_directory / "ledger", is_directory=True)
    sidecar = Sidecar(shared_directory)
    sidecar.record_loss(make_process(), 3)
    sidecar.collect()
    sidecar.feed.files.clear()
    os.seteuid(0)
    (shared_directory / "ledger").rmdir()
    os.seteuid(65534)
    sidecar.restart()

    assert sidecar.collect_after(1.0).count("loss", **RANK_0) == 3


def test_the_owner_stays_the_only_owner_after_the_foreign_lock_is_removed(shared_directory: Path) -> None:
    occupy(shared_directory / "owner.lock", is_directory=False)
    owner, other_reader = FeedReader(shared_directory), FeedReader(shared_directory)
    assert owner.ownership.acquire()
    os.seteuid(0)
    (shared_directory / "owner.lock").unlink()
    os.seteuid(65534)

    assert not other_reader.ownership.acquire()
    owner.ownership.release()


def test_a_foreign_owner_lock_is_reported(shared_directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    occupy(shared_directory / "owner.lock", is_directory=False)
    reader = FeedReader(shared_directory)
    page = Page(JobCollector(reader, StateStore(shared_directory)).collect())

    assert page.get("exporter_feed_foreign_entry", entry="owner.lock") == 1
    assert page.get("exporter_feed_owner") == 1
    assert f"{shared_directory}/owner.lock belongs to uid {ATTACKER}" in caplog.text
    reader.ownership.release()


def test_entries_of_any_user_are_trusted_where_others_cannot_write(shared_directory: Path) -> None:
    occupy(shared_directory / "ledger", is_directory=True)
    initial_uid = foreign_uid(str(shared_directory / "ledger"))
    os.seteuid(0)
    shared_directory.chmod(0o755)
    os.seteuid(65534)

    assert (initial_uid, foreign_uid(str(shared_directory / "ledger"))) == (ATTACKER, None)
