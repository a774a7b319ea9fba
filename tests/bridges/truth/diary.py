"""Parts of the jobs of `test_truth.py`: constants, the diary of a job, and the synchronization with the test.

The argument of a job is a directory. The first attempt crashes during a step. The second attempt resumes from the last
checkpoint and waits at its end, so that the test can scrape the last values of the live process.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

DIRECTORY = Path(sys.argv[1])
CHECKPOINT = DIRECTORY / "checkpoint"
STEPS = 10
BATCHES_PER_STEP = 2
STEPS_BETWEEN_VALIDATIONS = 4
STEPS_BETWEEN_SAVES = 3
STEPS_BEFORE_CRASH = 8
BATCH_SECONDS = 0.03
"""Minimum duration of a batch, so that durations can be compared."""
LEARNING_RATES = [0.01 * (step + 1) for step in range(STEPS)]
"""Learning rate of each step: a linear warm-up."""

_diary = (DIRECTORY / "diary").open("a", buffering=1)
attempt = sum(1 for line in (DIRECTORY / "diary").read_text().splitlines() if '"attempt"' in line) + 1
"""Number of this attempt, from 1."""


def write(event: str, **values: object) -> None:
    """Write a line with an event, its time and its values to the diary."""
    _diary.write(json.dumps({"event": event, "at": time.time(), **values}) + "\n")


def crash_if_due(completed_steps: int) -> None:
    """Raise an error in the first attempt, after STEPS_BEFORE_CRASH steps."""
    if attempt == 1 and completed_steps == STEPS_BEFORE_CRASH:
        raise RuntimeError("the job's own failure")


def wait_for_the_end() -> None:
    """Wait until the test has scraped the last values."""
    write("done")
    deadline = time.monotonic() + 60
    while not (DIRECTORY / "continue").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
