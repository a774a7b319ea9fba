"""The host collectors on damaged machines: whatever a file holds, the outcome is a documented one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from collectors_support import OF_TREE, REASONS, build, copy_of, read_from, value_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exporter.collectors.catalogue import CollectorEntry
from exporter.collectors.host.hardware import HardwareCollector
from exporter.collectors.host.pressure import PressureCollector
from exporter.families import Collected

__all__ = ["read_from"]

ReadFrom = Callable[[Path], Path]

TOUCHED = {
    "cpu": "proc/stat",
    "pressure": "pressure",
    "memory": "proc/meminfo proc/vmstat",
    "hardware": "cpu.max self/cgroup edac",
    "cgroup": "fs/cgroup self/cgroup mountinfo",
    "disk": "diskstats",
    "filesystem": "mountinfo",
    "nfs": "mountstats mountinfo",
    "lustre": "lustre mountinfo",
    "network": "net/dev net/snmp net/sockstat",
    "rdma": "infiniband",
}


@contextmanager
def as_nobody() -> Iterator[None]:
    """Lose root's right to read everything, where the tests run as root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@st.composite
def damaged(draw: st.DrawFn, original: bytes) -> bytes:
    """Anything at all, or the real content cut short or with one spot overwritten."""
    kind = draw(st.sampled_from(["anything", "cut", "overwritten", "number"]))
    if kind == "anything":
        return draw(st.binary(max_size=200))
    if kind == "number":
        return draw(st.sampled_from([b"-1\n", b"9" * 30, b"nan\n", b"1e3\n", b"1_0\n"]))
    place = draw(st.integers(0, len(original)))
    if kind == "cut":
        return original[:place]
    spot = draw(st.binary(min_size=1, max_size=8))
    return original[:place] + spot + original[place + len(spot) :]


@pytest.mark.parametrize("entry", OF_TREE, ids=lambda entry: str(entry.name))
def test_any_bytes_in_any_file_give_a_documented_outcome(
    entry: CollectorEntry, tmp_path: Path, read_from: ReadFrom
) -> None:
    root = read_from(copy_of("node", tmp_path))
    files = [
        path
        for path in sorted(root.rglob("*"))
        if path.is_file() and any(part in str(path) for part in TOUCHED[entry.name].split())
    ]
    options = {setting.name: True for setting in entry.settings if setting.default is False}

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.data())
    def check(data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(files))
        before = path.read_bytes()
        path.write_bytes(data.draw(damaged(before)))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # psutil's, of fields that are missing
                collector = build(entry, root, **options)
                for _ in range(2):
                    assert {reason for reason, _ in collector.collect().problems} <= REASONS
        finally:
            path.write_bytes(before)

    check()


def damaged_pressure(root: Path, damage: Callable[[Path], object]) -> Collected:
    """What is told of pressure when its file for I/O has been dealt with."""
    path = root / "proc/pressure/io"
    path.unlink()
    damage(path)
    return PressureCollector().collect()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_text("some avg10=0.00 total=many\n"), "malformed"),
        (lambda path: path.write_text(""), "malformed"),
        (Path.mkdir, "unreadable"),
    ],
)
def test_a_damaged_file_costs_what_is_in_it(
    damage: Callable[[Path], object], reason: str, tmp_path: Path, read_from: ReadFrom
) -> None:
    collected = damaged_pressure(read_from(copy_of("node", tmp_path)), damage)

    assert value_of(collected, "host_pressure_memory_waiting_seconds_total") == 7.654321
    assert value_of(collected, "host_pressure_io_waiting_seconds_total") is None
    assert [found for found, _ in collected.problems] == [reason]
    assert "pressure/io" in collected.problems[0][1]


def test_a_file_without_permission_costs_what_is_in_it(tmp_path: Path, read_from: ReadFrom) -> None:
    root = read_from(copy_of("node", tmp_path))
    for directory in (root, *root.parents):
        if "pytest-of-" in str(directory):
            directory.chmod(0o755)
    (root / "proc/pressure/io").chmod(0)
    with as_nobody():
        collected = PressureCollector().collect()

    assert value_of(collected, "host_pressure_memory_waiting_seconds_total") == 7.654321
    assert [reason for reason, _ in collected.problems] == ["permission"]


def test_a_directory_without_permission_costs_what_is_in_it(tmp_path: Path, read_from: ReadFrom) -> None:
    root = read_from(copy_of("node", tmp_path))
    for directory in (root, *root.parents):
        if "pytest-of-" in str(directory):
            directory.chmod(0o755)
    edac = root / "sys/devices/system/edac/mc"
    edac.chmod(0)
    try:
        with as_nobody():
            collected = HardwareCollector(sys=root / "sys").collect()
    finally:
        edac.chmod(0o755)

    assert value_of(collected, "host_cpus", "online") == 8
    assert [reason for reason, _ in collected.problems] == ["permission"]


@pytest.mark.parametrize(
    "entry",
    [
        entry for entry in OF_TREE if entry.name != "disk"
    ],  # without diskstats psutil asks this machine's sysfs
    ids=lambda entry: str(entry.name),
)
def test_a_machine_that_offers_nothing_is_a_normal_state(
    entry: CollectorEntry, tmp_path: Path, read_from: ReadFrom
) -> None:
    collector = build(entry, read_from(tmp_path))
    collected = collector.collect()

    assert collected.problems == []
    assert collected.unsupported
    assert list(collector.collect()) == list(collected)
