"""CPU and memory energy: registers that wrap, fall, jump, are mirrored, forbidden or damaged, and power meters."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from collectors_support import assert_golden, assert_sound, text_of, value_of
from energy_support import MACHINES, RANGE_JOULES, Machine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import DATA
from users_support import without_privileges

from exporter.collectors.energy.counter import EnergyCounter, RegisterReading, joules_between
from exporter.collectors.energy.rapl import RaplCollector

CPU_JOULES = "host_cpu_energy_joules_total"
CPU_WATTS = "host_cpu_power_watts"
IDLE_WATTS = "host_cpu_power_idle_watts"


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_has_the_expected_exposition(name: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path, dict(MACHINES[name]))
    if name == "threadripper":
        # Both dies report the register of the package.
        machine.joules["intel-rapl:1"] = machine.joules["intel-rapl:0"]
        machine.write()
    collector = machine.collector(is_working=lambda: False)
    initial = collector.collect()
    for _ in range(12):
        machine.draw(5.0, 120.0)
        collected = collector.collect()

    assert_sound(collector, collected)
    assert initial.problems == collected.problems == []
    initial_joules = [
        sample.value for metric in initial for sample in metric.samples if "_joules" in sample.name
    ]
    assert set(initial_joules) == {0}
    exposition = text_of(collected) + "".join(
        f"# unsupported: {source}\n" for source in collected.unsupported
    )
    assert_golden(exposition, DATA / "energy" / f"{name}.metrics")


@pytest.mark.parametrize(
    ("register", "reason"), [(5.0, "reset"), (50_000.0, "backwards"), (200_000.0, "jump")]
)
def test_an_implausible_register_is_bridged_with_the_last_power(register: float, reason: str) -> None:
    counter = EnergyCounter(range_joules=RANGE_JOULES, max_watts=2000.0)
    counter.update(100_000.0, 10.0)
    counter.update(100_500.0, 15.0)
    counter.update(register, 20.0)
    counter.update(register + 400.0, 25.0)

    assert counter.joules == 500.0 + 500.0 + 400.0
    assert {name: count for name, count in counter.corrections.items() if count} == {reason: 1}


def test_several_wraps_between_two_readings_are_found_by_the_last_power() -> None:
    counter = EnergyCounter(range_joules=65_532.0, max_watts=2000.0)
    counter.update(0.0, 0.0)
    counter.update(2_500.0, 5.0)
    counter.update((2_500.0 + 500.0 * 300) % 65_532.0, 305.0)

    assert counter.joules == 2_500.0 + 500.0 * 300
    assert counter.corrections["wrap"] == 2


def test_assumed_wraps_do_not_exceed_the_maximum_power() -> None:
    counter = EnergyCounter(range_joules=1000.0, max_watts=2000.0)
    counter.update(0.0, 0.0)
    counter.update(950.0, 0.5)  # 1,900 W
    counter.update(50.0, 1.5)

    # 2,100 J, the energy nearest to 1,900 W, are impossible in a second.
    assert counter.joules == 950.0 + 1100.0


def test_an_increase_above_the_maximum_power_by_the_resolution_of_the_register_is_plausible() -> None:
    counter = EnergyCounter(max_watts=2000.0)
    counter.update(0.0, 0.0)
    counter.update(2000.5, 1.0)

    assert counter.joules == 2000.5
    assert set(counter.corrections.values()) == {0}


@pytest.mark.parametrize("read_at", [2000.0, 3.0])
def test_after_a_long_gap_or_a_reboot_no_energy_is_estimated(read_at: float) -> None:
    counter = EnergyCounter(range_joules=RANGE_JOULES, max_watts=2000.0)
    counter.update(1000.0, 5.0)
    counter.update(1500.0, 10.0)

    assert counter.update(9000.0, read_at) is None
    assert counter.joules == 500.0


def test_energy_between_two_sidecars_is_the_difference_of_the_registers() -> None:
    earlier, later = RegisterReading(100.0, 10.0, watts=100.0), RegisterReading(6100.0, 70.0)
    before_wrap = RegisterReading(RANGE_JOULES - 500.0, 10.0)
    after_wrap = RegisterReading(500.0, 70.0)

    assert joules_between(earlier, later, range_joules=RANGE_JOULES) == 6000.0
    assert joules_between(before_wrap, after_wrap, range_joules=RANGE_JOULES) == 1000.0
    assert joules_between(earlier, RegisterReading(6100.0, 2000.0), range_joules=RANGE_JOULES) is None
    assert joules_between(earlier, RegisterReading(5.0, 70.0), range_joules=0.0) is None


def test_registers_that_only_root_may_read_are_absent_with_the_remedy(tmp_path: Path) -> None:
    for directory in (tmp_path, *tmp_path.parents):
        if "pytest-of-" in str(directory):
            directory.chmod(0o755)
    machine = Machine(tmp_path / "machine")
    for key in machine.zones:
        machine.register(key).chmod(0o400)
    collector = machine.collector()
    with without_privileges():
        collected = collector.collect()
        machine.monotonic_seconds += 5.0
        assert not collector.collect()

    assert {reason for reason, _ in collected.problems} == {"permission"}
    assert any("chmod a+r" in message for _, message in collected.problems)
    assert [reading.joules for reading in collector.readings] == [None] * 4
    assert collector.readings[0].gap_seconds["permission"] == 5.0


def test_the_time_of_failed_readings_is_counted_once_if_the_energy_is_lost(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    collector = machine.collector()
    collector.collect()
    register = machine.register(next(iter(machine.zones)))
    content = register.read_text()
    register.write_text("N/A")
    for _ in range(130):  # 650 s, more than `MAX_INTERVAL_SECONDS`
        machine.monotonic_seconds += 5.0
        collector.collect()
    register.write_text(content)
    machine.monotonic_seconds += 5.0
    collector.collect()

    assert collector.readings[0].gap_seconds == {"permission": 0.0, "error": 650.0, "lost": 5.0}


@pytest.mark.parametrize("content", ["", "N/A\n", "1e9\n", "\x00\xff"])
@pytest.mark.parametrize("name", ["energy_uj", "max_energy_range_uj", "name"])
def test_garbage_affects_only_its_zone(name: str, content: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    (tmp_path / "sys/class/powercap/intel-rapl:0" / name).write_text(content, encoding="latin-1")
    collector = machine.collector()
    collector.collect()
    machine.monotonic_seconds += 5.0
    collected = collector.collect()

    assert_sound(collector, collected)
    assert value_of(collected, CPU_JOULES, "1", "rapl") == 0.0
    assert value_of(collected, CPU_JOULES, "0", "rapl") is None
    assert {reason for reason, _ in collected.problems} <= {"malformed"}


def test_an_exporter_without_the_energy_lock_publishes_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    holds_lock = [True]
    collector = machine.collector(counts_energy=lambda: holds_lock[0])
    collector.collect()
    machine.draw(5.0, 100.0)
    holds_lock[0] = False
    without_lock = collector.collect()
    machine.draw(5.0, 100.0)
    holds_lock[0] = True
    with_lock_again = collector.collect()
    machine.draw(5.0, 100.0)

    assert list(without_lock) == []
    assert "another exporter" in without_lock.unsupported[0]
    assert value_of(with_lock_again, CPU_JOULES, "0", "rapl") == 0.0
    assert value_of(collector.collect(), CPU_JOULES, "0", "rapl") == pytest.approx(500.0)


def test_a_machine_without_registers_is_not_a_problem(tmp_path: Path) -> None:
    masked_sys = tmp_path / "masked"  # a link without a target, as a container runtime masks the files
    (masked_sys / "class/powercap").mkdir(parents=True)
    (masked_sys / "class/powercap/intel-rapl:0").symlink_to("../../devices/virtual/powercap/intel-rapl:0")
    collected = RaplCollector(sys=tmp_path).collect()

    assert list(collected) == []
    assert collected.problems == []
    assert f"no energy registers in {tmp_path}/class/powercap" in collected.unsupported[0]
    assert "masks" in RaplCollector(sys=masked_sys).collect().unsupported[0]


def test_idle_power_has_a_label_for_its_method(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    is_working = [False]
    collector = machine.collector(is_working=lambda: is_working[0], idle_watts=55.0)
    collector.collect()
    for watts in (90.0, *[60.0] * 9, 50.0):
        machine.draw(5.0, watts)
        collected_before_work = collector.collect()
    is_working[0] = True
    for watts in (40.0, 40.0, 100.0, 100.0):
        machine.draw(5.0, watts)
        collected = collector.collect()

    # 50 W is not idle after at most 90 W.
    assert value_of(collected_before_work, IDLE_WATTS, "0", "min_seen") is None
    assert value_of(collected, IDLE_WATTS, "0", "config") == 55.0
    assert value_of(collected, IDLE_WATTS, "0", "before_start") == pytest.approx(60.0)
    assert value_of(collected, IDLE_WATTS, "0", "min_seen") == pytest.approx(40.0)
    assert collector.readings[0].idle_watts == 55.0


def test_modeled_energy_is_published_only_on_request_and_is_labeled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path / "none", {})
    monkeypatch.setattr(psutil, "cpu_percent", lambda: 50.0)
    collector = machine.collector(tdp_watts=200.0)
    collector.collect()
    machine.draw(10.0, 0.0)
    collected = collector.collect()
    measuring_collector = Machine(tmp_path / "xeon").collector(tdp_watts=200.0)

    assert value_of(collected, CPU_JOULES, "all", "tdp_model") == pytest.approx(
        10.0 * 200.0 * (0.1 + 0.9 * 0.125)
    )
    assert [(reading.source, reading.is_measured) for reading in collector.readings] == [("tdp_model", False)]
    assert value_of(measuring_collector.collect(), CPU_JOULES, "all", "tdp_model") is None


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from(["draw", "reset", "garbage", "sleep", "missing"]), st.floats(0, 900)),
        max_size=15,
    )
)
def test_published_totals_never_decrease(tmp_path: Path, events: list[tuple[str, float]]) -> None:
    machine = Machine(tmp_path / f"example-{len(list(tmp_path.iterdir()))}")
    collector = machine.collector()
    previous_totals: dict[tuple[str, ...], float] = {}
    for event, amount in events:
        machine.draw(5.0 + (amount if event == "sleep" else 0.0), amount)
        if event == "reset":
            machine.joules["intel-rapl:0"] = amount
            machine.write()
        elif event == "garbage":
            machine.register("intel-rapl:1").write_text("?\n")
        elif event == "missing":
            machine.register("intel-rapl:0:0").unlink()
        collected = collector.collect()
        assert_sound(collector, collected)
        for metric in collected:
            for sample in metric.samples:
                key = (sample.name, *sample.labels.values())
                if metric.type == "counter":
                    assert sample.value >= previous_totals.get(key, 0.0)
                    previous_totals[key] = sample.value


# Sockets with power meters only: a described Grace with ACPI power meters ---------------------------------

METERS = ("Module Power Socket 0", "Grace Power Socket 0", "CPU Power Socket 0", "SysIO Power Socket 0")
METER_WATTS = dict(zip(METERS, (320.0, 200.0, 150.0, 50.0), strict=True))


@dataclass
class Grace:
    """Machine with one Grace socket and ACPI power meters."""

    root: Path
    directory: str = "device"
    watts: dict[str, float] = field(default_factory=lambda: dict(METER_WATTS))

    def __post_init__(self) -> None:
        self.machine = Machine(self.root / "machine", {})
        self.draw(0.0)

    def meter(self, name: str) -> Path:
        hwmon = self.machine.root / f"sys/class/hwmon/hwmon{METERS.index(name)}"
        return hwmon / self.directory if self.directory else hwmon

    def draw(self, seconds: float) -> None:
        self.machine.monotonic_seconds += seconds
        for name, watts in self.watts.items():
            self.meter(name).mkdir(parents=True, exist_ok=True)
            (self.meter(name) / "power1_oem_info").write_text(f"{name}\n")
            (self.meter(name) / "power1_average").write_text(f"{round(watts * 1e6)}\n")


@pytest.mark.parametrize("directory", ["device", ""])
def test_power_over_time_is_the_energy_of_cores_chip_and_module(tmp_path: Path, directory: str) -> None:
    grace = Grace(tmp_path, directory)
    collector = grace.machine.collector()
    collector.collect()
    grace.draw(5.0)
    grace.watts["CPU Power Socket 0"] = 250.0
    collector.collect()
    grace.draw(5.0)
    collected = collector.collect()

    assert value_of(collected, CPU_JOULES, "0", "hwmon") == pytest.approx(5 * 150 + 5 * 200)
    assert value_of(collected, CPU_WATTS, "0", "hwmon") == 250.0
    # The energy of a meter inside another meter is not counted twice.
    joules_by_device = {(reading.component, reading.device): reading.joules for reading in collector.readings}
    assert joules_by_device == {("cpu", "package0"): 1750.0, ("soc", "socket0"): 500.0}


@pytest.mark.parametrize("garbage", ["", "N/A", "-5", "5000000000"])
def test_a_meter_with_implausible_values_affects_only_itself(tmp_path: Path, garbage: str) -> None:
    grace = Grace(tmp_path)
    collector = grace.machine.collector()
    collector.collect()
    grace.draw(5.0)
    (grace.meter("CPU Power Socket 0") / "power1_average").write_text(garbage)
    collected_with_garbage = collector.collect()
    joules_by_component = {reading.component: reading.joules for reading in collector.readings}
    grace.draw(5.0)
    collected_after_repair = collector.collect()

    assert [reason for reason, _ in collected_with_garbage.problems] == ["malformed"]
    assert joules_by_component == {"cpu": None, "soc": pytest.approx(250.0)}
    # 10 s at 150 W, bridged.
    assert value_of(collected_after_repair, CPU_JOULES, "0", "hwmon") == pytest.approx(1500.0)
    assert {reading.component: reading.gap_seconds["error"] for reading in collector.readings} == {
        "cpu": 5.0,
        "soc": 0.0,
    }
