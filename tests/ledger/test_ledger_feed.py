"""Ledger with real feed files and directories: killed processes, several sidecars, and unusable files and directories.

Training processes and sidecars are real and are killed with SIGKILL.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from feed_support import TrainingProcess, new_identity, new_recording, read_only_view, training_process
from ledger_support import Page
from places import PROJECT, TESTS
from programs import code_of
from programs.sidecar import print_counts_until_killed
from run_support import child_environment
from users_support import without_privileges
from waiting import wait_until

from exporter.errors import CollectError
from exporter.feed import reader as feed_reader
from exporter.feed.reader import FeedReader
from exporter.feed.writer import FeedWriter
from exporter.ledger.collector import JobCollector
from exporter.ledger.state.store import StateStore

RANK_0_LABELS = {"run": "r", "rank": "0"}


def new_collector(feed: Path, state: Path | None = None) -> JobCollector:
    return JobCollector(FeedReader(feed), StateStore(state or feed))


def collect_page(sidecar: JobCollector) -> Page:
    return Page(sidecar.collect())


def flood(child: TrainingProcess, seconds: float) -> int:
    """Let a process write as fast as possible, kill the process, and return the reported number of samples."""
    child.send("flood")
    first_lines = [child.read_line() for _ in range(2)]
    time.sleep(seconds)
    complete_lines = [*first_lines, *child.kill().split("\n")[:-1]]
    return int(complete_lines[-1])


def test_totals_of_a_killed_process_are_saved_and_its_files_removed(tmp_path: Path) -> None:
    sidecar = new_collector(tmp_path)
    with training_process(tmp_path) as child:
        child.execute("publish")
        assert collect_page(sidecar).get("training_feed_alive", **RANK_0_LABELS) == 1
    page = collect_page(sidecar)

    assert page.get("training_feed_alive", **RANK_0_LABELS) == 0
    assert page.count("train_stat0", **RANK_0_LABELS) == 1
    wait_until(
        lambda: (
            collect_page(sidecar) and {path.name for path in tmp_path.iterdir()} == {"ledger", "owner.lock"}
        )
    )
    assert collect_page(sidecar).count("train_stat0", **RANK_0_LABELS) == 1


@contextmanager
def sidecar_process(feed: Path, state: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run a sidecar in a child process, which is killed at the end. Without a state directory, the state is in the feed directory."""
    program = code_of(print_counts_until_killed, str(feed), str(state or feed))
    env = child_environment(PYTHONPATH=f"{PROJECT}:{TESTS}")
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert read_line(process) == "ready\n"
            yield process
        finally:
            process.kill()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.timeout(60)
def test_killing_ranks_and_sidecar_loses_no_written_sample(
    tmp_path: Path,
) -> None:
    published_counts: list[int] = []
    written_count, process_count = 0, 8
    for process_index in range(process_count):
        with sidecar_process(tmp_path) as sidecar:
            with training_process(tmp_path) as child:
                written_count += flood(child, 0.15)
            time.sleep(0.01 * process_index)
            sidecar.kill()
            published_counts += [
                int(line) for line in sidecar.communicate()[0].splitlines() if line.isdigit()
            ]

    page = collect_page(new_collector(tmp_path))
    final_count = page.count("train_stat0", **RANK_0_LABELS)

    assert published_counts == sorted(published_counts)
    assert len(set(published_counts)) > 8
    # Each process can have written one more sample before its report.
    assert final_count is not None
    assert final_count == page.count("train_stat49", **RANK_0_LABELS)
    assert max(written_count, published_counts[-1]) <= final_count <= written_count + process_count
    assert not list((tmp_path / "ledger").glob("*.damaged-*"))


def test_a_second_sidecar_only_reads_until_the_first_is_killed(tmp_path: Path) -> None:
    with training_process(tmp_path) as child:
        child.execute("publish")
        with sidecar_process(tmp_path) as owner:
            assert read_line(owner) == "1\n"
            second_sidecar = new_collector(tmp_path)
            reading_page = collect_page(second_sidecar)
        owning_page = collect_page(second_sidecar)

    assert [page.get("exporter_feed_owner") for page in (reading_page, owning_page)] == [0, 1]
    assert [page.count("train_stat0", **RANK_0_LABELS) for page in (reading_page, owning_page)] == [1, 1]


def test_a_rank_that_moves_to_another_node_continues_there_once_released(tmp_path: Path) -> None:
    feed, other_feed, shared_state = (tmp_path / name for name in ("here", "there", "shared"))
    for directory in (feed, other_feed, shared_state):
        directory.mkdir()
    sidecar = new_collector(feed, shared_state)
    with (
        sidecar_process(other_feed, shared_state) as other_sidecar,
        training_process(other_feed) as earlier_process,
        training_process(feed) as later_process,
    ):
        earlier_process.execute("publish")
        assert read_line(other_sidecar) == "1\n"
        later_process.execute("publish")
        collected = sidecar.collect()
        ((_, message),) = collected.problems
        assert "a different sidecar holds the totals of run 'r', rank 0" in message
        page = Page(collected)
        assert page.count("train_stat0", **RANK_0_LABELS) is None
        assert page.get("training_feed_alive", **RANK_0_LABELS) == 1
        earlier_process.execute("finish")
        earlier_process.kill()
        wait_until(lambda: collect_page(sidecar).count("train_stat0", **RANK_0_LABELS) is not None)
        page = collect_page(sidecar)

    assert page.count("train_stat0", **RANK_0_LABELS) == 2
    assert page.get("exporter_ledger_suppressed_ranks") == 0


def test_a_read_only_feed_directory_is_read_without_writes(tmp_path: Path) -> None:
    feed = tmp_path / "feed"
    feed.mkdir()
    with training_process(feed) as child, read_only_view(feed, tmp_path / "view") as view:
        child.execute("publish")
        collected = new_collector(view).collect()
        page = Page(collected)
        assert collected.problems == []
        assert page.count("train_stat0", **RANK_0_LABELS) == 1
        assert page.get("exporter_feed_owner") == 0


def test_a_foreign_owner_lock_created_first_is_reported() -> None:
    with tempfile.TemporaryDirectory() as shared:  # other users can enter every parent directory
        feed = Path(shared)
        feed.chmod(0o1777)
        (feed / "owner.lock").touch(mode=0o600)
        with without_privileges():
            collected = new_collector(feed).collect()

    assert Page(collected).get("exporter_feed_owner") == 0
    (message,) = [message for message in collected.unsupported if "cannot own the feed directory" in message]
    assert f"{feed}/owner.lock: Permission denied" in message


def test_a_missing_feed_directory_is_a_failure_of_a_loaded_collector(tmp_path: Path) -> None:
    sidecar = new_collector(tmp_path / "gone")

    with pytest.raises(CollectError) as error_info:
        sidecar.collect()
    assert error_info.value.reason == "directory"
    assert sidecar.is_loaded


def test_damaged_and_hostile_files_affect_only_themselves_with_one_line_per_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sidecar = new_collector(tmp_path)
    for process_number in range(50):
        (tmp_path / f"{process_number:032x}.feed").write_bytes(os.urandom(4000))
    (tmp_path / f"{'b' * 32}.feed").symlink_to("/etc/passwd")
    (tmp_path / "x.feed").write_bytes(b"")
    with training_process(tmp_path) as child:
        child.execute("publish")
        collect_page(sidecar)
        (tmp_path / f"{50:032x}.feed").write_bytes(b"nonsense")
        page = collect_page(sidecar)

    assert page.count("train_stat0", **RANK_0_LABELS) == 1
    reasons = ("magic", "symlink", "name")
    assert [page.get("exporter_feed_refused_total", reason=reason) for reason in reasons] == [51, 1, 1]
    messages = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(messages) == len(reasons)
    assert sum("and 49 more" in message for message in messages) == 1


def test_a_process_whose_file_is_not_read_yet_has_not_ended_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers = [FeedWriter(tmp_path, new_identity(rank=rank)) for rank in range(3)]
    for writer in writers:
        writer.publish(new_recording(count=5))
    reader = FeedReader(tmp_path)
    JobCollector(reader, StateStore(tmp_path)).collect()
    reader.ownership.release()
    # Each pass of the second sidecar is limited to a single file.
    monkeypatch.setattr(feed_reader, "FIRST_PASS_BYTES", 1)
    monkeypatch.setattr(feed_reader, "PASS_BYTES", 1)
    second_sidecar = JobCollector(FeedReader(tmp_path), StateStore(tmp_path))
    pages = [collect_page(second_sidecar) for _ in range(4)]

    for page in pages:
        totals = page.all("train_stat0_count")
        assert set(totals.values()) == {5}
    assert len(pages[-1].all("train_stat0_count")) == 3
    assert len(pages[-1].all("training_feed_alive")) == 3
    assert set(pages[-1].all("training_feed_alive").values()) == {1}
    assert 0 not in pages[0].all("training_feed_alive").values()
    for writer in writers:
        writer.close()
