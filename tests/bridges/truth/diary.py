"""What the jobs of the truth tests share: a diary of what they really do, and when they are to go on.

A job is called with a directory. Its first attempt crashes amid a step; its second resumes from the last checkpoint, and
at the end waits, so that its last values can be looked at while it lives.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

DIRECTORY = Path(sys.argv[1])
CHECKPOINT = DIRECTORY / "checkpoint"
STEPS, ACCUMULATED, VALIDATED_EVERY, SAVED_EVERY, CRASH_AT = 10, 2, 4, 3, 8
"""Steps in all; batches in each; steps between validations, and between saves; steps completed when it crashes."""
SECONDS = 0.03
"""How long a batch takes at least, so that durations can be compared."""
WARM_UP = [0.01 * (number + 1) for number in range(STEPS)]
"""The learning rate of each step."""

_diary = (DIRECTORY / "diary").open("a", buffering=1)
attempt = sum(1 for line in (DIRECTORY / "diary").read_text().splitlines() if '"attempt"' in line) + 1


def write(event: str, **numbers: object) -> None:
    """Write one line."""
    _diary.write(json.dumps({"event": event, "at": time.time(), **numbers}) + "\n")


def crash_if_due(completed: int) -> None:
    """End the first attempt amid a step."""
    if attempt == 1 and completed == CRASH_AT:
        raise RuntimeError("the job's own failure")


def wait_for_the_end() -> None:
    """Wait until somebody has looked at the last values."""
    write("done")
    until = time.monotonic() + 60
    while not (DIRECTORY / "go").exists() and time.monotonic() < until:
        time.sleep(0.05)
