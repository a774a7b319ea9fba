"""Simulated machines: RAPL registers in a tree of /sys/class/powercap, an energy ledger, and their clocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from ledger_support import Clock, Page, SimulatedSidecar

from exporter.collectors.energy.rapl import RaplCollector
from exporter.collectors.job import EnergyReading, GpuProcessUse, MachineUse, RunUse
from exporter.ledger.energy.collector import EnergyCollector
from exporter.ledger.energy.node_lock import NodeLock
from exporter.ledger.energy.sources import Sources
from exporter.ledger.energy.work import WorkSnapshot
from exporter.ledger.families.run_info import Gpus
from exporter.ledger.state.store import StateStore

RANGE_JOULES = 262_143.328_850
"""Register range of most server CPUs, in joules."""

Zones = dict[str, tuple[str, float]]
"""Name of a RAPL zone and range of its register in joules, by the name of the zone's directory."""

XEON: Zones = {
    "intel-rapl:0": ("package-0", RANGE_JOULES),
    "intel-rapl:0:0": ("dram", 65_712.999613),
    "intel-rapl:1": ("package-1", RANGE_JOULES),
    "intel-rapl:1:0": ("dram", 65_712.999613),
}
LAPTOP: Zones = {
    "intel-rapl:0": ("package-0", RANGE_JOULES),
    "intel-rapl:0:0": ("core", RANGE_JOULES),
    "intel-rapl:0:1": ("uncore", RANGE_JOULES),
    "intel-rapl:1": ("psys", RANGE_JOULES),
    "intel-rapl-mmio:0": ("package-0", RANGE_JOULES),
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
    """Simulated machine with RAPL zones.

    Attributes:
        zones: RAPL zones by directory name.
        busy_seconds: CPU time of the machine since boot.
        joules: Energy of each zone without the wrap-around of its register, by directory name.
    """

    root: Path
    zones: Zones = field(default_factory=lambda: dict(XEON))
    monotonic_seconds: float = 5000.0
    busy_seconds: float = 0.0
    boot: str = "boot-1"
    joules: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for position, key in enumerate(self.zones):
            self.joules.setdefault(key, 1000.0 * (position + 1))
        for key, (name, range_joules) in self.zones.items():
            directory = self.root / "sys/class/powercap" / key
            directory.mkdir(parents=True)
            (directory / "name").write_text(f"{name}\n")
            (directory / "max_energy_range_uj").write_text(f"{round(range_joules * 1e6)}\n")
        (self.root / "proc/sys/kernel/random").mkdir(parents=True)
        self.write()

    def register(self, key: str) -> Path:
        """Return the file of a zone's energy register."""
        return self.root / "sys/class/powercap" / key / "energy_uj"

    def write(self) -> None:
        """Write the registers, the CPU time and the clocks to the tree."""
        for key, joules in self.joules.items():
            microjoules = round(joules % self.zones[key][1] * 1e6)
            self.register(key).write_text(f"{microjoules}\n")
        (self.root / "proc/sys/kernel/random/boot_id").write_text(f"{self.boot}\n")
        ticks = round(self.busy_seconds * 100)
        (self.root / "proc/stat").write_text(
            f"cpu  {ticks} 0 0 900 90 0 0 0 0 0\ncpu0 {ticks} 0 0 9 9 0 0 0 0 0\ncpu1 0 0 0 9 9 0 0 0 0 0\n"
            "btime 1600000000\n"
        )
        (self.root / "proc/uptime").write_text(f"{self.monotonic_seconds:.2f} 1.00\n")

    def draw(self, seconds: float, watts: float) -> None:
        """Advance the clock, and increase every register at the same power."""
        self.monotonic_seconds += seconds
        for key in self.joules:
            self.joules[key] += watts * seconds
        self.write()

    def collector(self, **options: Any) -> RaplCollector:
        psutil.PROCFS_PATH, previous_path = str(self.root / "proc"), psutil.PROCFS_PATH
        try:
            return RaplCollector(sys=self.root / "sys", monotonic=lambda: self.monotonic_seconds, **options)
        finally:
            psutil.PROCFS_PATH = previous_path


class EnergyNode:
    """Machine with its energy ledger; `restart` simulates SIGKILL and a new start.

    By default, a process of a single run holds the only GPU; subclasses override the sources.
    """

    run = "r"

    def __init__(
        self, directory: Path, *, clock: Clock | None = None, state: StateStore | None = None, **options: Any
    ) -> None:
        self.directory, self.clock, self.options = directory, clock or Clock(), options
        self.boot = "boot"
        self.start(state)

    def readings(self) -> Sequence[EnergyReading]:
        return ()

    def use(self) -> MachineUse | None:
        run = RunUse(self.run, frozenset({7}), 0.0, 1, 0)
        return MachineUse(self.clock.monotonic, (run,), None, 1, None)

    def gpu_use(self) -> Sequence[GpuProcessUse]:
        return (GpuProcessUse(7, "0", "GPU-a"),)

    def alive(self) -> set[str]:
        return {self.run}

    def work(self) -> WorkSnapshot:
        return WorkSnapshot()

    def power(self, _later_than: Mapping[str, float]) -> Mapping[str, Sequence[tuple[float, float]]]:
        return {}

    def sources(self) -> Sources:
        return Sources(self.readings, self.use, self.gpu_use, self.alive, self.work, self.power)

    def start(self, state: StateStore | None = None) -> None:
        self.lock = NodeLock(self.directory, self.boot)
        self.state = state or StateStore(self.directory, sidecar="here")
        self.collector = EnergyCollector(
            self.sources(),
            self.state,
            self.lock,
            boot=self.boot,
            clock=lambda: self.clock.wall,
            monotonic=lambda: self.clock.monotonic,
            **self.options,
        )

    def restart(self) -> None:
        self.lock.release()
        self.state.close()
        self.start()

    def collect(self) -> Page:
        self.last_collected = self.collector.collect()
        return Page(self.last_collected)


class SidecarNode(EnergyNode):
    """Machine whose job is observed by a complete sidecar."""

    def __init__(self, directory: Path) -> None:
        self.sidecar = SimulatedSidecar(directory)
        self.sidecar.collector.gpus = Gpus(use=self.gpu_use, readings=self.readings)
        super().__init__(directory, clock=self.sidecar.clock, state=self.sidecar.state)

    def work(self) -> WorkSnapshot:
        return self.sidecar.collector.work


def gpu_reading(joules: float | None, read_at: float, watts: float | None = None) -> EnergyReading:
    """Return a reading of the energy counter of the GPU `GPU-a`."""
    return EnergyReading(
        component="gpu",
        device="GPU-a",
        source="nvml_counter",
        is_measured=True,
        joules=joules,
        watts=watts,
        time=read_at,
        register_joules=joules,
    )


def energy_of(page: Page) -> float:
    """Return the energy that was attributed to runs."""
    return sum(page.all("training_energy_joules_total").values())
