"""Launches of `run`: active runs, and the page of their jobs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_support import (
    fetch_page,
    free_port,
    run_command,
    running_process,
    sample_value,
    sidecars,
    start_program,
    start_run,
)
from waiting import wait_until

from exporter.feed import runs

LOCK_HOLDER = """
import sys
from exporter.feed.files import RecordLock
lock = RecordLock.take(sys.argv[1], create_mode=0o600)
print("held", flush=True)
sys.stdin.read()
"""


def kill_process(process: subprocess.Popen[str]) -> None:
    """Send SIGKILL and close all descriptors."""
    process.kill()
    process.communicate()


def start_writer(feed: Path) -> subprocess.Popen[str]:
    """Start a process that holds the lock of a feed file."""
    return start_program(LOCK_HOLDER, feed / f"{'a' * 32}.lock")


def test_a_run_is_active_until_its_end_and_leaves_no_file(tmp_path: Path) -> None:
    assert not runs.needs_sidecar(tmp_path)
    first_run, second_run = start_run(tmp_path), start_run(tmp_path)
    first_run.communicate()

    assert runs.needs_sidecar(tmp_path)
    second_run.communicate()
    assert not runs.needs_sidecar(tmp_path)
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_killed_run_is_active_until_its_job_stops_recording_and_later_writers_do_not_count(
    tmp_path: Path,
) -> None:
    kill_process(start_run(tmp_path))
    job = start_writer(tmp_path)

    assert runs.needs_sidecar(tmp_path)
    kill_process(job)
    assert not runs.needs_sidecar(tmp_path)
    later_job = start_writer(tmp_path)
    assert not runs.needs_sidecar(tmp_path)
    kill_process(later_job)


def test_writers_without_a_run_and_an_owning_sidecar_do_not_keep_a_sidecar_alive(tmp_path: Path) -> None:
    job, sidecar = start_writer(tmp_path), start_program(LOCK_HOLDER, tmp_path / "owner.lock")

    assert (runs.recording_pids(tmp_path), runs.owner(tmp_path)) == ({job.pid}, sidecar.pid)
    assert not runs.needs_sidecar(tmp_path)
    assert runs.attached_owner(tmp_path) is None  # its command line does not attach it to a run
    kill_process(job)
    kill_process(sidecar)
    assert (runs.recording_pids(tmp_path), runs.owner(tmp_path)) == (set(), None)


RECORDING_JOB = """
import time
from exporter import Stat
for _ in range(600):
    Stat("train.loss", ["mean"]).add(1.0)
    time.sleep(0.1)
"""

HANGING_JOB = """
import time
from exporter import training
with training.training_loop(train_iterations_start=0):
    for _ in range(8):
        with training.training_iteration():
            time.sleep(0.1)
            training.record(loss=7.5)
    time.sleep(600)
"""

SLOWLY_FAILING_JOB = """
import atexit, sys, time
atexit.register(time.sleep, 2.0)
from exporter import training
with training.application(), training.training_loop(train_iterations_start=0):
    for step in range(10):
        with training.training_iteration():
            time.sleep(0.05)
        if step == 4:
            with training.checkpoint_save(step + 1):
                pass
sys.exit(3)
"""
"""Job that fails two seconds after the last step, in an exit handler that runs last, like the teardown of a device."""

PROMETHEUS_CLIENT_JOB = """
import time
from prometheus_client import Counter
things = Counter("myjob_things", "Things.")
while True:
    things.inc()
    time.sleep(0.1)
"""


@pytest.fixture
def feed(tmp_path: Path) -> Path:
    """Return an empty feed directory."""
    directory = tmp_path / "feed"
    directory.mkdir()
    return directory


def command_of(feed: Path, program: str, port: int, *flags: str) -> list[str]:
    return run_command(feed, [sys.executable, "-c", program], "--run.name=r", *flags, port=port)


def test_emptying_the_feed_directory_of_a_run_loses_neither_sidecar_nor_totals(
    feed: Path,
) -> None:
    port = free_port()
    with running_process(command_of(feed, RECORDING_JOB, port), feed):
        wait_until(lambda: "train_loss_count{" in fetch_page(port))
        initial_sidecars = sidecars(feed)
        for path in feed.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        wait_until(lambda: runs.jobs(feed) and runs.owner(feed) == initial_sidecars[0])

        assert [job.run for job in runs.jobs(feed)] == ["r"]
        assert sidecars(feed) == initial_sidecars
        wait_until(lambda: sample_value(port, 'training_feed_alive{rank="0",run="r"}') == 1)


def test_a_job_without_further_steps_is_hung_and_its_gauges_are_absent(feed: Path, tmp_path: Path) -> None:
    port, config = free_port(), tmp_path / "exporter.yaml"
    config.write_text("goodput: {hang_after: 4s}\nfeed: {interval: 500ms}\n")
    hung = 'training_run_state{run="r",state="hung"}'
    with running_process(command_of(feed, HANGING_JOB, port, f"--config.file={config}"), feed):
        wait_until(lambda: sample_value(port, "training_loss{") == 7.5)
        wait_until(lambda: sample_value(port, hung) == 1)
        time.sleep(2.5)  # the process continues to write snapshots

        assert (sample_value(port, hung), sample_value(port, "training_loss{")) == (1, None)


def wait_for_failure(port: int, *prefixes: str) -> list[float]:
    """Wait until a page shows that run r has failed, and return the values of the series with these prefixes on this page.

    The sidecar ends soon after the first scrape of the final values, so that a second scrape may fail.
    """

    def final_page() -> str:
        page = fetch_page(port)
        has_failed = 'training_run_state{run="r",state="failed"} 1' in page
        return page if has_failed and all(f"\n{prefix}" in page for prefix in prefixes) else ""

    lines = wait_until(final_page).splitlines()
    return [
        float(next(line for line in lines if line.startswith(prefix)).rpartition(" ")[2])
        for prefix in prefixes
    ]


def test_a_job_that_reports_success_and_exits_with_an_error_has_failed(feed: Path) -> None:
    port = free_port()
    with running_process(command_of(feed, SLOWLY_FAILING_JOB, port, "--run.linger=60s"), feed):
        interruptions, uncommitted_seconds = wait_for_failure(
            port, "training_interruptions_total{", "training_uncommitted_seconds{"
        )

    assert interruptions == 1
    assert uncommitted_seconds > 0.2


def test_the_position_and_times_of_an_exited_run_are_still_shown(feed: Path) -> None:
    port, started_at = free_port(), time.time()
    with running_process(command_of(feed, SLOWLY_FAILING_JOB, port, "--run.linger=60s"), feed):
        step, saved_step, saved_at, progress_at = wait_for_failure(
            port,
            "training_step{",
            "training_checkpoint_last_step{",
            "training_checkpoint_last_success_timestamp_seconds{",
            "training_last_progress_timestamp_seconds{",
        )

    assert (step, saved_step) == (10, 5)
    assert started_at < saved_at < progress_at < time.time()


def test_metrics_of_a_job_with_only_prometheus_client_are_on_the_page(feed: Path) -> None:
    port = free_port()
    with running_process(command_of(feed, PROMETHEUS_CLIENT_JOB, port), feed):
        wait_until(lambda: (sample_value(port, "myjob_things_total{") or 0.0) > 0)
