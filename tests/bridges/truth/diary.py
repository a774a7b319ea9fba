"""Shared parts of the jobs of test_truth: the diary of a job, and its synchronization with the test.

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
STEPS, ACCUMULATED, VALIDATED_EVERY, SAVED_EVERY, CRASH_AT = 10, 2, 4, 3, 8
"""Total steps, batches per step, steps between validations, steps between saves, and steps completed at the crash."""
SECONDS = 0.03
"""Minimum duration of a batch, so that durations can be compared."""
WARM_UP = [0.01 * (number + 1) for number in range(STEPS)]
"""Learning rate of each step."""

_diary = (DIRECTORY / "diary").open("a", buffering=1)
attempt = sum(1 for line in (DIRECTORY / "diary").read_text().splitlines() if '"attempt"' in line) + 1


def write(event: str, **values: object) -> None:
    """Write a line with an event, its time and its values to the diary."""
    _diary.write(json.dumps({"event": event, "at": time.time(), **values}) + "\n")


def crash_if_due(completed: int) -> None:
    """Raise an error in a step of the first attempt."""
    if attempt == 1 and completed == CRASH_AT:
        raise RuntimeError("the job's own failure")


def wait_for_the_end() -> None:
    """Wait until the test has scraped the last values."""
    write("done")
    deadline = time.monotonic() + 60
    while not (DIRECTORY / "continue").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
