"""Log that a foreign job keeps without the exporter: a JSON line for each step, epoch and save."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

SECONDS = 0.05
"""Time that a step sleeps, so that its duration can be compared."""
LAST_SECONDS = 3.0
"""Time between the last step and the end of the job, as for writing results."""

DIRECTORY = Path(os.environ.get("JOB_DIRECTORY", "."))
"""Directory of the log and of the checkpoints."""
_began = time.monotonic()


def log(event: str, **numbers: float | bool) -> None:
    """Append a line."""
    line = json.dumps({"event": event, "at": time.time(), **numbers})
    with (DIRECTORY / "own.jsonl").open("a") as file:
        file.write(line + "\n")


def begin_step() -> None:
    """Start the clock of a step."""
    global _began  # noqa: PLW0603  # a script's own stopwatch
    _began = time.monotonic()


def end_step(loss: float, samples: int, **numbers: float | bool) -> None:
    """Append the line of a step."""
    log("step", loss=float(loss), samples=samples, seconds=time.monotonic() - _began, **numbers)


def end_job(status: int = 0) -> None:
    """Append the last line and exit."""
    time.sleep(LAST_SECONDS)
    log("end", status=status)
    sys.exit(status)
