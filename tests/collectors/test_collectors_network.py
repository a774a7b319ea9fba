"""Network interfaces, TCP and disks on recorded machines: which devices are shown, and what their numbers mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from collectors_support import copy_of, read_from, value_of

from exporter.collectors.host.disk import DiskCollector
from exporter.collectors.host.network import NetworkCollector
from exporter.families import Collected

__all__ = ["read_from"]

BYTES, READS = "host_network_receive_bytes_total", "host_disk_reads_completed_total"

ReadFrom = Callable[[Path], Path]


@pytest.fixture
def node(read_from: ReadFrom, tmp_path: Path) -> Path:
    return read_from(copy_of("node", tmp_path))


def devices_of(collected: Collected, name: str = READS) -> list[str]:
    return [
        sample.labels["device"] for metric in collected for sample in metric.samples if sample.name == name
    ]


@pytest.mark.usefixtures("node")
def test_interfaces_of_containers_are_left_out() -> None:
    collected = NetworkCollector().collect()

    assert {"eno1", "ens1f0np0", "wgü0"} <= set(devices_of(collected, BYTES))
    assert not {"lo", "veth1a2b", "br-lan"} & set(devices_of(collected, BYTES))


@pytest.mark.usefixtures("node")
def test_patterns_choose_interfaces() -> None:
    collected = NetworkCollector(device_include=["lo", "e*"], device_exclude=["eno*"]).collect()

    assert value_of(collected, BYTES, "lo") == 9077163
    assert value_of(collected, BYTES, "ens1f0np0") == 98765432109876
    assert value_of(collected, BYTES, "eno1") is None


@pytest.mark.usefixtures("node")
def test_a_link_tells_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    links = {
        "eno1": SimpleNamespace(isup=True, speed=1000),
        "ens1f0np0": SimpleNamespace(isup=False, speed=0),
        "lo": SimpleNamespace(isup=True, speed=0),
    }
    monkeypatch.setattr(psutil, "net_if_stats", lambda: links)
    collected = NetworkCollector().collect()

    assert value_of(collected, "host_network_up", "eno1") == 1
    assert value_of(collected, "host_network_up", "ens1f0np0") == 0
    assert value_of(collected, "host_network_up", "lo") is None


def test_partitions_files_and_memory_are_left_out(node: Path) -> None:
    collected = DiskCollector(sys=node / "sys").collect()

    assert devices_of(collected) == ["nvme0n1", "sda", "sdb1x", "cciss/c0d0", "dm-0"]


def test_partitions_come_with_their_option(node: Path) -> None:
    collected = DiskCollector(sys=node / "sys", partitions=True).collect()

    assert value_of(collected, READS, "nvme0n1p1") == 1000
    assert value_of(collected, READS, "cciss/c0d0p1") == 49


def test_what_another_disk_of_the_same_name_has_counted_is_not_added(node: Path) -> None:
    collector = DiskCollector(sys=node / "sys")
    collector.collect()
    path = node / "proc/diskstats"
    lines = [line for line in path.read_text().splitlines() if " sda" not in line]
    path.write_text("\n".join([*lines, "8 0 sda 7 0 8 1 0 0 0 0 0 1 1 0 0 0 0", ""]))

    assert value_of(collector.collect(), READS, "sda") == 7
