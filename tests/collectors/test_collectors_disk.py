"""Disks and file descriptors on recorded machines: which devices are shown, and what their numbers mean."""

from __future__ import annotations

from pathlib import Path

from collectors_support import MACHINES, copy_of, value_of

from exporter.collectors.disk import DiskCollector
from exporter.collectors.family import Collected
from exporter.collectors.file_descriptors import FileDescriptorsCollector

READS = "host_disk_reads_completed_total"


def devices_of(collected: Collected) -> list[str]:
    return [
        sample.labels[0]
        for family in collected.families
        for sample in family.samples
        if family.spec.name == READS
    ]


def test_partitions_files_and_memory_are_left_out() -> None:
    root = MACHINES / "node"
    collected = DiskCollector(proc=root / "proc", sys=root / "sys").collect()

    assert devices_of(collected) == ["nvme0n1", "sda", "sdb1x", "cciss/c0d0", "dm-0"]


def test_partitions_come_with_their_option() -> None:
    root = MACHINES / "node"
    collected = DiskCollector(proc=root / "proc", sys=root / "sys", partitions=True).collect()

    assert value_of(collected, READS, "nvme0n1p1") == 1000
    assert value_of(collected, READS, "cciss/c0d0p1") == 49


def test_patterns_choose_devices_and_exclusion_wins() -> None:
    root = MACHINES / "node"
    collector = DiskCollector(
        proc=root / "proc", sys=root / "sys", device_include=["sd*", "nvme*"], device_exclude=["sdb*"]
    )

    assert devices_of(collector.collect()) == ["nvme0n1", "sda"]


def test_partitions_are_known_by_name_where_there_is_no_sysfs(tmp_path: Path) -> None:
    collected = DiskCollector(proc=MACHINES / "node/proc", sys=tmp_path).collect()

    assert "sda1" not in devices_of(collected)
    assert "nvme0n1p2" not in devices_of(collected)
    assert "nvme0n1" in devices_of(collected)


def test_times_are_seconds_and_sectors_are_512_bytes() -> None:
    root = MACHINES / "node"
    collected = DiskCollector(proc=root / "proc", sys=root / "sys").collect()

    assert value_of(collected, "host_disk_read_bytes_total", "nvme0n1") == 912345678 * 512
    assert value_of(collected, "host_disk_write_time_seconds_total", "nvme0n1") == 9876.543
    assert value_of(collected, "host_disk_io_time_weighted_seconds_total", "nvme0n1") == 14400


def test_a_queue_below_zero_is_absent() -> None:
    root = MACHINES / "node"
    collected = DiskCollector(proc=root / "proc", sys=root / "sys").collect()

    assert value_of(collected, "host_disk_io_now", "sdb1x") is None
    assert value_of(collected, READS, "sdb1x") == 3


def test_a_disk_that_is_pulled_out_ends_and_one_that_comes_begins(tmp_path: Path) -> None:
    root = copy_of("node", tmp_path)
    collector = DiskCollector(proc=root / "proc", sys=root / "sys")
    collector.collect()
    path = root / "proc/diskstats"
    lines = [line for line in path.read_text().splitlines() if " sda" not in line]
    path.write_text("\n".join([*lines, "8 32 sdc 7 0 8 1 0 0 0 0 0 1 1", ""]))
    collected = collector.collect()

    assert collected.problems == ()
    assert "sda" not in devices_of(collected)
    assert value_of(collected, READS, "sdc") == 7


def test_a_line_of_garbage_costs_its_own_device(tmp_path: Path) -> None:
    root = copy_of("node", tmp_path)
    path = root / "proc/diskstats"
    path.write_text(path.read_text().replace("8123456 1234", "many 1234", 1))
    collected = DiskCollector(proc=root / "proc", sys=root / "sys").collect()

    assert value_of(collected, READS, "nvme0n1") is None
    assert value_of(collected, "host_disk_read_bytes_total", "nvme0n1") is None
    assert value_of(collected, READS, "sda") == 100
    assert [reason for reason, _ in collected.problems] == ["malformed"]


def test_a_machine_without_disks_is_a_normal_state(tmp_path: Path) -> None:
    (tmp_path / "diskstats").write_text("7 0 loop0 1 0 0 0 0 0 0 0 0 0 0\n")
    collected = DiskCollector(proc=tmp_path, sys=tmp_path).collect()

    assert collected.families == ()
    assert collected.problems == ()
    assert len(collected.unsupported) == 1


def test_no_limit_of_open_files_is_absent_not_a_huge_number() -> None:
    collected = FileDescriptorsCollector(proc=MACHINES / "node/proc").collect()
    limited = FileDescriptorsCollector(proc=MACHINES / "old/proc").collect()

    assert value_of(collected, "host_filefd_allocated") == 14272
    assert value_of(collected, "host_filefd_maximum") is None
    assert value_of(limited, "host_filefd_maximum") == 787458
