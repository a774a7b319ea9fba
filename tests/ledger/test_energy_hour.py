"""Energy of a run over an hour of simulated load, end to end.

The registers of the CPUs are files that wrap like hardware. The sidecar is killed and restarted, skips passes, and temporarily
cannot read the registers.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
from energy_support import EPYC, EnergyNode, Machine
from ledger_support import START

from exporter.collectors.job import EnergyReading
from exporter.ledger.energy.options import EnergyOptions
from exporter.ledger.state.store import StateStore

PASS_SECONDS = 10.0
START_SECONDS = 5000.0
"""Time of the monotonic clock at the start."""


class Node(EnergyNode):
    """Simulated machine with the RAPL collector and the energy ledger."""

    def __init__(self, directory: Path, machine: Machine) -> None:
        self.machine = machine
        self.cpu_wraps = 0.0
        super().__init__(directory, options=EnergyOptions(whole_machine=True))

    def start(self, state: StateStore | None = None) -> None:
        super().start(state)
        self.rapl = self.machine.collector()

    def restart(self) -> None:
        self.cpu_wraps += self.wraps()
        super().restart()

    def wraps(self) -> float:
        """Return the wraps of all registers since the start of the sidecar."""
        return sum(reading.corrections["wrap"] for reading in self.rapl.readings)

    @property
    def wall(self) -> float:
        return START + self.machine.monotonic_seconds - START_SECONDS

    def readings(self) -> list[EnergyReading]:
        return list(self.rapl.readings)

    def joules(self) -> dict[str, float]:
        """Collect once from every collector, and return the joules of the run by component."""
        self.clock.wall, self.clock.monotonic = self.wall, self.machine.monotonic_seconds
        self.rapl.collect()
        joules_by_component: Counter[str] = Counter()
        for labels, joules in self.collect().all("training_energy_joules_total").items():
            joules_by_component[dict(labels)["component"]] += joules  # type: ignore[assignment]  # Counter is typed for integers
        return dict(joules_by_component)


@pytest.mark.timeout(60)
def test_the_energy_of_an_hour_with_wraps_gaps_and_restarts_is_within_a_quarter_percent(
    tmp_path: Path,
) -> None:
    machine = Machine(
        tmp_path / "machine",
        {**EPYC, "intel-rapl:0:0": ("dram", 65_712.999613)},
        monotonic_seconds=START_SECONDS,
    )
    node = Node(tmp_path, machine)
    restarts = suspensions = 0
    initial_drawn_joules: dict[str, float] = {}
    for pass_number in range(361):
        if pass_number:
            machine.draw(PASS_SECONDS, 350.0 + 200.0 * math.sin(machine.monotonic_seconds / 60.0))
        if pass_number % 48 in range(25, 30):  # the machine is suspended: no pass for 50 s
            suspensions += pass_number % 48 == 25
            continue
        if pass_number % 41 in range(20, 23):  # killed, and restarted after half a minute
            continue
        if pass_number % 41 == 23:
            restarts += 1
            node.restart()
        if pass_number % 31 == 10:  # the registers cannot be read in this pass
            for key in EPYC:
                machine.register(key).write_text("N/A\n")
        measured_joules = node.joules()
        true_joules = {
            "cpu": sum(joules for key, joules in machine.joules.items() if key in EPYC),
            "dram": machine.joules["intel-rapl:0:0"],
        }
        if pass_number == 1:
            initial_counted_joules, initial_drawn_joules = measured_joules, true_joules

    assert restarts == 8
    assert suspensions == 7
    assert node.cpu_wraps + node.wraps() > 20  # the ledger attributes energy drawn without a sidecar
    for component, joules in true_joules.items():
        counted_joules = measured_joules[component] - initial_counted_joules[component]
        assert counted_joules == pytest.approx(joules - initial_drawn_joules[component], rel=0.0025), (
            component
        )
