"""Every number on /metrics of an ordinary job under `run` is held against the diary that the job itself keeps."""

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

JOBS = TESTS / "bridges" / "truth"
# A shell loop within one `run`: the first attempt crashes, the second resumes.
LOOP = """
import subprocess, sys
from pathlib import Path
directory = Path(sys.argv[2])
codes = [subprocess.run([sys.executable, *sys.argv[1:]]).returncode for _ in range(2)]
(directory / "ended").write_text(repr(codes))
"""
STEPS = 10
"""Steps of every job, as in the module of its log."""
SLOWER_RATIO = 1.5
"""Tolerance of a step duration: hooks, and scheduling between the two clock readings."""

SHORTER_RATIO = 0.7
"""Tolerance of a validation. Loaders of Accelerate fetch a batch ahead, so the last batch lies outside the block."""


@dataclass
class Truth:
    """Log of a job, and the scraped pages.

    Attributes:
        diary: The lines of the job.
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

    def of(self, event: str) -> list[dict[str, Any]]:
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
        saved = max(line["step"] for line in first if line["event"] == "save")
        return [line for line in first if line["event"] == "step" and line["step"] > saved]


def truth_of(name: str, directory: Path) -> Truth:
    feed = directory / "feed"
    feed.mkdir(mode=0o700)
    site = installed_distribution(directory / "site")
    port = free_port()
    job = [sys.executable, "-c", LOOP, str(JOBS / f"job_{name}.py"), str(directory)]
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
        (directory / "go").touch()
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


def what_was_counted_is_what_was_done(truth: Truth) -> None:
    assert truth.codes == [1, 0]
    for page in (truth.live, truth.final):
        assert sum_by_labels(page, "training_steps_total", mode="train") == len(truth.steps)
        assert sum_by_labels(page, "training_steps_total", mode="validation") == len(truth.of("validation"))
        assert sum_by_labels(page, "training_samples_total", mode="train") == sum(
            line["samples"] for line in truth.of("batch")
        )
        assert sum_by_labels(page, "training_microbatches_total") == len(truth.of("batch"))
        assert sum_by_labels(page, "training_checkpoints_total", result="ok") == len(truth.of("save"))
        assert sum_by_labels(page, "training_checkpoints_total", result="failed") == 0


def last_values_are_those_of_the_last_step(truth: Truth) -> None:
    last = truth.of("step")[-1]
    logged = {**last, **(truth.of("logged") or [{}])[-1]}

    assert sum_by_labels(truth.live, "training_step") == last["step"]
    assert sum_by_labels(truth.live, "training_loss", mode="train") == pytest.approx(last["loss"], rel=1e-5)
    for field, family in (("norm", "training_grad_norm"), ("rate", "training_learning_rate")):
        if field in logged:
            assert sum_by_labels(truth.live, family) == pytest.approx(logged[field], rel=1e-5)
    if truth.of("validated"):
        shown_loss = sum_by_labels(truth.live, "training_loss", mode="validation")
        assert shown_loss == pytest.approx(truth.of("validated")[-1]["loss"], rel=1e-5)


def durations_are_those_of_the_job(truth: Truth) -> None:
    # The training is detected at the first backward pass, after the start of the first step.
    later = [line["seconds"] for attempt in truth.attempts for line in attempt if "seconds" in line]
    firsts = [next(line["seconds"] for line in attempt if "seconds" in line) for attempt in truth.attempts]
    validated = sum(line["seconds"] for line in truth.of("validation"))
    shown, shown_validated = (
        sum_by_labels(truth.final, "training_step_duration_seconds_sum", mode=mode)
        for mode in ("train", "validation")
    )

    assert 0.9 * (sum(later) - validated - sum(firsts)) < shown < SLOWER_RATIO * (sum(later) - validated) + 1
    assert SHORTER_RATIO * validated < shown_validated < SLOWER_RATIO * validated + 0.5
    for mode, lines in (("train", truth.steps), ("validation", truth.of("validation"))):
        assert sum_by_labels(truth.final, "training_step_duration_seconds_count", mode=mode) == len(lines)


def the_crash_costs_the_steps_since_the_last_checkpoint_and_the_end_nothing(truth: Truth) -> None:
    assert sum_by_labels(truth.final, "training_lost_steps_total") == len(truth.lost)
    assert sum_by_labels(truth.final, "training_attempt") == 2
    assert sum_by_labels(truth.final, "training_uncommitted_seconds") == 0
    lost = [*truth.lost, *(next(line for line in attempt if "seconds" in line) for attempt in truth.attempts)]
    kept = sum(line["seconds"] for line in truth.steps) - sum(line["seconds"] for line in lost)
    assert sum_by_labels(truth.final, "training_productive_seconds_total") > 0.8 * kept


def only_the_job_itself_is_in_its_traceback(truth: Truth) -> None:
    assert "the job's own failure" in truth.errors
    assert "exporter/bridges" not in truth.errors


def windows_of_a_stat_are_those_of_its_samples(truth: Truth) -> None:  # only this job defines a Stat
    samples = [line["loss"] for line in truth.attempts[1] if line["event"] == "step"]
    window = samples[: len(samples) // 4 * 4][-4:]

    assert sum_by_labels(truth.live, "truth_loss_window_samples") == len(window)
    assert sum_by_labels(truth.live, "truth_loss_window_mean") == pytest.approx(sum(window) / len(window))
    assert sum_by_labels(truth.live, "truth_loss_window_max") == pytest.approx(max(window))
    assert sum_by_labels(truth.live, "truth_loss_window_last") == pytest.approx(window[-1])
    last = truth.of("step")[-1]["at"]
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
def test_every_number_matches_the_log_of_the_job(name: str, tmp_path: Path) -> None:
    truth = truth_of(name, tmp_path)

    what_was_counted_is_what_was_done(truth)
    last_values_are_those_of_the_last_step(truth)
    durations_are_those_of_the_job(truth)
    the_crash_costs_the_steps_since_the_last_checkpoint_and_the_end_nothing(truth)
    only_the_job_itself_is_in_its_traceback(truth)
    if name == "instrumented":
        windows_of_a_stat_are_those_of_its_samples(truth)
