"""What the tests of the collectors share: recorded machines, an exposition to look at, and its invariants."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from exporter.collectors.catalogue import CATALOGUE, CollectorEntry
from exporter.collectors.family import Collected, Collector, Distribution, Family
from exporter.collectors.statvfs import StatvfsPool
from exporter.errors import CollectError

MACHINES = Path(__file__).parent / "data" / "machines"
"""Trees of /proc and /sys: `virtual` (recorded; cgroups hybrid), `node` (two sockets, everything; a Slurm step
in cgroup v2), `old` (Linux 3.10; cgroup v1, two controllers on one mount); only for cgroups and mounts also
`container` (v2 in a namespace) and `separate` (v1, a mount each, no namespace)."""

UPDATE = os.environ.get("UPDATE_GOLDEN") == "1"
"""Write the expected expositions instead of comparing; the diff is the review."""

OF_JOB = {"checkpoint_dirs", "processes", "process_memory", "rapl"}
"""Those that need a job, directories of one, or registers that turn; their tests have machines of their own."""

OF_TREE = [entry for entry in CATALOGUE if entry.name not in {"clock", "shm"} | OF_JOB]
"""Those that read nothing but files."""


def build(entry: CollectorEntry, root: Path, **options: bool) -> Collector:
    """Make a collector that reads a tree instead of this machine."""
    roots: dict[str, dict[str, object]] = {
        "cpu": {"proc": root / "proc", "ticks_per_second": 100},
        "swap": {"proc": root / "proc", "page_size": 4096},
        "own": {"proc": root / "proc", "ticks_per_second": 100, "page_size": 4096},
        "cpu_count": {"proc": root / "proc", "sys": root / "sys", "affinity": lambda: 4},
        "cpu_frequency": {"proc": root / "proc", "sys": root / "sys"},
        "cpu_throttles": {"sys": root / "sys"},
        "numa": {"sys": root / "sys"},
        "sensors": {"sys": root / "sys"},
        "edac": {"sys": root / "sys"},
        "cgroup": {"proc": root / "proc", "sys": root / "sys"},
        "disk": {"proc": root / "proc", "sys": root / "sys"},
        "filesystem": {"proc": root / "proc", "pool": StatvfsPool(statvfs=recorded_statvfs(root))},
        "lustre": {"proc": root / "proc", "sys": root / "sys"},
        "network": {"proc": root / "proc", "sys": root / "sys"},
        "rdma": {"sys": root / "sys"},
        "tcp": {"proc": root / "proc", "page_size": 4096},
        "clock": {},
        "shm": {"shm": root / "shm"},
    }
    made: Collector = entry.factory(**roots.get(entry.name, {"proc": root / "proc"}), **options)
    return made


def recorded_statvfs(root: Path) -> Callable[[str], os.statvfs_result]:
    """Answer as the filesystems of a machine did: with ten numbers, or the name of an error."""
    path = root / "statvfs.json"
    answers = json.loads(path.read_text()) if path.exists() else {}

    def statvfs(mount_point: str) -> os.statvfs_result:
        answer = answers.get(mount_point, "ENOENT")
        if isinstance(answer, str):
            number = getattr(errno, answer)
            raise OSError(number, os.strerror(number))
        return os.statvfs_result(answer)

    return statvfs


def copy_of(machine: str, to: Path) -> Path:
    """Copy a machine, to be damaged."""
    return Path(shutil.copytree(MACHINES / machine, to / machine, symlinks=True))


def value_of(collected: Collected, name: str, *labels: str) -> float | None:
    """Look up one sample, None where it is absent."""
    for family in collected.families:
        for sample in family.samples:
            if family.spec.name == name and sample.labels == labels:
                assert not isinstance(sample.value, Distribution)
                return sample.value
    return None


def text_of(families: Iterable[Family]) -> str:
    """Write families in Prometheus' text format, plainly; the real renderer has tests of its own."""
    lines = []
    for family in families:
        kind = "gauge" if family.spec.type == "info" else family.spec.type
        lines += [f"# HELP {family.spec.name} {family.spec.help}", f"# TYPE {family.spec.name} {kind}"]
        for sample in family.samples:
            labels = ",".join(
                f'{name}="{value}"'
                for name, value in zip(family.spec.labels, sample.labels, strict=True)
                if value
            )
            lines.append(f"{family.spec.name}{{{labels}}} {sample.value!r}".replace("{}", ""))
    return "".join(f"{line}\n" for line in lines)


def assert_sound(collector: Collector, collected: Collected) -> None:
    """Check what holds for every block, whatever was read."""
    reasons = set(collector.reasons) if hasattr(collector, "reasons") else set()
    assert {reason for reason, _ in collected.problems} <= reasons
    names = [family.spec.name for family in collected.families]
    assert len(names) == len(set(names))
    for family in collected.families:
        assert family.spec in collector.specs
        assert family.samples
        labels = [sample.labels for sample in family.samples]
        assert len(labels) == len(set(labels))
        for sample in family.samples:
            assert len(sample.labels) == len(family.spec.labels)
            assert isinstance(sample.value, (int, float))
            assert math.isfinite(float(sample.value))
            if family.spec.type == "counter" or family.spec.unit == "bytes":
                assert sample.value >= 0
            if family.spec.unit == "ratio":
                assert 0 <= sample.value <= 1


def collect_soundly(collector: Collector) -> Collected | CollectError:
    """Collect; nothing but the documented outcomes may come back."""
    try:
        collected = collector.collect()
    except CollectError as error:
        failure = error
    else:
        assert_sound(collector, collected)
        return collected
    assert failure.reason in getattr(collector, "reasons", ())
    return failure


class Board:
    """The receiving end of a scheduler: what is published at the moment, and all that happened."""

    def __init__(self) -> None:
        self.blocks: dict[str, Sequence[Family]] = {}
        self.events: list[tuple[str, str]] = []

    def publish(self, name: str, families: Sequence[Family]) -> None:
        self.blocks[name] = families
        self.events.append(("publish", name))

    def withdraw(self, name: str) -> None:
        del self.blocks[name]
        self.events.append(("withdraw", name))

    def published(self, name: str) -> int:
        """How often a block of this name came."""
        return self.events.count(("publish", name))
