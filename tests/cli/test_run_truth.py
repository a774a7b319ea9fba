"""Jobs under `run` whose end, silence or words are easily told wrong."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from run_support import free_port, page, run_command, started
from waiting import wait_until

HANGS = """
import time
from exporter import training
with training.training_loop(train_iterations_start=0):
    for _ in range(8):
        with training.training_iteration():
            time.sleep(0.1)
            training.record(loss=7.5)
    time.sleep(600)
"""

# What was registered first ends last: as a device that torch tears down, after the feed was let go.
FAILS_SLOWLY = """
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

COUNTS = """
import time
from prometheus_client import Counter
things = Counter("myjob_things", "Things.")
while True:
    things.inc()
    time.sleep(0.1)
"""


@pytest.fixture
def feed(tmp_path: Path) -> Path:
    """A feed directory."""
    directory = tmp_path / "feed"
    directory.mkdir()
    return directory


def job(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def sample(port: int, begins: str) -> float | None:
    """The value of the first series that begins so."""
    found = [line for line in page(port).splitlines() if line.startswith(begins)]
    return float(found[0].rpartition(" ")[2]) if found else None


def test_a_job_that_makes_no_more_steps_hangs_and_its_last_values_go(feed: Path, tmp_path: Path) -> None:
    port, config = free_port(), tmp_path / "exporter.yaml"
    config.write_text("goodput: {hang_after: 4s}\n")
    with started(run_command(feed, job(HANGS), f"--config.file={config}", "--run.name=r", port=port), feed):
        wait_until(lambda: sample(port, "training_loss{") == 7.5)
        wait_until(lambda: sample(port, 'training_run_state{run="r",state="hung"}') == 1)
        time.sleep(2.5)  # the process goes on to write snapshots

        assert sample(port, 'training_run_state{run="r",state="hung"}') == 1
        assert sample(port, "training_loss{") is None


def test_a_job_that_says_it_has_finished_and_fails_has_not(feed: Path) -> None:
    port = free_port()
    command = run_command(feed, job(FAILS_SLOWLY), "--run.name=r", "--run.linger=60s", port=port)
    with started(command, feed):
        wait_until(lambda: sample(port, 'training_run_state{run="r",state="failed"}') == 1)
        wait_until(lambda: sample(port, "training_interruptions_total{") == 1)

        assert sample(port, "training_uncommitted_seconds{") is not None
        assert (sample(port, "training_uncommitted_seconds{") or 0.0) > 0.2


def test_metrics_of_a_job_that_knows_prometheus_client_alone_are_on_the_page(feed: Path) -> None:
    pytest.importorskip("prometheus_client")
    port = free_port()
    with started(run_command(feed, job(COUNTS), "--run.name=r", port=port), feed):
        wait_until(lambda: (sample(port, "myjob_things_total{") or 0.0) > 0)
