"""Feed directory in which all users can create entries, with entries of another user under the exporter's names."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ledger_support import Page, SimulatedSidecar, make_process
from users_support import NOBODY, without_privileges

from exporter.feed import runs
from exporter.feed.entries import foreign_uid
from exporter.feed.reader import FeedReader
from exporter.ledger.collector import JobCollector
from exporter.ledger.state.store import StateStore

RANK_0_LABELS = {"run": "r", "rank": "0"}
ATTACKER_UID = 12345


@pytest.fixture
def shared_directory() -> Iterator[Path]:
    """Yield a directory owned by root that all users can write to. The test runs as `nobody`."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o1777)
        with without_privileges():
            yield Path(directory)


@contextmanager
def as_root() -> Iterator[None]:
    """Run a block as root in a test that runs as `nobody`."""
    os.seteuid(0)
    try:
        yield
    finally:
        os.seteuid(NOBODY)


def occupy(path: Path, *, is_directory: bool) -> None:
    """Create an entry owned by the attacker."""
    with as_root():
        if is_directory:
            path.mkdir(mode=0o755)
        else:
            path.touch(mode=0o600)
        os.chown(path, ATTACKER_UID, ATTACKER_UID)


# `ledger-65534` is the alternative name for `nobody`.
@pytest.mark.parametrize("occupied_names", [["ledger"], ["ledger", "ledger-65534"]])
def test_totals_survive_a_restart_despite_a_foreign_ledger_directory(
    shared_directory: Path, occupied_names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    for name in occupied_names:
        occupy(shared_directory / name, is_directory=True)
    sidecar = SimulatedSidecar(shared_directory)
    sidecar.record_loss(make_process(), 3)
    page = sidecar.collect()
    sidecar.feed.files.clear()  # only the ledger's state still has the samples
    sidecar.restart()
    later_page = sidecar.collect_after(1.0)

    assert [exposition.count("loss", **RANK_0_LABELS) for exposition in (page, later_page)] == [3, 3]
    assert page.get("exporter_ledger_suppressed_ranks") == 0
    assert later_page.get("exporter_feed_foreign_entry", entry="ledger") == 1
    assert f"{shared_directory}/ledger belongs to uid {ATTACKER_UID}" in caplog.text


@pytest.mark.parametrize("occupied_names", [["owner.lock"], ["owner.lock", "owner-65534.lock"]])
def test_a_foreign_owner_lock_does_not_prevent_ownership(
    shared_directory: Path, occupied_names: list[str]
) -> None:
    for name in occupied_names:
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
    sidecar = SimulatedSidecar(shared_directory)
    sidecar.record_loss(make_process(), 3)
    sidecar.collect()
    sidecar.feed.files.clear()  # only the ledger's state still has the samples
    with as_root():
        (shared_directory / "ledger").rmdir()
    sidecar.restart()

    assert sidecar.collect_after(1.0).count("loss", **RANK_0_LABELS) == 3


def test_the_owner_stays_the_only_owner_after_the_foreign_lock_is_removed(shared_directory: Path) -> None:
    occupy(shared_directory / "owner.lock", is_directory=False)
    owner, other_reader = FeedReader(shared_directory), FeedReader(shared_directory)
    assert owner.ownership.acquire()
    with as_root():
        (shared_directory / "owner.lock").unlink()

    assert not other_reader.ownership.acquire()
    owner.ownership.release()


def test_a_foreign_owner_lock_is_reported(shared_directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    occupy(shared_directory / "owner.lock", is_directory=False)
    reader = FeedReader(shared_directory)
    page = Page(JobCollector(reader, StateStore(shared_directory)).collect())

    assert page.get("exporter_feed_foreign_entry", entry="owner.lock") == 1
    assert page.get("exporter_feed_owner") == 1
    assert f"{shared_directory}/owner.lock belongs to uid {ATTACKER_UID}" in caplog.text
    reader.ownership.release()


def test_entries_of_all_users_are_trusted_in_a_directory_that_only_its_owner_can_write_to(
    shared_directory: Path,
) -> None:
    occupy(shared_directory / "ledger", is_directory=True)
    uid_while_shared = foreign_uid(str(shared_directory / "ledger"))
    with as_root():
        shared_directory.chmod(0o755)

    assert uid_while_shared == ATTACKER_UID
    assert foreign_uid(str(shared_directory / "ledger")) is None
