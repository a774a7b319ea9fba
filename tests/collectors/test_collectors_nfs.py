"""NFS and Lustre on a recorded machine: what their statistics mean, and whose they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from collectors_support import MACHINES, copy_of, read_from, value_of

from exporter.collectors.host.nfs_lustre import LustreCollector, NfsCollector

__all__ = ["read_from"]

HOME = "/home/team one"
NODE = MACHINES / "node"

ReadFrom = Callable[[Path], Path]


@pytest.fixture(autouse=True)
def node(read_from: ReadFrom) -> None:
    read_from(NODE)


def test_operations_and_bytes_are_those_of_programs() -> None:
    collected = NfsCollector().collect()

    assert value_of(collected, "host_nfs_operations_total", HOME, "read") == 1300
    assert value_of(collected, "host_nfs_operations_total", HOME, "other") == 6001
    assert value_of(collected, "host_nfs_operation_time_seconds_total", HOME, "read") == 79.423
    assert value_of(collected, "host_nfs_retransmissions_total", HOME) == 12
    assert value_of(collected, "host_nfs_read_bytes_total", HOME) == 1207640230 + 5000
    assert value_of(collected, "host_nfs_read_bytes_total", "/home/bind") is None  # the same once more


def test_a_damaged_operation_costs_its_mount_only(tmp_path: Path, read_from: ReadFrom) -> None:
    root = read_from(copy_of("node", tmp_path))
    path = root / "proc/self/mountstats"
    path.write_text(path.read_text().replace("WRITE: 12", "WRITE: dozen"))
    collected = NfsCollector().collect()

    assert [reason for reason, _ in collected.problems] == ["malformed"]
    assert value_of(collected, "host_nfs_operations_total", HOME, "read") is None
    assert value_of(collected, "host_nfs_operations_total", "/data/dead", "other") == 3


def test_a_lustre_client_is_named_by_its_mount_point() -> None:
    collected = LustreCollector(sys=NODE / "sys").collect()

    assert value_of(collected, "host_lustre_read_bytes_total", "/lustre") == 3145728000
    assert value_of(collected, "host_lustre_operations_total", "/lustre", "read") == 1500
    assert value_of(collected, "host_lustre_operations_total", "/lustre", "other") == 610
    assert value_of(collected, "host_lustre_operation_time_seconds_total", "/lustre", "read") == 4.5


def test_two_clients_of_one_filesystem_keep_their_own_names(tmp_path: Path, read_from: ReadFrom) -> None:
    root = read_from(copy_of("node", tmp_path))
    llite = root / "sys/kernel/debug/lustre/llite"
    second = llite / "scratch1-ffff000000000000"
    second.mkdir()
    (second / "stats").write_text("write_bytes 1 samples [bytes] 5 5 5\n")
    collected = LustreCollector(sys=root / "sys").collect()

    assert value_of(collected, "host_lustre_written_bytes_total", second.name) == 5
    assert value_of(collected, "host_lustre_read_bytes_total", second.name) == 0
    assert value_of(collected, "host_lustre_read_bytes_total", "scratch1-ffff9a5bc1f2c800") == 3145728000


def test_old_lustre_has_its_statistics_in_proc_and_no_times(tmp_path: Path, read_from: ReadFrom) -> None:
    root = read_from(copy_of("node", tmp_path))
    client = root / "proc/fs/lustre/llite/scratch1-ffff1"
    client.mkdir(parents=True)
    (root / "sys/kernel").rename(tmp_path / "away")
    (client / "stats").write_text("read_bytes 2 samples [bytes] 1 9 10\nopen 3 samples [regs]\n")
    collected = LustreCollector(sys=root / "sys").collect()

    assert value_of(collected, "host_lustre_read_bytes_total", "/lustre") == 10
    assert value_of(collected, "host_lustre_operations_total", "/lustre", "other") == 3
    assert value_of(collected, "host_lustre_operation_time_seconds_total", "/lustre", "other") is None


def test_a_lustre_mount_without_statistics_is_said(tmp_path: Path) -> None:
    collected = LustreCollector(sys=tmp_path).collect()

    assert list(collected) == []
    assert "no statistics in" in collected.unsupported[0]
