"""Values on /metrics of ordinary jobs under `run`, compared with the diary that each job keeps."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from bridges_support import QUIET, installed_distribution, needs
from elastic_support import sum_by_labels
from places import TESTS
from run_support import (
    REPOSITORY,
    child_environment,
    free_port,
    is_ready,
    run_command,
    running_process,
    scrape,
)
from waiting import wait_until

pytestmark = [needs("torch"), pytest.mark.timeout(240)]

JOB_DIRECTORY = TESTS / "bridges" / "truth"
# Runs a job twice, like a shell loop under one `run`: the first attempt crashes, the second resumes.
TWO_ATTEMPTS = """
import subprocess, sys
from pathlib import Path
directory = Path(sys.argv[2])
codes = [subprocess.run([sys.executable, *sys.argv[1:]]).returncode for _ in range(2)]
(directory / "ended").write_text(repr(codes))
"""
STEPS = 10
"""Steps of every job, as in `truth/diary.py`."""
SLOWER_RATIO = 1.5
"""Upper tolerance of a duration, for the time in hooks and for scheduling between the two clock readings."""

SHORTER_RATIO = 0.7
"""Lower tolerance of a validation. Loaders of Accelerate fetch a batch ahead, so the last batch lies outside the block."""


@dataclass
class Truth:
    """Diary of a job, and the scraped pages.

    Attributes:
        diary: Lines that the job has written.
        live: Page while the second attempt waits at its end.
        final: Last page that the exporter serves after the end of the job.
        codes: Exit statuses of the two attempts.
        errors: Standard error of the job.
    """

    diary: list[dict[str, Any]]
    live: str
    final: str
    codes: list[int]
    errors: str

    def lines(self, event: str) -> list[dict[str, Any]]:
        """Return the lines of an event."""
        return [line for line in self.diary if line["event"] == event]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """All completed steps, including steps before the first report."""
        return [line for line in self.diary if line["event"] in {"step", "warm-up"}]

    @property
    def attempts(self) -> list[list[dict[str, Any]]]:
        """The lines of each attempt."""
        attempts: list[list[dict[str, Any]]] = []
        for line in self.diary:
            if line["event"] == "attempt":
                attempts.append([])
            attempts[-1].append(line)
        return attempts

    @property
    def lost(self) -> list[dict[str, Any]]:
        """Steps of the first attempt after its last checkpoint."""
        first = self.attempts[0]
        saved_step = max(line["step"] for line in first if line["event"] == "save")
        return [line for line in first if line["event"] == "step" and line["step"] > saved_step]


def truth_of(name: str, directory: Path) -> Truth:
    """Run a job twice under `run`, and return its diary and pages."""
    feed = directory / "feed"
    feed.mkdir(mode=0o700)
    site = installed_distribution(directory / "site")
    port = free_port()
    job = [sys.executable, "-c", TWO_ATTEMPTS, str(JOB_DIRECTORY / f"job_{name}.py"), str(directory)]
    command = run_command(feed, job, "--run.name=truth", "--run.linger=30s", port=port)
    errors = directory / "errors"
    paths = f"{site}:{REPOSITORY}"
    settings = {"env": child_environment(**QUIET, PYTHONPATH=paths, OMP_NUM_THREADS="1"), "cwd": directory}
    with errors.open("w") as stderr, running_process(command, feed, stderr=stderr, **settings) as process:
        wait_until(lambda: '"done"' in text_of(directory / "diary") or process.poll() is not None, 150)
        assert '"done"' in text_of(directory / "diary"), errors.read_text()
        wait_until(partial(is_ready, port), 30)
        wait_until(lambda: sum_by_labels(scrape(port), "training_step") == STEPS, 30)
        live = scrape(port)
        (directory / "continue").touch()
        final = last_page(port)
        process.wait(30)
    diary = [json.loads(line) for line in text_of(directory / "diary").splitlines()]
    return Truth(diary, live, final, json.loads((directory / "ended").read_text()), errors.read_text())


def last_page(port: int) -> str:
    """Scrape like a Prometheus with a short interval until the exporter ends, and return its last page."""
    page = ""
    with contextlib.suppress(OSError):
        while True:
            page = scrape(port)
            time.sleep(0.5)
    return page


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def check_counts(truth: Truth) -> None:
    """Check steps, samples, batches and saves, before and after the end of the job."""
    assert truth.codes == [1, 0]
    for page in (truth.live, truth.final):
        assert sum_by_labels(page, "training_steps_total", mode="train") == len(truth.steps)
        assert sum_by_labels(page, "training_steps_total", mode="validation") == len(
            truth.lines("validation")
        )
        assert sum_by_labels(page, "training_samples_total", mode="train") == sum(
            line["samples"] for line in truth.lines("batch")
        )
        assert sum_by_labels(page, "training_microbatches_total") == len(truth.lines("batch"))
        assert sum_by_labels(page, "training_checkpoints_total", result="ok") == len(truth.lines("save"))
        assert sum_by_labels(page, "training_checkpoints_total", result="failed") == 0


def check_last_values(truth: Truth) -> None:
    """Check that step, losses, norm and learning rate are those of the last step."""
    last = truth.lines("step")[-1]
    logged = {**last, **(truth.lines("logged") or [{}])[-1]}

    assert sum_by_labels(truth.live, "training_step") == last["step"]
    assert sum_by_labels(truth.live, "training_loss", mode="train") == pytest.approx(last["loss"], rel=1e-5)
    for field, family in (("norm", "training_grad_norm"), ("rate", "training_learning_rate")):
        if field in logged:
            assert sum_by_labels(truth.live, family) == pytest.approx(logged[field], rel=1e-5)
    if truth.lines("validated"):
        shown_loss = sum_by_labels(truth.live, "training_loss", mode="validation")
        assert shown_loss == pytest.approx(truth.lines("validated")[-1]["loss"], rel=1e-5)


def check_durations(truth: Truth) -> None:
    """Check the durations of training and validation steps.

    The bridge detects the training at the first backward pass, so that a part of the first step of an attempt is missing.
    """
    all_seconds = sum(line["seconds"] for attempt in truth.attempts for line in attempt if "seconds" in line)
    first_step_seconds = sum(
        next(line["seconds"] for line in attempt if "seconds" in line) for attempt in truth.attempts
    )
    validation_seconds = sum(line["seconds"] for line in truth.lines("validation"))
    train_seconds = all_seconds - validation_seconds
    shown_train_seconds, shown_validation_seconds = (
        sum_by_labels(truth.final, "training_step_duration_seconds_sum", mode=mode)
        for mode in ("train", "validation")
    )

    assert shown_train_seconds > 0.9 * (train_seconds - first_step_seconds)
    assert shown_train_seconds < SLOWER_RATIO * train_seconds + 1
    assert shown_validation_seconds > SHORTER_RATIO * validation_seconds
    assert shown_validation_seconds < SLOWER_RATIO * validation_seconds + 0.5
    for mode, lines in (("train", truth.steps), ("validation", truth.lines("validation"))):
        assert sum_by_labels(truth.final, "training_step_duration_seconds_count", mode=mode) == len(lines)


def check_lost_and_productive_work(truth: Truth) -> None:
    """Check that the crash costs the steps since the last checkpoint, and the normal end no step."""
    assert sum_by_labels(truth.final, "training_lost_steps_total") == len(truth.lost)
    assert sum_by_labels(truth.final, "training_attempt") == 2
    assert sum_by_labels(truth.final, "training_uncommitted_seconds") == 0
    first_steps = [next(line for line in attempt if "seconds" in line) for attempt in truth.attempts]
    lost_seconds = sum(line["seconds"] for line in [*truth.lost, *first_steps])
    kept_seconds = sum(line["seconds"] for line in truth.steps) - lost_seconds
    assert sum_by_labels(truth.final, "training_productive_seconds_total") > 0.8 * kept_seconds


def check_traceback(truth: Truth) -> None:
    """Check that the traceback of the job has no frame of the exporter."""
    assert "the job's own failure" in truth.errors
    assert "exporter/bridges" not in truth.errors


def check_stat_windows(truth: Truth) -> None:
    """Check the last window of four samples of the Stat that the instrumented job defines."""
    samples = [line["loss"] for line in truth.attempts[1] if line["event"] == "step"]
    window = samples[: len(samples) // 4 * 4][-4:]

    assert sum_by_labels(truth.live, "truth_loss_window_samples") == len(window)
    assert sum_by_labels(truth.live, "truth_loss_window_mean") == pytest.approx(sum(window) / len(window))
    assert sum_by_labels(truth.live, "truth_loss_window_max") == pytest.approx(max(window))
    assert sum_by_labels(truth.live, "truth_loss_window_last") == pytest.approx(window[-1])
    last = truth.lines("step")[-1]["at"]
    assert sum_by_labels(truth.live, "truth_loss_last_sample_timestamp_seconds") == pytest.approx(last, abs=2)


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        pytest.param("lightning", marks=needs("lightning")),
        pytest.param("transformers", marks=needs("transformers")),
        pytest.param("accelerate", marks=needs("accelerate")),
        "instrumented",
    ],
)
def test_counts_values_durations_and_lost_work_match_the_diary_of_the_job(name: str, tmp_path: Path) -> None:
    truth = truth_of(name, tmp_path)

    check_counts(truth)
    check_last_values(truth)
    check_durations(truth)
    check_lost_and_productive_work(truth)
    check_traceback(truth)
    if name == "instrumented":
        check_stat_windows(truth)
