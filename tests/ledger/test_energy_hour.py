"""An hour of a simulated load, end to end: from registers that wrap to the joules of the run.

The GPUs are replayed by the real NVML child on a clock that does not wait, the CPUs' registers are files that wrap
like real ones. In between, everything happens that happens to a sidecar in an hour: it is killed and started again,
nobody looks for a while, registers cannot be read, a card falls off the bus, a driver is loaded anew.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from energy_support import EPYC, EnergyNode, Machine
from gpu_support import machine as described
from gpu_support import replay
from ledger_support import START

from exporter.collectors.gpu.state import GpuRegistry
from exporter.collectors.job import EnergyReading
from exporter.ledger.energy.tariffs import EnergyOptions
from exporter.ledger.store import StateStore

PASS_SECONDS = 10.0
BEGIN = 5000.0

GPUS = """
models:
  card:
    name: Card
    architecture: hopper
    load: {steps: [{seconds: 50s, level: 1.0}, {seconds: 10s, level: 0.2}]}
    values:
      utilization: {idle: 0, busy: 100}
      power: {idle: 70000, busy: 690000}
      energy: {idle: 70000, busy: 690000, counter_from: 4294000000, bits: 32}
gpus: [{model: card, count: 4}]
timeline:
  - {at: 20m, until: 21m30s, gpus: [1], lost: true}
  - {at: 35m, until: 35m20s, gpus: [2], errors: {nvmlDeviceGetTotalEnergyConsumption: UNKNOWN}}
  - {at: 40m, gpus: [3], set: {energy: {idle: 70000, busy: 690000, counter_from: 0}}}
  - {at: 50m, until: 50m5s, gpus: [0], set: {energy: 17}}
"""


def gpu_joules(seconds: float) -> float:
    """What one of the GPUs has drawn by then: 690 W for 50 s, 194 W for 10 s, again and again."""
    minutes, rest = divmod(seconds, 60.0)
    return minutes * 36_440.0 + min(rest, 50.0) * 690.0 + max(0.0, rest - 50.0) * 194.0


def integral_of(gpu: dict[str, Any]) -> float:
    """What the child has added up of the power of a GPU."""
    return float(gpu.get("values", {}).get("power_joules") or 0.0)


class Node(EnergyNode):
    """A machine with the sidecar's parts that count energy."""

    def __init__(self, directory: Path, machine: Machine) -> None:
        self.machine = machine
        self.gpu_resets: Counter[str] = Counter()
        self.cpu_wraps = 0.0
        super().__init__(directory, options=EnergyOptions(whole_machine=True))

    def start(self, state: StateStore | None = None) -> None:
        super().start(state)
        self.rapl = self.machine.collector()
        self.registry = GpuRegistry(monotonic=lambda: self.machine.now)
        self.page = self.state.page("gpu")
        self.registry.restore(self.page.load() or {}, self.wall)

    def restart(self) -> None:
        self.gpu_resets.update(self.registry.resets())
        self.cpu_wraps += self.wraps()
        super().restart()

    def wraps(self) -> float:
        return sum(reading.resets["wrap"] for reading in self.rapl.readings)

    @property
    def wall(self) -> float:
        return START + self.machine.now - BEGIN

    def readings(self) -> list[EnergyReading]:
        return [*self.rapl.readings, *self.registry.energies()]

    def joules(self) -> dict[str, float]:
        """One pass of everything; gives the joules of the run by component."""
        self.clock.wall, self.clock.monotonic = self.wall, self.machine.now
        self.rapl.collect()
        self.page.save(self.registry.rows(self.wall))
        found: Counter[str] = Counter()
        for labels, joules in self.collect().all("training_energy_joules_total").items():
            found[dict(labels)["component"]] += joules  # type: ignore[assignment]  # joules, not a number of things
        return dict(found)


@pytest.mark.timeout(60)
def test_an_hour_of_wraps_gaps_and_restarts_stays_within_a_quarter_of_a_percent(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "machine", {**EPYC, "intel-rapl:0:0": ("dram", 65_712.999613)}, now=BEGIN)
    node = Node(tmp_path, machine)
    restarts = gaps = 0
    drawn_before: dict[str, float] = {}
    child_began = dict.fromkeys(range(4), 0.0)
    for number, message in enumerate(replay(described(GPUS), 3600.0, period=PASS_SECONDS).samples):
        if number:
            machine.draw(PASS_SECONDS, 350.0 + 200.0 * math.sin(machine.now / 60.0))
        if number % 48 in range(25, 30):  # the machine stands still: nobody looks for 50 s
            gaps += number % 48 == 25
            continue
        if number % 41 in range(20, 23):  # killed, and started anew after half a minute
            continue
        if number % 41 == 23:
            restarts += 1
            node.restart()
            child_began = {
                gpu["index"]: integral_of(gpu) or child_began[gpu["index"]] for gpu in message["gpus"]
            }
        for gpu in message["gpus"]:
            if integral_of(gpu):  # what the new child has added up begins with it
                gpu["values"]["power_joules"] = max(0.0, integral_of(gpu) - child_began[gpu["index"]])
        if number % 31 == 10:  # the registers cannot be read for once
            for key in EPYC:
                machine.register(key).write_text("N/A\n")
        node.registry.take_sample({**message, "time": BEGIN + message["time"]}, child=1 + restarts)
        counted = node.joules()
        drawn = {
            "cpu": sum(joules for key, joules in machine.joules.items() if key in EPYC),
            "dram": machine.joules["intel-rapl:0:0"],
            "gpu": 4 * gpu_joules(message["time"]),
        }
        if number == 1:
            counted_before, drawn_before = counted, drawn
    node.gpu_resets.update(node.registry.resets())

    assert (restarts, gaps) == (8, 7)
    assert node.cpu_wraps + node.wraps() > 20  # those while no sidecar ran are the ledger's
    assert node.gpu_resets["wrap"] == 4
    assert node.gpu_resets["reset"] == 1
    for component, joules in drawn.items():
        found = counted[component] - counted_before[component]
        assert found == pytest.approx(joules - drawn_before[component], rel=0.0025), component
