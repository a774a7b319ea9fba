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
from elastic_support import REPOSITORY, child, page_of, series
from places import TESTS

STEPS, VALIDATED, SAMPLES = (
    "steps_total mode=train",
    "steps_total mode=validation",
    "samples_total mode=train",
)
SAVED, FAILED = "checkpoints_total result=ok", "checkpoints_total result=failed"
"""Numbers of a run, as `Job.number` has them."""

AUTO: Mapping[str, str] = {"EXPORTER_AUTO": "1"}
"""As `training-exporter run` has it."""

QUIET: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}
"""Environment that disables network access and progress output of the frameworks."""

ENTRY_POINTS = re.compile(r'^\[project\.entry-points\."?([\w.]+)"?\]\n((?:[^\[\n].*\n)+)', re.MULTILINE)

PROLOGUE = """
import json
import exporter
from programs.loops import begin, gauges
"""
"""First lines of every job."""

PRINT_PAGE = """
import os, pathlib
from elastic_support import page_of
exporter.flush()
print(page_of(pathlib.Path(os.environ["EXPORTER_FEED_DIR"])))
"""
"""Code by which a live process prints its page; `TESTS` is on the import path."""

LIGHTNING = """
import warnings
warnings.simplefilter("ignore")
from programs.lightning_parts import Module, loader, pl, quiet_trainer
"""
"""First lines of a job with Lightning."""


def wanted(*modules: str) -> pytest.MarkDecorator:
    """Skip where a package is not installed, and name it."""
    missing = [name for name in modules if importlib.util.find_spec(name.partition(".")[0]) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def installed_distribution(directory: Path) -> Path:
    """Create the metadata of an installed distribution for `importlib.metadata`."""
    info = directory / "training_exporter-0.0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: training-exporter\nVersion: 0.0.0\n")
    project = (REPOSITORY / "pyproject.toml").read_text()
    groups = [f"[{group}]\n{lines.replace(chr(34), '')}" for group, lines in ENTRY_POINTS.findall(project)]
    (info / "entry_points.txt").write_text("\n".join(groups))
    return directory


class Job:
    """Finished job; `page` is the exposition of a sidecar."""

    def __init__(self, done: subprocess.CompletedProcess[str], page: str) -> None:
        self.done = done
        self.page = page

    def value(self, name: str, run: str | None = None, **labels: str) -> float | None:
        """Sum of the series of the family with these labels; None without a series."""
        if run is not None:
            labels["run"] = run
        pairs = [f'{label}="{value}"' for label, value in labels.items()]
        found = [
            value for key, value in series(self.page, name).items() if all(pair in key for pair in pairs)
        ]
        return sum(found) if found else None

    def number(self, what: str, run: str | None = None) -> float | None:
        """Value of a run: `FAMILY LABEL=VALUE…` without `training_`, the entries of `phase NAME`, or the printed `gauge NAME`."""
        name, *rest = what.split()
        if name == "phase":
            return self.value("training_phase_entries_total", run, phase=rest[0]) or 0
        if name == "gauge":
            return self.gauges(run)[rest[0]]
        return self.value(f"training_{name}", run, **dict(label.split("=") for label in rest))

    def unlike(self, wanted: Mapping[str, float | None], run: str | None = None) -> dict[str, float | None]:
        """The numbers that are other than wanted."""
        found = {what: self.number(what, run) for what in wanted}
        return {what: number for what, number in found.items() if number != wanted[what]}

    def gauges(self, run: str | None = None) -> dict[str, float]:
        """Printed line of a run, or the first line of any run."""
        lines = (line.partition(" ") for line in self.done.stdout.splitlines())
        texts = (text for name, _, text in lines if text.startswith("{") and run in {name, None})
        found: dict[str, float] = json.loads(next(texts))
        return found


def job(
    directory: Path,
    program: str,
    environment: Mapping[str, str] = MappingProxyType({}),
    *,
    check: bool = True,
) -> Job:
    """Run a program to its end in a directory, with this distribution installed."""
    site = directory / "site"
    if not site.exists():
        installed_distribution(site)
    feed = directory / "feed"
    completed = child(
        feed,
        PROLOGUE + program,
        check=check,
        timeout=150,
        **{"PYTHONPATH": f"{site}:{REPOSITORY}:{TESTS}", **QUIET, **environment},
    )
    return Job(completed, page_of(feed))


def script(directory: Path, text: str, launch: str = "subprocess.run([sys.executable, 'train.py'])") -> Job:
    """Run a program from a file in a child process with `EXPORTER_AUTO=1`."""
    (directory / "train.py").write_text(text)
    return job(directory, f"import subprocess, sys\n{launch}", AUTO)


def recorded_job(program: str) -> Any:
    """Fixture of a job, run once for its module; no misuse and no notice is allowed."""

    @pytest.fixture(scope="module")
    def recorded(tmp_path_factory: pytest.TempPathFactory) -> Job:
        found = job(tmp_path_factory.mktemp("loops"), program)

        assert "training_misuse_total" not in found.page
        assert "exporter" not in found.done.stderr
        return found

    return recorded
