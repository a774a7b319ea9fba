"""Machines whose energy registers are turned by hand: described trees of /sys/class/powercap, and the clocks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from ledger_support import Page

from exporter.collectors.energy.rapl import RaplCollector
from exporter.collectors.job import Keeper
from exporter.families import Collected
from exporter.ledger.energy.collector import EnergyCollector, NodeLock, Sources
from exporter.ledger.store import StateStore

RANGE = 262_143.328_850
"""Joules; that of most server CPUs."""

Zones = dict[str, tuple[str, float]]
"""Kernel's key → name, range."""

XEON: Zones = {
    "intel-rapl:0": ("package-0", RANGE),
    "intel-rapl:0:0": ("dram", 65_712.999613),
    "intel-rapl:1": ("package-1", RANGE),
    "intel-rapl:1:0": ("dram", 65_712.999613),
}
LAPTOP: Zones = {
    "intel-rapl:0": ("package-0", RANGE),
    "intel-rapl:0:0": ("core", RANGE),
    "intel-rapl:0:1": ("uncore", RANGE),
    "intel-rapl:1": ("psys", RANGE),
    "intel-rapl-mmio:0": ("package-0", RANGE),
}
THREADRIPPER: Zones = {
    "intel-rapl:0": ("package-0-die-0", 65_532.610987),
    "intel-rapl:0:0": ("core", 65_532.610987),
    "intel-rapl:1": ("package-0-die-1", 65_532.610987),
    "intel-rapl:1:0": ("core", 65_532.610987),
}
EPYC: Zones = {"intel-rapl:0": ("package-0", 65_532.610987), "intel-rapl:1": ("package-1", 65_532.610987)}

MACHINES: dict[str, Zones] = {"xeon": XEON, "laptop": LAPTOP, "threadripper": THREADRIPPER, "epyc": EPYC}


@dataclass
class Machine:
    """One machine; `joules` is what its registers would show if they did not wrap."""

    root: Path
    zones: Zones = field(default_factory=lambda: dict(XEON))
    now: float = 5000.0
    busy: float = 0.0
    boot: str = "boot-1"
    joules: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for place, key in enumerate(self.zones):
            self.joules.setdefault(key, 1000.0 * (place + 1))
        for key, (name, range_joules) in self.zones.items():
            directory = self.root / "sys/class/powercap" / key
            directory.mkdir(parents=True)
            (directory / "name").write_text(f"{name}\n")
            (directory / "max_energy_range_uj").write_text(f"{round(range_joules * 1e6)}\n")
        (self.root / "proc/sys/kernel/random").mkdir(parents=True)
        self.write()

    def register(self, key: str) -> Path:
        return self.root / "sys/class/powercap" / key / "energy_uj"

    def write(self) -> None:
        for key, joules in self.joules.items():
            microjoules = round(joules % self.zones[key][1] * 1e6)
            self.register(key).write_text(f"{microjoules}\n")
        (self.root / "proc/sys/kernel/random/boot_id").write_text(f"{self.boot}\n")
        ticks = round(self.busy * 100)
        (self.root / "proc/stat").write_text(
            f"cpu  {ticks} 0 0 900 90 0 0 0 0 0\ncpu0 {ticks} 0 0 9 9 0 0 0 0 0\ncpu1 0 0 0 9 9 0 0 0 0 0\n"
            "btime 1600000000\n"
        )
        (self.root / "proc/uptime").write_text(f"{self.now:.2f} 1.00\n")

    def draw(self, seconds: float, watts: float) -> None:
        """Let time pass; every register grows by the same power."""
        self.now += seconds
        for key in self.joules:
            self.joules[key] += watts * seconds
        self.write()

    def collector(
        self,
        keeper: Keeper | None = None,
        *,
        working: Callable[[], bool | None] = lambda: None,
        counts: Callable[[], bool] = lambda: True,
        tdp_watts: float | None = None,
        idle_watts: float | None = None,
    ) -> RaplCollector:
        psutil.PROCFS_PATH, before = str(self.root / "proc"), psutil.PROCFS_PATH
        try:
            return RaplCollector(
                sys=self.root / "sys",
                keeper=keeper,
                working=working,
                counts=counts,
                tdp_watts=tdp_watts,
                idle_watts=idle_watts,
                monotonic=lambda: self.now,
            )
        finally:
            psutil.PROCFS_PATH = before

    def remove(self) -> None:
        shutil.rmtree(self.root)


class EnergyLedger:
    """The energy ledger of a machine; `restart` is what SIGKILL and a new start do."""

    def __init__(
        self,
        directory: Path,
        sources: Sources,
        *,
        wall: Callable[[], float],
        monotonic: Callable[[], float],
        state: StateStore | None = None,
        **options: Any,
    ) -> None:
        self.directory, self.sources = directory, sources
        self.options: dict[str, Any] = {"clock": wall, "monotonic": monotonic, **options}
        self.boot = "boot"
        self.start(state)

    def start(self, state: StateStore | None = None) -> None:
        self.lock = NodeLock(self.directory, self.boot)
        self.state = state or StateStore(self.directory, keeper="here")
        self.collector = EnergyCollector(self.sources, self.state, self.lock, boot=self.boot, **self.options)

    def restart(self) -> None:
        self.lock.release()
        self.state.close()
        self.start()

    def collect(self) -> Page:
        self.collected = self.collector.collect()
        return Page(self.collected)


@contextmanager
def nobody() -> Iterator[None]:
    """Be a user without rights, for what only root may read."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def total(collected: Collected, name: str) -> float:
    """The sum over all series of a family."""
    return sum(sample.value for metric in collected for sample in metric.samples if sample.name == name)
