"""Recorded machines, plain text exposition and invariants, for the tests of the collectors."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import strategies as st
from prometheus_client.core import Metric

from exporter.collectors.catalogue import CATALOGUE, CollectorEntry
from exporter.collectors.host.statvfs import StatvfsPool
from exporter.collectors.kernel_files import FILE_REASONS
from exporter.families import Collected, Collector

MACHINES = Path(__file__).parent / "data" / "machines"
"""Trees of /proc and /sys:

- `virtual`: a recorded virtual machine with hybrid cgroups.
- `node`: two sockets, files for every collector, and a Slurm step in cgroup v2.
- `old`: Linux 3.10 with cgroup v1, where two controllers share a mount.
- `container`: files of cgroups and mounts only; cgroup v2 in a namespace.
- `separate`: files of cgroups and mounts only; cgroup v1 with a mount per controller and no namespace.
"""

UPDATE_GOLDEN_FILES = os.environ.get("UPDATE_GOLDEN") == "1"
"""True to write the golden files instead of comparing. Review the difference."""

NEEDS_JOB = {"checkpoint_dirs", "processes", "process_memory", "rapl"}
"""Collectors that need a job, checkpoint directories or changing registers."""

FILE_COLLECTORS = [entry for entry in CATALOGUE if entry.name not in {"own"} | NEEDS_JOB]
"""Collectors that only read files and make system calls."""

REASONS = {*FILE_REASONS, "hanging", "missing", "read", "timeout", "state"}
"""Reasons of problems that any collector may report."""


@pytest.fixture
def read_from(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Path]:
    """Return a function that redirects new collectors to a tree in place of this machine."""

    def read(root: Path) -> Path:
        monkeypatch.setattr(psutil, "PROCFS_PATH", str(root / "proc"))
        monkeypatch.setattr(psutil, "getloadavg", lambda: (0.5, 0.25, 0.125))
        monkeypatch.setattr(psutil, "cpu_count", lambda *, logical=True: 8 if logical else 4)
        monkeypatch.setattr(psutil, "net_if_stats", dict)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
        return root

    return read


def options_turned_on(entry: CollectorEntry) -> dict[str, bool]:
    """Return the options of a collector that are off by default, with the value True."""
    return {name: True for name, value in entry.options.own_options().items() if value is False}


def build_collector(entry: CollectorEntry, root: Path, **options: bool) -> Collector:
    """Return a collector that reads the tree `root`, to which `read_from` has redirected psutil."""
    arguments: dict[str, dict[str, object]] = {
        name: {"sys": root / "sys"} for name in ("hardware", "cgroup", "disk", "lustre", "rdma")
    }
    arguments["memory"] = {"shm": root / "shm"}
    arguments["filesystem"] = {"pool": StatvfsPool(statvfs=recorded_statvfs(root))}
    collector: Collector = entry.factory(**arguments.get(entry.name, {}), **options)
    return collector


def recorded_statvfs(root: Path) -> Callable[[str], os.statvfs_result]:
    """Return a statvfs with the recorded results of a machine: ten numbers or the name of an error."""
    path = root / "statvfs.json"
    result_by_mount_point = json.loads(path.read_text()) if path.exists() else {}

    def statvfs(mount_point: str) -> os.statvfs_result:
        result = result_by_mount_point.get(mount_point, "ENOENT")
        if isinstance(result, str):
            error_number = getattr(errno, result)
            raise OSError(error_number, os.strerror(error_number))
        return os.statvfs_result(result)

    return statvfs


def copy_machine(machine: str, directory: Path) -> Path:
    """Copy a recorded machine, so that a test can modify it."""
    return Path(shutil.copytree(MACHINES / machine, directory / machine, symlinks=True))


def value_of(collected: Collected, name: str, *labels: str) -> float | None:
    """Return the value of the sample with these label values, or None if absent. Empty values are ignored."""
    expected_values = [label_value for label_value in labels if label_value]
    for metric in collected:
        for sample in metric.samples:
            if sample.name == name and list(sample.labels.values()) == expected_values:
                return float(sample.value)
    return None


def text_of(metrics: Iterable[Metric]) -> str:
    """Return families in Prometheus' text format, without the exporter's renderer."""
    lines = []
    for metric in metrics:
        metric_type = "gauge" if metric.type == "info" else metric.type
        name = metric.samples[0].name
        lines += [f"# HELP {name} {metric.documentation}", f"# TYPE {name} {metric_type}"]
        for sample in metric.samples:
            labels = ",".join(f'{label}="{value}"' for label, value in sample.labels.items())
            lines.append(f"{sample.name}{{{labels}}} {_rounded(sample.value)}".replace("{}", ""))
    return "".join(f"{line}\n" for line in lines)


def _rounded(value: float) -> str:
    """Return the text of a number with at most 12 significant digits. Whole numbers stay exact."""
    return repr(value) if float(value).is_integer() else f"{value:.12g}"


def assert_golden(text: str, golden: Path) -> None:
    """Compare a text with a golden file. With UPDATE_GOLDEN=1, write the file first."""
    if UPDATE_GOLDEN_FILES:
        golden.write_text(text)
    assert text == golden.read_text()


def assert_sound(collector: Any, collected: Collected) -> None:
    """Check the invariants of the families and problems that one pass of a collector returns."""
    assert {reason for reason, _ in collected.problems} <= {*REASONS, *getattr(collector, "reasons", ())}
    names = [metric.name for metric in collected]
    assert len(names) == len(set(names))
    specs = {spec.name: spec for spec in collector.specs}
    for metric in collected:
        assert metric.samples
        series = [(sample.name, *sorted(sample.labels.items())) for sample in metric.samples]
        assert len(series) == len(set(series))
        for sample in metric.samples:
            spec = specs[sample.name]
            assert set(sample.labels) <= set(spec.labels)
            assert math.isfinite(float(sample.value))
            if spec.type == "counter" or spec.unit == "bytes":
                assert sample.value >= 0
            if spec.unit == "ratio":
                assert 0 <= sample.value <= 1


class BlockPublisher:
    """Publisher that a scheduler calls. Keeps the current blocks and a log of all calls."""

    def __init__(self) -> None:
        self.blocks: dict[str, Sequence[Metric]] = {}
        self.events: list[tuple[str, str]] = []

    def publish(self, name: str, families: Sequence[Metric]) -> None:
        self.blocks[name] = families
        self.events.append(("publish", name))

    def withdraw(self, name: str) -> None:
        del self.blocks[name]
        self.events.append(("withdraw", name))


@st.composite
def damaged_bytes(draw: st.DrawFn, original: bytes) -> bytes:
    """Return random bytes, an odd number or deeply nested text, or the original cut short or with a part overwritten."""
    damage = draw(st.sampled_from(["random", "cut", "overwritten", "odd"]))
    if damage == "random":
        return draw(st.binary(max_size=200))
    if damage == "odd":
        return draw(st.sampled_from([b"-1\n", b"9" * 30, b"nan\n", b"1e3\n", b"1_0\n", b"[" * 50_000]))
    position = draw(st.integers(0, len(original)))
    if damage == "cut":
        return original[:position]
    replacement = draw(st.binary(min_size=1, max_size=8))
    return original[:position] + replacement + original[position + len(replacement) :]
