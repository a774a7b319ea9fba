"""RDMA ports on recorded machines: counters that a port lacks, or that its driver refuses."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from collectors_support import MACHINES, value_of

from exporter.collectors.host.rdma import RETRY_SECONDS, RdmaCollector

RECEIVE_BYTES, LINK_DOWNED = "host_rdma_receive_bytes_total", "host_rdma_link_downed_total"


@contextmanager
def refusing_driver(monkeypatch: pytest.MonkeyPatch, **errors: int) -> Iterator[list[str]]:
    """Let reads of files fail as a driver does, with an error number by file name. Yields the paths of all opened files."""
    opened_paths: list[str] = []
    read_bytes = Path.read_bytes

    def read(path: Path) -> bytes:
        opened_paths.append(str(path))
        error_number = errors.get(path.name)
        if error_number is not None:
            raise OSError(error_number, os.strerror(error_number), str(path))
        return read_bytes(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", read)
        yield opened_paths


def rdma_collector(**options: Any) -> RdmaCollector:
    return RdmaCollector(sys=MACHINES / "node/sys", **options)


@pytest.mark.parametrize("device", ["mlx5_1", "mlx5_2", "irdma0", "rdmap16s27"])
def test_the_registers_of_a_link_that_is_down_or_not_infiniband_are_not_read(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    collector = rdma_collector(device_include=[device])
    with refusing_driver(monkeypatch) as opened_paths:
        collected = collector.collect()

    assert [path for path in opened_paths if "infiniband/" in path and f"/{device}/" not in path] == []
    assert value_of(collected, LINK_DOWNED, device, "1") is None
    registers = ("link_downed", "symbol_error", "port_rcv_errors", "port_xmit_wait")
    assert [path for path in opened_paths if path.endswith(registers)] == []
    assert value_of(collected, "host_rdma_port_state", device, "1") is not None


def test_a_refused_counter_is_skipped_for_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_seconds = [1000.0]
    collector = rdma_collector(device_include=["mlx5_0"], monotonic=lambda: clock_seconds[0])
    with refusing_driver(monkeypatch, link_downed=errno.EINVAL) as opened_paths:
        for _ in range(100):
            clock_seconds[0] += 5
            collector.collect()
    assert len([path for path in opened_paths if path.endswith("link_downed")]) == 1

    clock_seconds[0] += RETRY_SECONDS
    assert value_of(collector.collect(), LINK_DOWNED, "mlx5_0", "1") == 255


def test_a_refused_counter_of_traffic_is_a_gap_and_not_the_value_of_another_counter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = tmp_path / "class/infiniband/bnxt_re0/ports/1"
    contents = {"state": "4: ACTIVE", "counters/port_rcv_data": "1000", "hw_counters/rx_bytes": "7"}
    for name, content in contents.items():
        (port / name).parent.mkdir(parents=True, exist_ok=True)
        (port / name).write_text(content)
    collector = RdmaCollector(sys=tmp_path)
    before = value_of(collector.collect(), RECEIVE_BYTES, "bnxt_re0", "1")
    with refusing_driver(monkeypatch, port_rcv_data=errno.EINVAL):
        during = value_of(collector.collect(), RECEIVE_BYTES, "bnxt_re0", "1")

    assert (before, during) == (4000, None)


def test_another_error_of_a_file_affects_only_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with refusing_driver(monkeypatch, port_rcv_errors=errno.EIO):
        collected = rdma_collector().collect()

    assert [reason for reason, _ in collected.problems] == ["unreadable"]
    assert value_of(collected, RECEIVE_BYTES, "mlx5_0", "1") is not None
    assert value_of(collected, RECEIVE_BYTES, "mlx5_2", "1") is not None


def test_a_port_of_another_namespace_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with refusing_driver(monkeypatch, state=errno.EINVAL):
        collected = rdma_collector(device_include=["mlx5_0"]).collect()

    assert list(collected) == []
    assert collected.problems == []
    assert "ports/1: the driver refuses to read the state" in collected.unsupported[0]
