"""A sidecar that belongs to `run`: when it yields, and when it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from serve_support import environment, exporter, sidecar
from waiting import wait_until

from exporter.cli.attachment import Attachment
from exporter.feed import runs

RUN = "import sys, pathlib; from exporter.feed import runs; r = runs.register(pathlib.Path(sys.argv[1])); sys.stdin.read()"


def active_run(feed: Path) -> subprocess.Popen[bytes]:
    """Another process that is an active run until its input is closed."""
    feed.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(feed)], stdin=subprocess.PIPE, env=environment()
    )
    wait_until(lambda: runs.any_active(feed))
    return process


def end(run: subprocess.Popen[bytes]) -> None:
    assert run.stdin is not None
    run.stdin.close()
    run.wait(10)


def test_it_yields_without_a_word_where_another_serves(tmp_path: Path) -> None:
    with sidecar(tmp_path) as first:
        flags = [f"--web.listen-address={first.address}", f"--feed.dir={tmp_path / 'feed'}", "--run.attached"]
        done = exporter(*flags)

    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


def test_it_ends_with_the_last_run_when_nobody_ever_scraped(tmp_path: Path) -> None:
    run = active_run(tmp_path / "feed")
    with sidecar(tmp_path, "--run.attached", "--run.linger=1h") as running:
        alive = running.process.poll() is None
        end(run)
        status = running.process.wait(10)

    assert alive
    assert status == 0


def test_it_waits_for_one_more_scrape(tmp_path: Path) -> None:
    run = active_run(tmp_path / "feed")
    with sidecar(tmp_path, "--run.attached", "--run.linger=1h", "--log.level=debug") as running:
        running.ask("/metrics")
        end(run)
        wait_until(lambda: "waiting for the last scrape" in running.log)
        with pytest.raises(subprocess.TimeoutExpired):
            running.process.wait(2)
        running.ask("/metrics")
        status = running.process.wait(10)

    assert status == 0


def test_it_waits_no_longer_than_told(tmp_path: Path) -> None:
    run = active_run(tmp_path / "feed")
    with sidecar(tmp_path, "--run.attached", "--run.linger=200ms") as running:
        running.ask("/metrics")
        end(run)
        status = running.process.wait(10)

    assert status == 0


def test_a_later_run_is_joined_while_it_waits(tmp_path: Path) -> None:
    run = active_run(tmp_path / "feed")
    with sidecar(tmp_path, "--run.attached", "--run.linger=1h", "--log.level=debug") as running:
        running.ask("/metrics")
        end(run)
        wait_until(lambda: "waiting for the last scrape" in running.log)
        later = active_run(tmp_path / "feed")
        wait_until(lambda: "another run has joined" in running.log)
        running.ask("/metrics")
        with pytest.raises(subprocess.TimeoutExpired):
            running.process.wait(1)
        end(later)


class Stages:
    """The feed and the scrapes of a sidecar, as a test moves them on."""

    scrapes = 0
    renders = 0
    feed_passes = 0
    asked = 0
    time = 0.0
    active = True

    def collect_feed(self) -> None:
        self.asked += 1

    def read(self) -> None:
        self.feed_passes += 1

    def scrape(self) -> None:
        self.renders += 1
        self.scrapes += 1


@pytest.fixture
def stages() -> Stages:
    return Stages()


@pytest.fixture
def attachment(stages: Stages) -> Attachment:
    return Attachment(
        stages, active=lambda: stages.active, linger_seconds=30.0, monotonic=lambda: stages.time
    )


def test_only_a_scrape_of_the_final_values_counts(stages: Stages, attachment: Attachment) -> None:
    stages.scrape()
    ends = [attachment.is_over()]
    stages.active = False
    for step in (stages.scrape, stages.read, stages.scrape, stages.read):
        step()
        ends.append(attachment.is_over())
    stages.scrape()

    assert ends == [False] * 5
    assert attachment.is_over()


def test_a_scrape_that_began_before_the_final_values_does_not_count(
    stages: Stages, attachment: Attachment
) -> None:
    stages.scrape()
    stages.active = False
    attachment.is_over()
    stages.renders += 1  # a scrape that has not been sent yet
    stages.feed_passes += 2
    attachment.is_over()
    stages.scrapes += 1  # now it has

    assert not attachment.is_over()


def test_a_feed_that_hangs_does_not_hold_it_for_ever(stages: Stages, attachment: Attachment) -> None:
    stages.scrape()
    stages.active = False
    attachment.is_over()
    stages.time = 10.0
    attachment.is_over()
    stages.scrape()

    assert attachment.is_over()


def test_a_run_that_joined_is_lingered_for_anew(stages: Stages, attachment: Attachment) -> None:
    stages.scrape()
    for moment, active in ((0.0, False), (20.0, True), (40.0, False)):
        stages.time, stages.active = moment, active
        assert not attachment.is_over()
    stages.time = 69.0
    early = attachment.is_over()
    stages.time = 70.0

    assert not early
    assert attachment.is_over()
