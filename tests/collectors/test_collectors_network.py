"""Network interfaces and TCP on recorded machines: which are shown, and how what they do not know is absent."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from collectors_support import MACHINES, copy_of, value_of

from exporter.collectors.network import NetworkCollector
from exporter.collectors.tcp import TcpCollector

BYTES, UP = "host_network_receive_bytes_total", "host_network_up"
SPEED, MTU = "host_network_speed_bytes", "host_network_mtu_bytes"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def collector_of(root: Path, clock: Clock | None = None) -> NetworkCollector:
    return NetworkCollector(proc=root / "proc", sys=root / "sys", monotonic=clock or Clock())


@pytest.mark.parametrize("device", ["lo", "veth1a2b", "br-lan"])
def test_interfaces_of_containers_are_left_out(device: str) -> None:
    assert value_of(collector_of(MACHINES / "node").collect(), BYTES, device) is None


def test_patterns_choose_interfaces() -> None:
    root = MACHINES / "node"
    collected = NetworkCollector(
        proc=root / "proc", sys=root / "sys", device_include=["lo", "e*"], device_exclude=["eno*"]
    ).collect()

    assert value_of(collected, BYTES, "lo") == 9077163
    assert value_of(collected, BYTES, "ens1f0np0") == 98765432109876
    assert value_of(collected, BYTES, "eno1") is None


def test_a_number_that_fills_its_column_is_read_from_behind_the_colon() -> None:
    collected = collector_of(MACHINES / "old").collect()

    assert value_of(collected, BYTES, "eth0") == 4294967290


def test_a_name_may_hold_any_letter() -> None:
    collected = collector_of(MACHINES / "node").collect()

    assert value_of(collected, BYTES, "wgü0") == 77
    assert value_of(collected, MTU, "wgü0") == 1420


def test_a_speed_is_bytes_per_second() -> None:
    assert value_of(collector_of(MACHINES / "node").collect(), SPEED, "ens1f0np0") == 50_000_000_000


@pytest.mark.parametrize("text", ["-1", "0", "4294967295", "65536 ", None])
def test_a_speed_that_is_not_known_is_absent(tmp_path: Path, text: str | None) -> None:
    root = copy_of("node", tmp_path)
    path = root / "sys/class/net/eno1/speed"
    if text is None:
        path.unlink()
    else:
        path.write_text(f"{text}\n")
    collected = collector_of(root).collect()

    assert value_of(collected, SPEED, "eno1") == (65536 * 125_000 if text == "65536 " else None)
    assert value_of(collected, MTU, "eno1") == 1500
    assert collected.problems == ()


def test_an_interface_of_unknown_state_is_up_when_it_has_a_carrier(tmp_path: Path) -> None:
    root = copy_of("node", tmp_path)
    before = collector_of(root).collect()
    (root / "sys/class/net/wgü0/carrier").unlink()
    after = collector_of(root).collect()

    assert value_of(before, UP, "wgü0") == 1
    assert value_of(after, UP, "wgü0") == 0
    assert value_of(before, UP, "ibp26s0") == 0
    assert value_of(before, UP, "tun0") is None  # of another network namespace than the one sysfs shows


def test_speed_is_read_again_after_a_minute_or_when_the_link_has_changed(tmp_path: Path) -> None:
    root, clock = copy_of("node", tmp_path), Clock()
    collector = collector_of(root, clock)
    place = root / "sys/class/net/eno1"
    collector.collect()
    (place / "speed").write_text("100\n")
    clock.now += 30
    assert value_of(collector.collect(), SPEED, "eno1") == 125_000_000

    clock.now += 31
    assert value_of(collector.collect(), SPEED, "eno1") == 12_500_000

    (place / "speed").write_text("-1\n")
    (place / "operstate").write_text("down\n")
    collected = collector.collect()
    assert value_of(collected, SPEED, "eno1") is None
    assert value_of(collected, UP, "eno1") == 0


def test_a_fault_in_sysfs_costs_one_sample_and_is_tried_again(tmp_path: Path) -> None:
    root = copy_of("node", tmp_path)
    collector = collector_of(root)
    path = root / "sys/class/net/eno1/speed"
    path.write_text("fast\n")
    broken = collector.collect()
    path.write_text("1000\n")
    mended = collector.collect()

    assert [reason for reason, _ in broken.problems] == ["malformed"]
    assert value_of(broken, BYTES, "eno1") == 113610213
    assert value_of(broken, SPEED, "ens1f0np0") == 50_000_000_000
    assert value_of(mended, SPEED, "eno1") == 125_000_000


def test_a_state_that_is_none_is_neither_up_nor_down(tmp_path: Path) -> None:
    root = copy_of("node", tmp_path)
    (root / "sys/class/net/eno1/operstate").write_text("")
    collected = collector_of(root).collect()

    assert value_of(collected, UP, "eno1") is None
    assert value_of(collected, UP, "ens1f0np0") == 1
    assert [reason for reason, _ in collected.problems] == ["malformed"]


def test_a_name_with_an_odd_separator_costs_nothing(tmp_path: Path) -> None:
    root = copy_of("node", tmp_path)
    path = root / "proc/net/dev"
    path.write_text(path.read_text().replace("eno1", "en\x1c\u2028o1"))
    collected = collector_of(root).collect()

    assert value_of(collected, BYTES, "en\x1c\u2028o1") == 113610213
    assert collected.problems == ()


def test_an_interface_that_is_removed_ends(tmp_path: Path) -> None:
    root = copy_of("node", tmp_path)
    collector = collector_of(root)
    collector.collect()
    path = root / "proc/net/dev"
    path.write_text("\n".join(line for line in path.read_text().splitlines() if "eno1" not in line))
    shutil.rmtree(root / "sys/class/net/eno1")
    collected = collector.collect()

    assert collected.problems == ()
    assert value_of(collected, BYTES, "eno1") is None
    assert value_of(collected, SPEED, "eno1") is None


def test_an_interface_that_goes_between_two_reads_is_no_failure(tmp_path: Path) -> None:
    root = copy_of("node", tmp_path)
    shutil.rmtree(root / "sys/class/net/eno1")
    collected = collector_of(root).collect()

    assert collected.problems == ()
    assert value_of(collected, BYTES, "eno1") == 113610213
    assert value_of(collected, UP, "eno1") is None


def test_retransmissions_and_memory_of_sockets() -> None:
    collected = TcpCollector(proc=MACHINES / "node/proc", page_size=65536).collect()

    assert value_of(collected, "host_tcp_retransmits_total") == 10169
    assert value_of(collected, "host_sockstat_tcp_mem_bytes") == 18 * 65536
    assert value_of(collected, "host_sockstat_tcp6_inuse") == 14


def test_a_machine_without_ipv6_is_a_normal_state() -> None:
    collected = TcpCollector(proc=MACHINES / "old/proc").collect()

    assert value_of(collected, "host_sockstat_tcp6_inuse") is None
    assert collected.problems == ()
    assert len(collected.unsupported) == 1


def test_one_damaged_table_of_tcp_costs_only_its_own_family(tmp_path: Path) -> None:
    root = copy_of("node", tmp_path)
    (root / "proc/net/snmp").write_text("Tcp: RtoAlgorithm RtoMin\nTcp: 1 200\n")
    collected = TcpCollector(proc=root / "proc").collect()

    assert value_of(collected, "host_tcp_retransmits_total") is None
    assert value_of(collected, "host_sockstat_tcp_inuse") == 120
    assert [reason for reason, _ in collected.problems] == ["malformed"]
