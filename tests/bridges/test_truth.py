"""Values on /metrics of ordinary jobs under `run`, compared with the diary that each job keeps."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from bridges_support import QUIET, create_distribution, needs
from fork_server import forked_interpreter
from places import PROJECT, TESTS
from program_support import sum_by_labels
from run_support import (
    child_environment,
    free_port,
    is_ready,
    run_command,
    running_process,
    scrape,
)
from waiting import WAIT_LIMIT_SECONDS, wait_until

pytestmark = [needs("torch"), pytest.mark.timeout(240)]

JOB_DIRECTORY = TESTS / "bridges" / "truth"
TWO_ATTEMPTS = """
import subprocess, sys
from pathlib import Path
interpreter, script, directory = sys.argv[1:]
exit_statuses = [subprocess.run([interpreter, script, directory]).returncode for _ in range(2)]
(Path(directory) / "ended").write_text(repr(exit_statuses))
"""
"""Program that runs a job twice, like a shell loop under one `run`: the first attempt crashes, the second resumes."""
STEPS = 10
"""Steps of every job, as in `truth/diary.py`."""
BATCH_SECONDS = 0.03
"""Time that a batch sleeps, as in `truth/diary.py`."""
MAX_DURATION_RATIO = 1.5
"""Upper tolerance of a duration, for the time in hooks and for scheduling between the two clock readings."""

MIN_VALIDATION_RATIO = 0.7
"""Lower tolerance of a validation. Loaders of Accelerate fetch a batch ahead, so the last batch lies outside the block."""


@dataclass
class Truth:
    """Diary of a job, and the scraped pages.

    Attributes:
        diary: Entries that the job has written.
        live_page: Page while the second attempt waits at its end.
        final_page: Last page that the exporter serves after the end of the job.
        exit_statuses: Exit statuses of the two attempts.
        stderr: Standard error of the job.
    """

    diary: list[dict[str, Any]]
    live_page: str
    final_page: str
    exit_statuses: list[int]
    stderr: str

    def entries(self, event: str) -> list[dict[str, Any]]:
        """Return the diary entries of an event."""
        return [entry for entry in self.diary if entry["event"] == event]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """All completed steps, including steps before the first report."""
        return [entry for entry in self.diary if entry["event"] in {"step", "warm-up"}]

    @property
    def attempts(self) -> list[list[dict[str, Any]]]:
        """The entries of each attempt."""
        attempts: list[list[dict[str, Any]]] = []
        for entry in self.diary:
            if entry["event"] == "attempt":
                attempts.append([])
            attempts[-1].append(entry)
        return attempts

    @property
    def lost_steps(self) -> list[dict[str, Any]]:
        """Steps of the first attempt after its last checkpoint."""
        first_attempt = self.attempts[0]
        saved_step = max(entry["step"] for entry in first_attempt if entry["event"] == "save")
        return [entry for entry in first_attempt if entry["event"] == "step" and entry["step"] > saved_step]


def truth_of(name: str, directory: Path) -> Truth:
    """Run a job twice under `run`, and return its diary and pages."""
    feed = directory / "feed"
    feed.mkdir(mode=0o700)
    site = create_distribution(directory / "site")
    port = free_port()
    interpreter = forked_interpreter(name if name in {"lightning", "transformers"} else "torch")
    script = str(JOB_DIRECTORY / f"job_{name}.py")
    job = [sys.executable, "-c", TWO_ATTEMPTS, interpreter, script, str(directory)]
    command = run_command(feed, job, "--run.name=truth", "--run.linger=30s", port=port)
    stderr_file = directory / "stderr"
    paths = f"{site}:{PROJECT}"
    settings = {"env": child_environment(**QUIET, PYTHONPATH=paths, OMP_NUM_THREADS="1"), "cwd": directory}
    with (
        stderr_file.open("w") as stderr,
        running_process(command, feed, stderr=stderr, **settings) as process,
    ):
        wait_until(lambda: '"done"' in text_of(directory / "diary") or process.poll() is not None, 150)
        assert '"done"' in text_of(directory / "diary"), stderr_file.read_text()
        wait_until(partial(is_ready, port), 30)
        pages = scraped_pages(port)
        assert (
            len(list(islice(pages, 3))) == 3
        )  # regular scrapes, so that `run` waits for a scrape after the end
        live_page = next(page for page in pages if sum_by_labels(page, "training_step") == STEPS)
        (directory / "continue").touch()
        *_, final_page = pages
        process.wait(WAIT_LIMIT_SECONDS)
    diary = [json.loads(line) for line in text_of(directory / "diary").splitlines()]
    exit_statuses = json.loads((directory / "ended").read_text())
    return Truth(diary, live_page, final_page, exit_statuses, stderr_file.read_text())


def scraped_pages(port: int) -> Iterator[str]:
    """Scrape like a Prometheus with a short interval, and yield the pages until the exporter ends."""
    with contextlib.suppress(OSError):
        while True:
            yield scrape(port)
            time.sleep(0.5)


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def check_counts(truth: Truth) -> None:
    """Check steps, samples, batches and saves, before and after the end of the job."""
    assert truth.exit_statuses == [1, 0]
    for page in (truth.live_page, truth.final_page):
        assert sum_by_labels(page, "training_steps_total", mode="train") == len(truth.steps)
        assert sum_by_labels(page, "training_steps_total", mode="validation") == len(
            truth.entries("validation")
        )
        assert sum_by_labels(page, "training_samples_total", mode="train") == sum(
            entry["samples"] for entry in truth.entries("batch")
        )
        assert sum_by_labels(page, "training_microbatches_total") == len(truth.entries("batch"))
        assert sum_by_labels(page, "training_checkpoints_total", result="ok") == len(truth.entries("save"))
        assert sum_by_labels(page, "training_checkpoints_total", result="failed") == 0


def check_last_values(truth: Truth) -> None:
    """Check that step, losses, norm and learning rate are those of the last step."""
    last_step = truth.entries("step")[-1]
    last_values = {**last_step, **(truth.entries("logged") or [{}])[-1]}

    assert sum_by_labels(truth.live_page, "training_step") == last_step["step"]
    assert sum_by_labels(truth.live_page, "training_loss", mode="train") == pytest.approx(
        last_step["loss"], rel=1e-5
    )
    for field, family in (("norm", "training_grad_norm"), ("rate", "training_learning_rate")):
        if field in last_values:
            assert sum_by_labels(truth.live_page, family) == pytest.approx(last_values[field], rel=1e-5)
    if truth.entries("validated"):
        shown_loss = sum_by_labels(truth.live_page, "training_loss", mode="validation")
        assert shown_loss == pytest.approx(truth.entries("validated")[-1]["loss"], rel=1e-5)


def check_durations(truth: Truth) -> None:
    """Check the durations of training and validation steps.

    The bridge detects the training at the first backward pass, so that a part of the first step of an attempt is missing. The
    clocks of the job and of the exporter are read at different lines, which may cost a tenth of a short step.
    """
    all_seconds = sum(
        entry["seconds"] for attempt in truth.attempts for entry in attempt if "seconds" in entry
    )
    first_step_seconds = sum(
        next(entry["seconds"] for entry in attempt if "seconds" in entry) for attempt in truth.attempts
    )
    validation_seconds = sum(entry["seconds"] for entry in truth.entries("validation"))
    train_seconds = all_seconds - validation_seconds
    shown_train_seconds, shown_validation_seconds = (
        sum_by_labels(truth.final_page, "training_step_duration_seconds_sum", mode=mode)
        for mode in ("train", "validation")
    )

    assert shown_train_seconds > 0.9 * (train_seconds - first_step_seconds)
    assert shown_train_seconds < MAX_DURATION_RATIO * train_seconds + 1
    # Compared with the sleeps, because on a busy machine the batch outside the block may be the longest.
    min_seconds = BATCH_SECONDS * len(truth.entries("validation"))
    assert shown_validation_seconds > MIN_VALIDATION_RATIO * min_seconds
    assert shown_validation_seconds < MAX_DURATION_RATIO * validation_seconds + 0.5
    for mode, steps in (("train", truth.steps), ("validation", truth.entries("validation"))):
        assert sum_by_labels(truth.final_page, "training_step_duration_seconds_count", mode=mode) == len(
            steps
        )


def check_lost_and_productive_work(truth: Truth) -> None:
    """Check that the crash costs the steps since the last checkpoint, and the normal end no step."""
    assert sum_by_labels(truth.final_page, "training_lost_steps_total") == len(truth.lost_steps)
    assert sum_by_labels(truth.final_page, "training_attempt") == 2
    assert sum_by_labels(truth.final_page, "training_uncommitted_seconds") == 0
    first_steps = [next(entry for entry in attempt if "seconds" in entry) for attempt in truth.attempts]
    lost_seconds = sum(entry["seconds"] for entry in [*truth.lost_steps, *first_steps])
    kept_seconds = sum(entry["seconds"] for entry in truth.steps) - lost_seconds
    assert sum_by_labels(truth.final_page, "training_productive_seconds_total") > 0.8 * kept_seconds


def check_traceback(truth: Truth) -> None:
    """Check that the traceback of the job has no frame of the exporter."""
    assert "the job's own failure" in truth.stderr
    assert "exporter/bridges" not in truth.stderr


def check_stat_windows(truth: Truth) -> None:
    """Check the last window of four samples of the Stat that the instrumented job defines."""
    samples = [entry["loss"] for entry in truth.attempts[1] if entry["event"] == "step"]
    window = samples[: len(samples) // 4 * 4][-4:]  # the last complete window

    assert sum_by_labels(truth.live_page, "truth_loss_window_samples") == len(window)
    assert sum_by_labels(truth.live_page, "truth_loss_window_mean") == pytest.approx(
        sum(window) / len(window)
    )
    assert sum_by_labels(truth.live_page, "truth_loss_window_max") == pytest.approx(max(window))
    assert sum_by_labels(truth.live_page, "truth_loss_window_last") == pytest.approx(window[-1])
    last_sample_at = truth.entries("step")[-1]["at"]
    assert sum_by_labels(truth.live_page, "truth_loss_last_sample_timestamp_seconds") == pytest.approx(
        last_sample_at, abs=2
    )


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
