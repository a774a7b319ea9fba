"""Jobs in child processes, and their results, for the tests of the bridges."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from places import PROJECT, TESTS
from program_support import page_of_feed, run_program, series

STEPS, VALIDATION_STEPS, SAMPLES = (
    "steps_total mode=train",
    "steps_total mode=validation",
    "samples_total mode=train",
)
SAVES, FAILED_SAVES = "checkpoints_total result=ok", "checkpoints_total result=failed"
"""Quantities of a run, in the notation of `Job.quantity_value`."""

AUTO: Mapping[str, str] = {"EXPORTER_AUTO": "1"}
"""Environment variable that `training-exporter run` sets for the job."""

QUIET: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}
"""Environment that disables network access and progress output of the frameworks, and hides the GPUs."""

ENTRY_POINTS = re.compile(r'^\[project\.entry-points\."?([\w.]+)"?\]\n((?:[^\[\n].*\n)+)', re.MULTILINE)

PROLOGUE = """
import gc
gc.set_threshold(100_000, 20, 20)
import json
import exporter
from programs.loops import gauges
"""
"""First lines of every job. With the default thresholds, garbage collection takes a sixth of the time to import a framework."""

PRINT_PAGE = """
import os, pathlib
from program_support import page_of_feed
exporter.flush()
print(page_of_feed(pathlib.Path(os.environ["EXPORTER_FEED_DIR"])))
"""
"""Code that prints the page of the running process. The code requires `TESTS` on the import path."""

LIGHTNING = """
import warnings
warnings.simplefilter("ignore")
from programs.lightning_parts import Module, loader, pl, quiet_trainer
"""
"""First lines of a job with Lightning."""


def needs(*modules: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test unless all these packages are installed."""
    missing = [name for name in modules if importlib.util.find_spec(name.partition(".")[0]) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def create_distribution(directory: Path) -> Path:
    """Create the metadata of this distribution, as `importlib.metadata` reads them, and return the directory."""
    dist_info = directory / "training_exporter-0.0.0.dist-info"
    dist_info.mkdir(parents=True)
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: training-exporter\nVersion: 0.0.0\n")
    project = (PROJECT / "pyproject.toml").read_text()
    groups = [f"[{group}]\n{lines.replace(chr(34), '')}" for group, lines in ENTRY_POINTS.findall(project)]
    (dist_info / "entry_points.txt").write_text("\n".join(groups))
    return directory


class Job:
    """Job that has ended. `page` is the metrics page of a sidecar that reads the feed of the job."""

    def __init__(self, process: subprocess.CompletedProcess[str], page: str) -> None:
        self.process = process
        self.page = page

    def value(self, name: str, run: str | None = None, **labels: str) -> float | None:
        """Return the sum of the series of a family that have these labels, or None without such a series."""
        if run is not None:
            labels["run"] = run
        matchers = [f'{label}="{value}"' for label, value in labels.items()]
        matching_values = [
            value
            for series_labels, value in series(self.page, name).items()
            if all(matcher in series_labels for matcher in matchers)
        ]
        return sum(matching_values) if matching_values else None

    def quantity_value(self, quantity: str, run: str | None = None) -> float | None:
        """Return the value of a quantity of a run.

        Args:
            quantity: `FAMILY LABEL=VALUE…` (without `training_`), `phase NAME` for the number of entries, or
                `gauge NAME` for a gauge that the job has printed.
            run: Name of the run; any run by default.
        """
        name, *arguments = quantity.split()
        if name == "phase":
            return self.value("training_phase_entries_total", run, phase=arguments[0]) or 0
        if name == "gauge":
            return self.gauges(run)[arguments[0]]
        return self.value(f"training_{name}", run, **dict(label.split("=") for label in arguments))

    def differences(
        self, expected: Mapping[str, float | None], run: str | None = None
    ) -> dict[str, float | None]:
        """Return the actual values of the quantities whose actual and expected values differ."""
        actual = {quantity: self.quantity_value(quantity, run) for quantity in expected}
        return {quantity: value for quantity, value in actual.items() if value != expected[quantity]}

    def own_value(self, name: str) -> float:
        """Return the first value that the job itself has printed after `own NAME`, such as its own loss."""
        prefix = f"own {name} "
        lines = self.process.stdout.splitlines()
        return next(float(line.removeprefix(prefix)) for line in lines if line.startswith(prefix))

    def gauges(self, run: str | None = None) -> dict[str, float]:
        """Return the gauges that the job has printed for a run, or for its first run."""
        lines = (line.partition(" ") for line in self.process.stdout.splitlines())
        json_texts = (text for name, _, text in lines if text.startswith("{") and run in {name, None})
        value_by_gauge: dict[str, float] = json.loads(next(json_texts))
        return value_by_gauge


def run_job(
    directory: Path,
    program: str | Path,
    environment: Mapping[str, str] = MappingProxyType({}),
    *,
    check: bool = True,
    library: str | None = None,
) -> Job:
    """Run a program (source text, or the path of a script) in a directory until it ends, with this distribution installed.

    With *library*, the program runs in a process that has imported this library, see `fork_server.MODULES`.
    """
    site = directory / "site"
    if not site.exists():
        create_distribution(site)
    feed = directory / "feed"
    completed = run_program(
        feed,
        program if isinstance(program, Path) else PROLOGUE + program,
        check=check,
        timeout=150,
        library=library,
        **{"PYTHONPATH": f"{site}:{PROJECT}:{TESTS}", **QUIET, **environment},
    )
    return Job(completed, page_of_feed(feed))


def run_script(directory: Path, code: str, launch: str, *, library: str | None = None) -> Job:
    """Write a training script to train.py, and run a job that launches it with Python code, with `EXPORTER_AUTO=1`.

    With *library*, the job runs in a process that has imported this library, see `fork_server.MODULES`.
    """
    (directory / "train.py").write_text(code)
    return run_job(directory, f"import subprocess, sys\n{launch}", AUTO, library=library)


def job_fixture(program: str, library: str | None = None) -> Any:
    """Return a fixture that runs a job once per test module. A misuse or a notice of the exporter fails the tests.

    With *library*, the job runs in a process that has imported this library, see `fork_server.MODULES`.
    """

    @pytest.fixture(scope="module")
    def ended_job(tmp_path_factory: pytest.TempPathFactory) -> Job:
        job = run_job(tmp_path_factory.mktemp("loops"), program, library=library)

        assert "training_misuse_total" not in job.page
        # Otherwise, the totals of a run are missing although the job has recorded them.
        assert (job.value("exporter_feed_refused_total"), job.value("exporter_ledger_suppressed_ranks")) == (
            0,
            0,
        )
        assert "exporter" not in job.process.stderr
        return job

    return ended_job
