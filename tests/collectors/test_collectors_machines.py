"""The host collectors on recorded machines: expected expositions, and the rules behind single numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from collectors_support import (
    MACHINES,
    OF_TREE,
    UPDATE,
    assert_sound,
    build,
    read_from,
    text_of,
    value_of,
)

from exporter.collectors.host.cgroup import CgroupTree, cpu_quota
from exporter.collectors.host.cpu import CpuCollector
from exporter.collectors.host.memory import oom_kills

__all__ = ["read_from"]

CPU = "host_cpu_seconds_total"

ReadFrom = Callable[[Path], Path]


@pytest.mark.parametrize("machine", ["virtual", "node", "old"])
def test_a_recorded_machine_gives_the_expected_exposition(machine: str, read_from: ReadFrom) -> None:
    root = read_from(MACHINES / machine)
    text = ""
    for entry in OF_TREE:
        collector = build(entry, root)
        collected = collector.collect()
        assert_sound(collector, collected)
        assert collected.problems == []
        text += text_of(collected)
        text += "".join(f"# unsupported: {what.replace(str(root), '')}\n" for what in collected.unsupported)

    golden = MACHINES / f"{machine}.metrics"
    if UPDATE:
        golden.write_text(text)
    assert text == golden.read_text()


def write_cpu(proc: Path, **columns: int) -> None:
    order = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest", "guest_nice")
    words = " ".join(str(columns.get(mode, 0)) for mode in order)
    proc.mkdir(exist_ok=True)
    rest = "intr 1\nctxt 1\nsoftirq 1\nbtime 1\nprocesses 1\nprocs_running 1\nprocs_blocked 0"
    (proc / "stat").write_text(f"cpu  {words}\ncpu6 {words}\n{rest}\n")


def test_guest_time_is_counted_once(tmp_path: Path, read_from: ReadFrom) -> None:
    write_cpu(read_from(tmp_path) / "proc", user=1000, guest=300, nice=50, guest_nice=20, idle=5)

    collected = CpuCollector().collect()

    assert value_of(collected, CPU, "user") == 7.0
    assert value_of(collected, CPU, "guest") == 3.0
    assert value_of(collected, CPU, "nice") == 0.3


def test_utilization_is_that_of_the_last_interval(tmp_path: Path, read_from: ReadFrom) -> None:
    proc = read_from(tmp_path) / "proc"
    collector = CpuCollector()
    write_cpu(proc, user=9000, idle=1000)
    first = collector.collect()
    write_cpu(proc, user=9025, idle=1065, iowait=10)
    second = collector.collect()

    assert value_of(first, "host_cpu_utilization_ratio") is None
    assert value_of(second, "host_cpu_utilization_ratio") == pytest.approx(0.25)


def test_cpu_time_that_the_kernel_takes_back_stays(tmp_path: Path, read_from: ReadFrom) -> None:
    proc = read_from(tmp_path) / "proc"
    collector = CpuCollector()
    write_cpu(proc, user=100, idle=1000, iowait=500)
    collector.collect()
    write_cpu(proc, user=150, idle=1001, iowait=490)
    collected = collector.collect()

    assert value_of(collected, CPU, "iowait") == 5.0
    assert value_of(collected, CPU, "user") == 1.5


def test_a_cpu_that_was_plugged_in_anew_begins_anew(tmp_path: Path, read_from: ReadFrom) -> None:
    proc = read_from(tmp_path) / "proc"
    collector = CpuCollector(per_core=True)
    write_cpu(proc, user=10_000, idle=90_000)
    collector.collect()
    write_cpu(proc, user=5, idle=10)
    collected = collector.collect()

    assert value_of(collected, CPU, "6", "user") == 0.05
    assert value_of(collected, "host_cpu_utilization_ratio") is None


def test_per_core_replaces_the_sum_and_keeps_the_kernels_numbers(read_from: ReadFrom) -> None:
    read_from(MACHINES / "node")
    collected = CpuCollector(per_core=True).collect()

    assert value_of(collected, CPU, "idle") is None
    assert value_of(collected, CPU, "6", "idle") == 73192.23
    assert value_of(collected, CPU, "7", "idle") is None  # it is offline


@pytest.mark.parametrize(
    ("machine", "quota"),
    [("node", 4.0), ("container", 8.0), ("old", 2.5), ("separate", 1.5), ("virtual", None)],
)
def test_the_quota_is_the_tightest_limit_of_the_cgroup(machine: str, quota: float | None) -> None:
    root = MACHINES / machine

    assert cpu_quota(CgroupTree(proc=root / "proc", sys=root / "sys")) == quota


def test_the_kernel_counts_what_it_killed_for_memory(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 5\noom_kill 3\nother 1\n")

    assert oom_kills(tmp_path) == 3
    assert oom_kills(tmp_path / "nowhere") is None
