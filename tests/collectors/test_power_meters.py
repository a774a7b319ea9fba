"""Sockets that tell their power only: a described Grace, its ACPI power meters turned by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from collectors_support import value_of
from energy_support import Machine

from exporter.ledger.store import StateStore

CPU = "host_cpu_energy_joules_total"
METERS = ("Module Power Socket 0", "Grace Power Socket 0", "CPU Power Socket 0", "SysIO Power Socket 0")
WATTS = dict(zip(METERS, (320.0, 200.0, 150.0, 50.0), strict=True))


@dataclass
class Grace:
    """A machine of one socket."""

    root: Path
    within: str = "device"
    watts: dict[str, float] = field(default_factory=lambda: dict(WATTS))

    def __post_init__(self) -> None:
        self.machine = Machine(self.root / "machine", {})
        self.draw(0.0)

    def meter(self, name: str) -> Path:
        hwmon = self.machine.root / f"sys/class/hwmon/hwmon{METERS.index(name)}"
        return hwmon / self.within if self.within else hwmon

    def draw(self, seconds: float) -> None:
        self.machine.now += seconds
        for name, watts in self.watts.items():
            self.meter(name).mkdir(parents=True, exist_ok=True)
            (self.meter(name) / "power1_oem_info").write_text(f"{name}\n")
            (self.meter(name) / "power1_average").write_text(f"{round(watts * 1e6)}\n")


def kept(directory: Path) -> StateStore:
    directory.mkdir(exist_ok=True)
    return StateStore(directory)


@pytest.mark.parametrize("within", ["device", ""])
def test_power_over_time_is_the_energy_of_cores_chip_and_module(tmp_path: Path, within: str) -> None:
    grace = Grace(tmp_path, within)
    collector = grace.machine.collector()
    collector.collect()
    grace.draw(5.0)
    grace.watts["CPU Power Socket 0"] = 250.0
    collector.collect()
    grace.draw(5.0)
    collected = collector.collect()

    assert value_of(collected, CPU, "0", "hwmon") == pytest.approx(5 * 150 + 5 * 200)
    assert value_of(collected, "host_cpu_power_watts", "0", "hwmon") == 250.0
    found = {(each.component, each.device): each.joules for each in collector.readings}
    assert found == {("cpu", "package0"): 1750.0, ("soc", "socket0"): 500.0}  # without what overlaps


def test_a_model_does_not_stand_in_for_what_is_measured(tmp_path: Path) -> None:
    collector = Grace(tmp_path).machine.collector(tdp_watts=500.0)
    collector.collect()

    assert {each.source for each in collector.readings} == {"hwmon"}


def test_totals_go_on_after_a_restart_without_the_time_between(tmp_path: Path) -> None:
    grace = Grace(tmp_path)
    first = grace.machine.collector(kept(tmp_path / "state"))
    first.collect()
    grace.draw(10.0)
    first.collect()
    grace.draw(60.0)
    second = grace.machine.collector(kept(tmp_path / "state"))
    second.collect()
    grace.draw(10.0)

    assert value_of(second.collect(), CPU, "0", "hwmon") == pytest.approx(3000.0)


@pytest.mark.parametrize("garbage", ["", "N/A", "-5", "5000000000"])
def test_a_meter_that_shows_what_cannot_be_costs_itself(tmp_path: Path, garbage: str) -> None:
    grace = Grace(tmp_path)
    collector = grace.machine.collector()
    collector.collect()
    grace.draw(5.0)
    (grace.meter("CPU Power Socket 0") / "power1_average").write_text(garbage)
    broken = collector.collect()
    of_broken = {each.component: each.joules for each in collector.readings}
    grace.draw(5.0)
    mended = collector.collect()

    assert [reason for reason, _ in broken.problems] == ["malformed"]
    assert of_broken == {"cpu": None, "soc": pytest.approx(250.0)}
    assert value_of(mended, CPU, "0", "hwmon") == pytest.approx(1500.0)  # 10 s at 150 W, bridged
    assert {each.component: each.gap_seconds["error"] for each in collector.readings} == {
        "cpu": 5.0,
        "soc": 0.0,
    }
