"""Sidecar attached to `run` or to a job: exits beside a running exporter, and with the last run."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_support import child_environment, fetch_page, free_port, is_alive, is_ready, start_run
from serve_support import run_exporter, sidecar
from waiting import WAIT_LIMIT_SECONDS, wait_until

from exporter.cli.linger import LingerPeriod


@pytest.fixture
def run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a separate process that is an active run of the feed directory."""
    (tmp_path / "feed").mkdir()
    with start_run(tmp_path / "feed") as process:
        yield process


def test_an_attached_sidecar_yields_silently_to_a_running_exporter(tmp_path: Path) -> None:
    with sidecar(tmp_path) as running:
        flags = [
            f"--web.listen-address={running.address}",
            f"--feed.dir={tmp_path / 'feed'}",
            "--run.attached",
        ]
        result = run_exporter(*flags)

    assert (result.returncode, result.stdout, result.stderr) == (3, "", "")


def test_an_attached_sidecar_ends_with_the_last_run_without_a_regular_scraper(
    tmp_path: Path, run: subprocess.Popen[str]
) -> None:
    with sidecar(tmp_path, "--run.attached", "--run.linger=1h") as running:
        running.request("/metrics")
        assert running.process.poll() is None
        run.communicate()

        assert running.process.wait(WAIT_LIMIT_SECONDS) == 0


class ScrapeSchedule:
    """Simulated feed passes and scrapes of a sidecar."""

    expected_scrape_at, time, feed_passes = 10.0, 0.0, 0

    def next_expected_scrape(self) -> float | None:
        return self.expected_scrape_at

    def collect_feed(self) -> None:
        pass


@pytest.mark.parametrize(
    ("passes", "observations"),
    [
        pytest.param(
            2, [(5.0, 10.0, False), (11.0, 10.0, False), (12.5, 10.0, True)], id="the scraper does not return"
        ),
        pytest.param(0, [(1.0, 20.0, False), (2.0, 20.0, False)], id="the scrape preceded the final page"),
        pytest.param(0, [(6.0, 10.0, False), (10.5, 20.0, True)], id="the feed hangs"),
        pytest.param(0, [(29.0, 90.0, False), (30.0, 90.0, True)], id="at most the linger time"),
    ],
)
def test_the_sidecar_waits_slightly_longer_than_the_interval_for_the_final_scrape(
    passes: int, observations: list[tuple[float, float, bool]]
) -> None:
    # An observation is a time, the time of the next expected scrape, and the expected result.
    schedule = ScrapeSchedule()
    linger_period = LingerPeriod(
        schedule, is_active=lambda: False, linger_seconds=30.0, monotonic=lambda: schedule.time
    )
    linger_period.poll()
    schedule.feed_passes = passes
    outcomes = []
    for schedule.time, schedule.expected_scrape_at, _ in observations:
        outcomes.append(linger_period.poll())

    assert outcomes == [is_over for _, _, is_over in observations]


JOB = """
import sys
import exporter
from exporter import Stat
sidecar = exporter.start_sidecar(f"--web.listen-address=127.0.0.1:{sys.argv[1]}", "--log.level=warn")
print(sidecar and sidecar.pid, flush=True)
Stat("train.loss", ["mean"]).add(1.0)
sys.stdin.read()
"""


@contextlib.contextmanager
def attached_job(
    feed: Path, port: int, **variables: str
) -> Iterator[tuple[subprocess.Popen[str], int | None]]:
    """Run a job that starts a sidecar, and yield the job and the pid of the sidecar. The job's input is closed at the end."""
    env, pipe = child_environment(EXPORTER_FEED_DIR=str(feed), **variables), subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", JOB, str(port)], env=env, stdin=pipe, stdout=pipe, text=True
    ) as job:
        assert job.stdout is not None
        printed_pid = job.stdout.readline().strip()
        yield job, int(printed_pid) if printed_pid != "None" else None


@pytest.mark.parametrize("ending", ["exit", "kill"])
def test_a_sidecar_started_by_the_job_serves_and_ends_with_the_job(tmp_path: Path, ending: str) -> None:
    port = free_port()
    with attached_job(tmp_path, port) as (job, sidecar_pid):
        assert sidecar_pid is not None
        wait_until(lambda: "train_loss_count" in fetch_page(port))
        if ending == "kill":
            job.kill()

    wait_until(lambda: not is_alive(sidecar_pid))
    assert job.returncode == (0 if ending == "exit" else -signal.SIGKILL)


def test_two_processes_share_one_sidecar(tmp_path: Path) -> None:
    port = free_port()
    with contextlib.ExitStack() as second_job:
        with attached_job(tmp_path, port) as (_, sidecar_pid):
            wait_until(lambda: is_ready(port))
            _, second_sidecar_pid = second_job.enter_context(attached_job(tmp_path, free_port()))
            assert sidecar_pid is not None
            assert second_sidecar_pid is not None
            wait_until(lambda: not is_alive(second_sidecar_pid))
        assert is_alive(sidecar_pid)

    wait_until(lambda: not is_alive(sidecar_pid))


@pytest.mark.parametrize(("folder", "variables"), [(".", {"EXPORTER_DISABLED": "1"}), ("missing/parent", {})])
def test_a_disabled_or_failing_sidecar_does_not_affect_the_job(
    tmp_path: Path, folder: str, variables: dict[str, str]
) -> None:
    with attached_job(tmp_path / folder, free_port(), **variables) as (job, sidecar_pid):
        assert sidecar_pid is None

    assert job.returncode == 0
    assert list(tmp_path.iterdir()) == []
