"""Host collectors on recorded machines: expositions, computation of values, and damaged files."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from collectors_support import (
    FILE_COLLECTORS,
    MACHINES,
    REASONS,
    assert_golden,
    assert_sound,
    build_collector,
    copy_machine,
    damaged_bytes,
    options_turned_on,
    read_from,
    text_of,
    value_of,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from users_support import without_privileges

from exporter.collectors.catalogue import CollectorEntry
from exporter.collectors.host.cpu import CpuCollector
from exporter.collectors.host.disk import DiskCollector
from exporter.collectors.host.lustre import LustreCollector
from exporter.collectors.host.memory import read_oom_kills
from exporter.collectors.host.network import NetworkCollector
from exporter.collectors.host.nfs import NfsCollector
from exporter.collectors.host.pressure import PressureCollector

__all__ = ["read_from"]

CPU_SECONDS = "host_cpu_seconds_total"

ReadFrom = Callable[[Path], Path]


@pytest.mark.parametrize("machine", ["virtual", "node", "old"])
def test_a_recorded_machine_has_the_expected_exposition(machine: str, read_from: ReadFrom) -> None:
    root = read_from(MACHINES / machine)
    exposition = ""
    for entry in FILE_COLLECTORS:
        collector = build_collector(entry, root)
        collected = collector.collect()
        assert_sound(collector, collected)
        assert collected.problems == []
        exposition += text_of(collected)
        exposition += "".join(
            f"# unsupported: {source_name.replace(str(root), '')}\n" for source_name in collected.unsupported
        )

    assert_golden(exposition, MACHINES / f"{machine}.metrics")


def write_cpu(proc: Path, **columns: int) -> None:
    """Write /proc/stat with the clock ticks of one CPU by mode."""
    order = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest", "guest_nice")
    columns_text = " ".join(str(columns.get(mode, 0)) for mode in order)
    proc.mkdir(exist_ok=True)
    other_lines = "intr 1\nctxt 1\nsoftirq 1\nbtime 1\nprocesses 1\nprocs_running 1\nprocs_blocked 0"
    (proc / "stat").write_text(f"cpu  {columns_text}\ncpu6 {columns_text}\n{other_lines}\n")


def test_guest_time_is_counted_once(tmp_path: Path, read_from: ReadFrom) -> None:
    write_cpu(read_from(tmp_path) / "proc", user=1000, guest=300, nice=50, guest_nice=20, idle=5)

    collected = CpuCollector().collect()

    assert value_of(collected, CPU_SECONDS, "user") == 7.0
    assert value_of(collected, CPU_SECONDS, "guest") == 3.0
    assert value_of(collected, CPU_SECONDS, "nice") == 0.3


def test_utilization_covers_the_last_interval(tmp_path: Path, read_from: ReadFrom) -> None:
    proc = read_from(tmp_path) / "proc"
    collector = CpuCollector()
    write_cpu(proc, user=9000, idle=1000)
    initial = collector.collect()
    write_cpu(proc, user=9025, idle=1065, iowait=10)
    after_100_ticks = collector.collect()

    assert value_of(initial, "host_cpu_utilization_ratio") is None
    assert value_of(after_100_ticks, "host_cpu_utilization_ratio") == pytest.approx(0.25)


def test_cpu_time_never_decreases_when_the_kernel_corrects_it(tmp_path: Path, read_from: ReadFrom) -> None:
    proc = read_from(tmp_path) / "proc"
    collector = CpuCollector()
    write_cpu(proc, user=100, idle=1000, iowait=500)
    collector.collect()
    write_cpu(proc, user=150, idle=1001, iowait=490)
    collected = collector.collect()

    assert value_of(collected, CPU_SECONDS, "iowait") == 5.0
    assert value_of(collected, CPU_SECONDS, "user") == 1.5


def test_a_replugged_cpu_restarts_its_counters(tmp_path: Path, read_from: ReadFrom) -> None:
    proc = read_from(tmp_path) / "proc"
    collector = CpuCollector(per_core=True)
    write_cpu(proc, user=10_000, idle=90_000)
    collector.collect()
    write_cpu(proc, user=5, idle=10)
    collected = collector.collect()

    assert value_of(collected, CPU_SECONDS, "6", "user") == 0.05
    assert value_of(collected, "host_cpu_utilization_ratio") is None


def test_a_cpu_that_goes_offline_between_two_reads_does_not_get_the_times_of_another_cpu(
    tmp_path: Path, read_from: ReadFrom, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cpu(read_from(tmp_path) / "proc", user=100, idle=100)
    monkeypatch.setattr("exporter.collectors.host.cpu.read_file", lambda _path: "cpu\ncpu5\ncpu6\n")
    collected = CpuCollector(per_core=True).collect()

    assert not any(sample.name == CPU_SECONDS for metric in collected for sample in metric.samples)


def test_the_per_core_option_replaces_the_sum_and_keeps_the_core_numbers(read_from: ReadFrom) -> None:
    read_from(MACHINES / "node")
    collected = CpuCollector(per_core=True).collect()

    assert value_of(collected, CPU_SECONDS, "idle") is None
    assert value_of(collected, CPU_SECONDS, "6", "idle") == 73192.23
    assert value_of(collected, CPU_SECONDS, "7", "idle") is None  # offline


def test_oom_kills_come_from_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 5\noom_kill 3\nother 1\n")

    assert read_oom_kills(tmp_path) == 3
    assert read_oom_kills(tmp_path / "nowhere") is None


# Interfaces and disks ----------------------------------------------------------------------------------

RECEIVED_BYTES, COMPLETED_READS = "host_network_receive_bytes_total", "host_disk_reads_completed_total"


@pytest.fixture
def node(read_from: ReadFrom, tmp_path: Path) -> Path:
    return read_from(copy_machine("node", tmp_path))


@pytest.mark.usefixtures("node")
def test_patterns_choose_interfaces() -> None:
    collected = NetworkCollector(device_include=["lo", "e*"], device_exclude=["eno*"]).collect()

    assert value_of(collected, RECEIVED_BYTES, "lo") == 9077163
    assert value_of(collected, RECEIVED_BYTES, "ens1f0np0") == 98765432109876
    assert value_of(collected, RECEIVED_BYTES, "eno1") is None


@pytest.mark.usefixtures("node")
def test_a_network_link_has_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    links = {name: SimpleNamespace(isup=name != "ens1f0np0") for name in ("eno1", "ens1f0np0", "lo")}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: links)
    collected = NetworkCollector().collect()

    assert value_of(collected, "host_network_up", "eno1") == 1
    assert value_of(collected, "host_network_up", "ens1f0np0") == 0
    assert value_of(collected, "host_network_up", "lo") is None


def test_partitions_are_published_with_their_option(node: Path) -> None:
    collected = DiskCollector(sys=node / "sys", partitions=True).collect()

    assert value_of(collected, COMPLETED_READS, "nvme0n1p1") == 1000
    assert value_of(collected, COMPLETED_READS, "cciss/c0d0p1") == 49


def test_counters_of_another_disk_of_the_same_name_are_not_added(node: Path) -> None:
    collector = DiskCollector(sys=node / "sys")
    collector.collect()
    path = node / "proc/diskstats"
    lines = [line for line in path.read_text().splitlines() if " sda" not in line]
    path.write_text("\n".join([*lines, "8 0 sda 7 0 8 1 0 0 0 0 0 1 1 0 0 0 0", ""]))

    assert value_of(collector.collect(), COMPLETED_READS, "sda") == 7


# NFS and Lustre ----------------------------------------------------------------------------------------


def test_a_damaged_operation_affects_only_its_mount(node: Path) -> None:
    path = node / "proc/self/mountstats"
    path.write_text(path.read_text().replace("WRITE: 12", "WRITE: dozen"))
    collected = NfsCollector().collect()

    assert [reason for reason, _ in collected.problems] == ["malformed"]
    assert value_of(collected, "host_nfs_operations_total", "/home/team one", "read") is None
    assert value_of(collected, "host_nfs_operations_total", "/data/dead", "other") == 3


def test_a_lustre_client_is_named_by_its_mount_point_or_by_its_own_name_beside_a_second_client(
    node: Path,
) -> None:
    single_client = LustreCollector(sys=node / "sys").collect()
    second_client = node / "sys/kernel/debug/lustre/llite/scratch1-ffff000000000000"
    second_client.mkdir()
    (second_client / "stats").write_text("write_bytes 1 samples [bytes] 5 5 5\n")
    two_clients = LustreCollector(sys=node / "sys").collect()

    assert value_of(single_client, "host_lustre_read_bytes_total", "/lustre") == 3145728000
    assert value_of(two_clients, "host_lustre_written_bytes_total", second_client.name) == 5
    assert value_of(two_clients, "host_lustre_read_bytes_total", second_client.name) == 0
    assert value_of(two_clients, "host_lustre_read_bytes_total", "scratch1-ffff9a5bc1f2c800") == 3145728000


def test_old_lustre_statistics_are_read_from_proc_without_times(node: Path, tmp_path: Path) -> None:
    client = node / "proc/fs/lustre/llite/scratch1-ffff1"
    client.mkdir(parents=True)
    (node / "sys/kernel").rename(tmp_path / "away")
    (client / "stats").write_text("read_bytes 2 samples [bytes] 1 9 10\nopen 3 samples [regs]\n")
    collected = LustreCollector(sys=node / "sys").collect()
    collector_without_statistics = LustreCollector(sys=tmp_path)
    (client / "stats").unlink()
    client.rmdir()

    assert value_of(collected, "host_lustre_read_bytes_total", "/lustre") == 10
    assert value_of(collected, "host_lustre_operations_total", "/lustre", "other") == 3
    assert value_of(collected, "host_lustre_operation_time_seconds_total", "/lustre", "other") is None
    assert "no statistics in" in collector_without_statistics.collect().unsupported[0]


# Damaged files --------------------------------------------------------------------------------------------

FILES_OF_COLLECTOR = {
    "cpu": ("proc/stat",),
    "pressure": ("pressure",),
    "memory": ("proc/meminfo", "proc/vmstat"),
    "hardware": ("cpu.max", "self/cgroup"),
    "cgroup": ("fs/cgroup", "self/cgroup", "mountinfo"),
    "disk": ("diskstats",),
    "filesystem": ("mountinfo",),
    "nfs": ("mountstats", "mountinfo"),
    "lustre": ("lustre", "mountinfo"),
    "network": ("net/dev", "net/snmp"),
    "rdma": ("infiniband",),
}
"""Parts of the paths of the files that a collector reads."""


@pytest.mark.parametrize("entry", FILE_COLLECTORS, ids=lambda entry: str(entry.name))
def test_a_file_with_damaged_bytes_gives_only_documented_reasons(
    entry: CollectorEntry, tmp_path: Path, read_from: ReadFrom
) -> None:
    root = read_from(copy_machine("node", tmp_path))
    files = [
        path
        for path in sorted(root.rglob("*"))
        if path.is_file() and any(fragment in str(path) for fragment in FILES_OF_COLLECTOR[entry.name])
    ]
    options = options_turned_on(entry)

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.data())
    def check(data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(files))
        original = path.read_bytes()
        path.write_bytes(data.draw(damaged_bytes(original)))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # psutil warns about missing fields
                collector = build_collector(entry, root, **options)
                for _ in range(2):
                    assert {reason for reason, _ in collector.collect().problems} <= REASONS
        finally:
            path.write_bytes(original)

    check()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_text("some avg10=0.00 total=many\n"), "malformed"),
        (lambda path: path.write_text(""), "malformed"),
        (lambda path: path.chmod(0), "permission"),
        (lambda path: (path.unlink(), path.mkdir()), "unreadable"),
    ],
)
def test_a_damaged_file_affects_only_its_own_families(
    damage: Callable[[Path], object], reason: str, tmp_path: Path, read_from: ReadFrom
) -> None:
    for directory in (tmp_path, *tmp_path.parents):
        if "pytest-of-" in str(directory):
            directory.chmod(0o755)
    root = read_from(copy_machine("node", tmp_path))
    damage(root / "proc/pressure/io")
    with without_privileges() if reason == "permission" else nullcontext():
        collected = PressureCollector().collect()

    assert value_of(collected, "host_pressure_memory_waiting_seconds_total") == 7.654321
    assert value_of(collected, "host_pressure_io_waiting_seconds_total") is None
    ((reported_reason, message),) = collected.problems
    assert reported_reason == reason
    assert "pressure/io" in message


# Without files in the tree, the other two read the test machine: psutil its /sys/block, and the hardware collector its CPUs.
CONFINED_COLLECTORS = [entry for entry in FILE_COLLECTORS if entry.name not in {"disk", "hardware"}]


@pytest.mark.parametrize("entry", CONFINED_COLLECTORS, ids=lambda entry: str(entry.name))
def test_a_machine_without_any_source_is_not_a_problem(
    entry: CollectorEntry, tmp_path: Path, read_from: ReadFrom
) -> None:
    collector = build_collector(entry, read_from(tmp_path))
    collected = collector.collect()

    assert collected.problems == []
    assert collected.unsupported
    assert list(collector.collect()) == list(collected)


def test_an_error_of_the_exporter_is_not_reported_as_a_damaged_file(
    monkeypatch: pytest.MonkeyPatch, read_from: ReadFrom
) -> None:
    def raise_key_error(_: CpuCollector, times: dict[str, float]) -> float:
        return times["a mode that no kernel has"]

    read_from(MACHINES / "node")
    monkeypatch.setattr(CpuCollector, "_utilization", raise_key_error)

    with pytest.raises(KeyError):
        CpuCollector().collect()
