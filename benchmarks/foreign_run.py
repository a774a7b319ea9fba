"""Run of a foreign job under `training-exporter run`: the numbers in the log of the job, compared with those of /metrics."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "benchmarks/foreign"
CONFIG = ROOT / "tests/data/quick.yml"
LIMIT_SECONDS = 400.0
POLL_SECONDS = 0.3
TOLERANCES = {"loss": 1e-4, "productive": 0.35}
"""Largest difference of a quantity from the log, as a ratio to the value in the log. All other quantities must be equal.

The loss of a step with several batches is computed from scaled losses. The timers of the job and of the exporter enclose
different lines.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignJob:
    """Job of `benchmarks/foreign`.

    Attributes:
        command: Command line, with the placeholder `{python}` for the interpreter.
        packages: Packages whose versions the table shows.
        venv: Name of the virtual environment; empty for a job whose framework the tests install.
        requirements: Requirements that pip installs into the virtual environment.
        without_dependencies: Packages that pip installs without dependencies, because these require another torch.
        absent: Reason for each quantity that has no series.
        status: Expected exit status of the job.
    """

    name: str
    command: Sequence[str]
    packages: Sequence[str] = ("torch",)
    venv: str = ""
    requirements: Sequence[str] = ()
    without_dependencies: Sequence[str] = ()
    absent: Mapping[str, str] = field(default_factory=dict)
    status: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Quantities of a job, from the log of the job or from /metrics; None for a quantity without a series."""

    state: str | None  # after the end
    steps: float | None  # of rank 0
    loss: float | None  # of the last step
    samples: float | None  # of rank 0
    epochs: float | None  # of rank 0
    checkpoints: float | None
    productive: float | None  # seconds
    interruptions: float | None


QUANTITIES = tuple(quantity.name for quantity in dataclasses.fields(Numbers))
TRANSIENT_STATES = {"starting", "running", "ending"}


class Verdict(Enum):
    """Result of the comparison of a quantity; the values are headings of the table."""

    EQUAL = "equal"
    WITHIN_TOLERANCE = "within tolerance"
    ABSENT = "absent"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of a quantity on the page with the log of the job.

    Attributes:
        difference: Value on the page and value in the log, if wrong.
    """

    verdict: Verdict
    difference: str = ""


@dataclass(frozen=True, slots=True)
class JobResult:
    """Result of a finished job.

    Attributes:
        states: States of the run on all pages.
        runs: Names of the runs on the last page.
        output: Output of `run` and of the job.
        page: Last page before the exit of the sidecar.
    """

    job: ForeignJob
    log_numbers: Numbers
    page_numbers: Numbers
    states: set[str]
    runs: set[str]
    output: str
    page: str

    def comparisons(self) -> Mapping[str, Comparison]:
        """Return the comparison of each quantity by name.

        The state is compared on all pages: besides transient states, no page may show another state than the log, and the
        job must be a single run.
        """
        return {name: self._compare(name) for name in QUANTITIES}

    def _compare(self, name: str) -> Comparison:
        log_value, page_value = getattr(self.log_numbers, name), getattr(self.page_numbers, name)
        if page_value is None and name in self.job.absent:
            return Comparison(Verdict.ABSENT)
        if name == "state" and (len(self.runs) != 1 or self.states - TRANSIENT_STATES != {log_value}):
            difference = f"{sorted(self.states)} of {sorted(self.runs)}, log {log_value}"
            return Comparison(Verdict.WRONG, difference)
        if page_value is not None and log_value is not None:
            tolerance = TOLERANCES.get(name)
            if tolerance is None and page_value == log_value:
                return Comparison(Verdict.EQUAL)
            if tolerance is not None and abs(page_value - log_value) <= tolerance * max(abs(log_value), 1e-3):
                return Comparison(Verdict.WITHIN_TOLERANCE)
        return Comparison(Verdict.WRONG, f"{page_value}, log {log_value}")


def measure(job: ForeignJob, python: str, directory: Path) -> JobResult:
    """Run a job under `run` in an empty directory, and scrape until the end. Raises OSError if the job did not end as expected."""
    port, pages = _free_port(), []
    flags = [
        f"--feed.dir={directory / 'feed'}",
        f"--state.dir={directory / 'state'}",
        f"--config.file={CONFIG}",
    ]
    flags += [f"--web.listen-address=127.0.0.1:{port}", "--run.linger=30s"]
    command = [argument.replace("{python}", python) for argument in job.command]
    with (directory / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "exporter", "run", *flags, "--", *command],
            env=_environment(python, directory),
            cwd=directory,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        deadline = time.monotonic() + LIMIT_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            pages.append(_page(port))
            time.sleep(POLL_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
    output_text = (directory / "output").read_text(errors="replace")
    complete_pages = [page for page in pages if page]
    if status != job.status or not complete_pages:
        raise OSError(f"exit status {status}: {output_text[-3000:]}")
    return JobResult(
        job=job,
        log_numbers=_log_numbers(directory / "own.jsonl", status),
        page_numbers=_page_numbers(complete_pages),
        states={state for page in complete_pages if (state := _state(page)) is not None},
        runs=set(re.findall(r'^training_run_info\{.*\brun="([^"]+)"', complete_pages[-1], re.MULTILINE)),
        output=output_text,
        page=complete_pages[-1],
    )


def _environment(python: str, directory: Path) -> Mapping[str, str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("EXPORTER_", "SLURM_"))
    }
    return inherited | {
        "PYTHONPATH": str(ROOT),  # which contains the metadata of the package, with the entry points
        "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
        "JOB_DIRECTORY": str(directory),
        "JOB_SOURCES": str(SOURCES),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }


def _log_numbers(path: Path, status: int) -> Numbers:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    crashes = [line for line in lines if line["event"] == "crash"]
    lost_steps = [
        step
        for crash in crashes
        for step in steps
        if step["at"] <= crash["at"] and crash["saved"] < step["step"] <= crash["step"]
    ]
    return Numbers(
        state="failed" if status else "finished",
        steps=len(steps),
        loss=steps[-1]["loss"],
        samples=sum(line["samples"] for line in steps),
        epochs=sum(line["event"] == "epoch" for line in lines),
        checkpoints=sum(line["event"] == "save" for line in lines),
        productive=sum(line["seconds"] for line in steps) - sum(line["seconds"] for line in lost_steps),
        interruptions=len(crashes) + int(status != 0),
    )


def _page_numbers(pages: Sequence[str]) -> Numbers:
    last = pages[-1]
    losses = [value for page in pages for value in _samples(page, "training_loss", mode="train")]
    return Numbers(
        state=_state(last),
        steps=_sum(last, "training_steps_total", mode="train", rank="0"),
        loss=losses[-1] if losses else None,
        samples=_sum(last, "training_samples_total", mode="train", rank="0"),
        epochs=_sum(last, "training_epochs_total", rank="0"),
        checkpoints=_sum(last, "training_checkpoints_total", result="ok"),
        productive=_sum(last, "training_productive_seconds_total"),
        interruptions=_sum(last, "training_interruptions_total"),
    )


def _state(page: str) -> str | None:
    return "|".join(re.findall(r'^training_run_state\{.*state="(\w+)"\} 1', page, re.MULTILINE)) or None


def _samples(page: str, name: str, **labels: str) -> list[float]:
    lines = (line for line in page.splitlines() if line.startswith(f"{name}{{"))
    required_labels = [f'{label}="{value}"' for label, value in labels.items()]
    return [
        float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in required_labels)
    ]


def _sum(page: str, name: str, **labels: str) -> float | None:
    values = _samples(page, name, **labels)
    return sum(values) if values else None


def _page(port: int) -> str:
    with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return str(answer.read().decode())
    return ""


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
