"""The host collectors on recorded machines: expected expositions, and the rules behind single numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from collectors_support import MACHINES, OF_TREE, UPDATE, assert_sound, build, copy_of, text_of, value_of

from exporter.collectors.cgroup_tree import CgroupTree
from exporter.collectors.cpu import CpuCollector
from exporter.collectors.cpu_count import CpuCountCollector, cgroup_quota
from exporter.collectors.cpu_frequency import CpuFrequencyCollector
from exporter.collectors.cpu_throttles import CpuThrottlesCollector
from exporter.collectors.memory import MemoryCollector
from exporter.collectors.pressure import PressureCollector
from exporter.collectors.sensors import SensorsCollector
from exporter.collectors.vm import VmCollector

CPU = "host_cpu_seconds_total"


@pytest.mark.parametrize("machine", ["virtual", "node", "old"])
def test_a_recorded_machine_gives_the_expected_exposition(machine: str) -> None:
    text = ""
    for entry in OF_TREE:
        collector = build(entry, MACHINES / machine)
        collected = collector.collect()
        assert_sound(collector, collected)
        assert collected.problems == ()
        text += text_of(family for family in collected.families if family.spec.name != "exporter_build_info")
        text += "".join(
            f"# unsupported: {what.replace(str(MACHINES / machine), '')}\n" for what in collected.unsupported
        )

    golden = MACHINES / f"{machine}.metrics"
    if UPDATE:
        golden.write_text(text)
    assert text == golden.read_text()


def write_cpu(root: Path, **columns: int) -> None:
    order = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest", "guest_nice")
    words = " ".join(str(columns.get(mode, 0)) for mode in order)
    rest = "intr 1\nctxt 1\nbtime 1\nprocesses 1\nprocs_running 1\nprocs_blocked 0"
    (root / "stat").write_text(f"cpu  {words}\ncpu0 {words}\n{rest}\n")


def test_guest_time_is_counted_once(tmp_path: Path) -> None:
    write_cpu(tmp_path, user=1000, guest=300, nice=50, guest_nice=20, idle=5)

    collected = CpuCollector(proc=tmp_path, ticks_per_second=100).collect()

    assert value_of(collected, CPU, "", "user") == 7.0
    assert value_of(collected, CPU, "", "guest") == 3.0
    assert value_of(collected, CPU, "", "nice") == 0.3


def test_utilization_is_that_of_the_last_interval(tmp_path: Path) -> None:
    collector = CpuCollector(proc=tmp_path, ticks_per_second=100)
    write_cpu(tmp_path, user=9000, idle=1000)
    first = collector.collect()
    write_cpu(tmp_path, user=9025, idle=1065, iowait=10)
    second = collector.collect()

    assert value_of(first, "host_cpu_utilization_ratio") is None
    assert value_of(second, "host_cpu_utilization_ratio") == pytest.approx(0.25)


def test_cpu_time_that_the_kernel_takes_back_stays(tmp_path: Path) -> None:
    collector = CpuCollector(proc=tmp_path, ticks_per_second=100)
    write_cpu(tmp_path, user=100, idle=1000, iowait=500)
    collector.collect()
    write_cpu(tmp_path, user=150, idle=1001, iowait=490)
    collected = collector.collect()

    assert value_of(collected, CPU, "", "iowait") == 5.0
    assert value_of(collected, CPU, "", "user") == 1.5


def test_a_cpu_that_was_plugged_in_anew_begins_anew(tmp_path: Path) -> None:
    collector = CpuCollector(proc=tmp_path, per_core=True, ticks_per_second=100)
    write_cpu(tmp_path, user=10_000, idle=90_000)
    collector.collect()
    write_cpu(tmp_path, user=5, idle=10)
    collected = collector.collect()

    assert value_of(collected, CPU, "0", "user") == 0.05
    assert value_of(collected, "host_cpu_utilization_ratio") is None


def test_per_core_replaces_the_sum_over_the_cpus() -> None:
    collected = CpuCollector(proc=MACHINES / "node/proc", per_core=True, ticks_per_second=100).collect()

    assert value_of(collected, CPU, "", "idle") is None
    assert value_of(collected, CPU, "6", "idle") == 73192.23
    assert value_of(collected, CPU, "7", "idle") is None


def test_frequency_is_the_mean_or_that_of_each_cpu_which_knows_its_own() -> None:
    root = MACHINES / "node"
    mean = CpuFrequencyCollector(proc=root / "proc", sys=root / "sys").collect()
    each = CpuFrequencyCollector(proc=root / "proc", sys=root / "sys", per_core=True).collect()

    assert value_of(mean, "host_cpu_frequency_hertz", "") == pytest.approx(2.25e9)
    assert value_of(each, "host_cpu_frequency_hertz", "5") == 2.5e9
    assert value_of(each, "host_cpu_frequency_hertz", "6") is None


def test_throttles_of_a_cpu_that_went_offline_stay_in_the_sum(tmp_path: Path) -> None:
    root = copy_of("node", tmp_path)
    collector = CpuThrottlesCollector(sys=root / "sys")
    before = collector.collect()
    (root / "sys/devices/system/cpu/cpu3/thermal_throttle/core_throttle_count").unlink()
    after = collector.collect()

    assert value_of(before, "host_cpu_throttles_total", "core") == 100
    assert value_of(before, "host_cpu_throttles_total", "package") == 201
    assert value_of(after, "host_cpu_throttles_total", "core") == 100


@pytest.mark.parametrize(
    ("machine", "quota"),
    [("node", 4.0), ("container", 8.0), ("old", 2.5), ("separate", 1.5), ("virtual", None)],
)
def test_the_quota_is_the_tightest_limit_of_the_cgroup(machine: str, quota: float | None) -> None:
    root = MACHINES / machine

    assert cgroup_quota(CgroupTree(proc=root / "proc", sys=root / "sys")) == quota


def test_cores_are_counted_again_when_cpus_come_or_go(tmp_path: Path) -> None:
    root = copy_of("node", tmp_path)
    collector = CpuCountCollector(proc=root / "proc", sys=root / "sys", affinity=lambda: None)
    before = collector.collect()
    cpus = root / "sys/devices/system/cpu"
    (cpus / "online").write_text("0-2,4-6\n")
    (cpus / "cpu3/topology/core_cpus_list").unlink()
    after = collector.collect()

    assert value_of(before, "host_cpus", "physical") == 4
    assert value_of(before, "host_cpus", "affinity") is None
    assert value_of(after, "host_cpus", "online") == 6
    assert value_of(after, "host_cpus", "physical") == 3


def test_memory_without_an_estimate_has_no_used_either() -> None:
    collected = MemoryCollector(proc=MACHINES / "old/proc").collect()

    assert value_of(collected, "host_memory_free_bytes") == 9912345 * 1024
    assert value_of(collected, "host_memory_available_bytes") is None
    assert value_of(collected, "host_memory_used_bytes") is None


def test_reclaim_adds_up_causes_and_zones_and_nothing_twice() -> None:
    node = VmCollector(proc=MACHINES / "node/proc").collect()
    old = VmCollector(proc=MACHINES / "old/proc").collect()

    assert value_of(node, "host_vm_pages_scanned_total") == 5_060_708
    assert value_of(old, "host_vm_pages_scanned_total") == 720
    assert value_of(old, "host_vm_pages_stolen_total") == 386


def test_minor_faults_never_fall(tmp_path: Path) -> None:
    collector = VmCollector(proc=tmp_path)
    (tmp_path / "vmstat").write_text("pgfault 1000\npgmajfault 10\n")
    collector.collect()
    (tmp_path / "vmstat").write_text("pgfault 1000\npgmajfault 11\n")
    collected = collector.collect()

    assert value_of(collected, "host_vm_page_faults_total", "minor") == 990
    assert value_of(collected, "host_vm_page_faults_total", "major") == 11


def test_a_kernel_without_pressure_is_a_normal_state() -> None:
    collected = PressureCollector(proc=MACHINES / "old/proc").collect()

    assert collected.families == ()
    assert collected.problems == ()
    assert len(collected.unsupported) == 1


def test_sensors_of_one_label_stay_apart() -> None:
    collected = SensorsCollector(sys=MACHINES / "node/sys").collect()

    assert value_of(collected, "host_temperature_celsius", "nct6798-nct6775.656", "AUXTIN temp1") == 22
    assert value_of(collected, "host_temperature_celsius", "nct6798-nct6775.656", "AUXTIN temp2") == -62
    assert value_of(collected, "host_temperature_celsius", "nct6798-nct6775.656", "temp3") == 31.5


def test_a_temperature_below_absolute_zero_is_no_reading() -> None:
    collected = SensorsCollector(sys=MACHINES / "node/sys").collect()

    assert value_of(collected, "host_temperature_celsius", "nvme0", "Composite") == 41.85
    assert value_of(collected, "host_temperature_celsius", "nvme0", "Sensor 1") is None


def test_core_thermometers_need_per_core() -> None:
    few = SensorsCollector(sys=MACHINES / "node/sys").collect()
    all_of_them = SensorsCollector(sys=MACHINES / "node/sys", per_core=True).collect()

    assert value_of(few, "host_temperature_celsius", "coretemp.1", "Core 0") is None
    assert value_of(all_of_them, "host_temperature_celsius", "coretemp.1", "Core 0") == 58
