"""What the tests of the bridges to training frameworks share: jobs in processes of their own, and what became of them."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from elastic_support import REPOSITORY, child, page_of, series

ENTRY_POINTS = re.compile(r'^\[project\.entry-points\."?([\w.]+)"?\]\n((?:[^\[\n].*\n)+)', re.MULTILINE)

GAUGES = """
import json
import exporter
def gauges():
    '''Tell the last values of this process's gauges: they end with it.'''
    from exporter.training.recording import TRAINING
    exporter.flush()
    found = {}
    for reading in TRAINING.series():
        definition = reading.definition
        if definition.kind == "gauge":
            key = ",".join([definition.name, *(f"{name}={value}" for name, value in definition.labels)])
            found[key] = reading.value
    return json.dumps(found)
def begin(run):
    '''Give what comes a run of its own.'''
    exporter.flush()
    exporter.configure(run=run)
"""


def wanted(*modules: str) -> pytest.MarkDecorator:
    """Skip where a package is not installed, and name it."""
    missing = [name for name in modules if importlib.util.find_spec(name.partition(".")[0]) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def installed_distribution(directory: Path) -> Path:
    """What pip leaves of this distribution for `importlib.metadata` to find."""
    info = directory / "training_exporter-0.0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: training-exporter\nVersion: 0.0.0\n")
    project = (REPOSITORY / "pyproject.toml").read_text()
    groups = [f"[{group}]\n{lines.replace(chr(34), '')}" for group, lines in ENTRY_POINTS.findall(project)]
    (info / "entry_points.txt").write_text("\n".join(groups))
    return directory


QUIET: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}
"""What keeps the frameworks from the network and from telling what nobody reads."""

LIGHTNING = """
import logging, warnings
warnings.simplefilter("ignore")
import torch
import lightning.pytorch as pl
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)
from torch.utils.data import DataLoader, TensorDataset

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.layer(batch[0]).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.125)
"""
"""What a job with Lightning begins with."""

AUTO = {"EXPORTER_AUTO": "1"}
"""As `python -m exporter run` has it."""


class Job:
    """A job that has ended: its page, and what it printed.

    Args:
        done: The process.
        page: What a sidecar serves of it.
    """

    def __init__(self, done: subprocess.CompletedProcess[str], page: str) -> None:
        self.done = done
        self.page = page

    def value(self, name: str, run: str | None = None, **labels: str) -> float | None:
        """The sum of the family's series that have these labels; None where there is none."""
        if run is not None:
            labels["run"] = run
        wanted_labels = [f'{label}="{value}"' for label, value in labels.items()]
        found = [
            value
            for key, value in series(self.page, name).items()
            if all(each in key for each in wanted_labels)
        ]
        return sum(found) if found else None

    def phases(self, run: str | None = None) -> dict[str, int]:
        """How often each phase was entered."""
        found: dict[str, int] = {}
        for key, value in series(self.page, "training_phase_entries_total").items():
            if run is None or f'run="{run}"' in key:
                phase = re.search(r'phase="(\w+)"', key)
                assert phase is not None
                found[phase[1]] = found.get(phase[1], 0) + int(value)
        return found

    def number(self, run: str | None, what: str) -> float | None:
        """A number of a run: `FAMILY LABEL=VALUE…`, without `training_`; `phase NAME`, its entries; `gauge NAME`, printed."""
        name, *rest = what.split()
        if name == "phase":
            return self.phases(run).get(rest[0], 0)
        if name == "gauge":
            return self.told()[run or ""][f"training.{rest[0]}"]
        return self.value(f"training_{name}", run, **dict(label.split("=") for label in rest))

    def numbers(self, run: str, wanted: Mapping[str, float | None]) -> dict[str, float | None]:
        """The numbers of a run that are wanted."""
        return {what: self.number(run, what) for what in wanted}

    def told(self) -> dict[str, dict[str, float]]:
        """The lines `NAME {gauges}` that it printed."""
        lines = [line.partition(" ") for line in self.done.stdout.splitlines() if " {" in line]
        return {name: json.loads(text) for name, _, text in lines}


def job(
    directory: Path,
    program: str,
    environment: Mapping[str, str] = MappingProxyType({}),
    *,
    check: bool = True,
) -> Job:
    """Run a program to its end, with this distribution installed."""
    site = directory / "site"
    if not site.exists():
        installed_distribution(site)
    feed = directory / "feed"
    done = child(
        feed,
        GAUGES + program,
        check=check,
        timeout=150,
        **{"PYTHONPATH": f"{site}:{REPOSITORY}", **QUIET, **environment},
    )
    return Job(done, page_of(feed))
