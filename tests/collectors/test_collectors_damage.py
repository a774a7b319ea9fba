"""The host collectors on damaged machines: whatever a file holds, the outcome is a documented one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from collectors_support import OF_TREE, build, collect_soundly, copy_of, value_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exporter.collectors.catalogue import CollectorEntry
from exporter.collectors.cpu import CpuCollector
from exporter.collectors.edac import EdacCollector
from exporter.collectors.family import Collected
from exporter.collectors.kernel_files import MAX_BYTES
from exporter.collectors.load import LoadCollector
from exporter.collectors.memory import MemoryCollector
from exporter.collectors.pressure import PressureCollector
from exporter.collectors.shm import ShmCollector
from exporter.errors import CollectError

NODE = [entry for entry in OF_TREE if entry.name != "own"]


@contextmanager
def contents(path: Path, garbage: bytes) -> Iterator[None]:
    before = path.read_bytes()
    path.write_bytes(garbage)
    try:
        yield
    finally:
        path.write_bytes(before)


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
        return draw(
            st.sampled_from([b"-1\n", b"18446744073709551615\n", b"9" * 30, b"nan\n", b"1e3\n", b"1_0\n"])
        )
    place = draw(st.integers(0, len(original)))
    if kind == "cut":
        return original[:place]
    spot = draw(st.binary(min_size=1, max_size=12))
    return original[:place] + spot + original[place + len(spot) :]


@pytest.mark.parametrize("entry", OF_TREE, ids=lambda entry: str(entry.name))
def test_any_bytes_in_any_file_give_a_documented_outcome(entry: CollectorEntry, tmp_path: Path) -> None:
    root = copy_of("node", tmp_path)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    options = dict.fromkeys((name for name, _ in entry.options), True)

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.data())
    def check(data: st.DataObject) -> None:
        path = data.draw(st.sampled_from([path for path in files if touches(entry, path)]))
        with contents(path, data.draw(damaged(path.read_bytes()))):
            collector = build(entry, root, **options)
            collect_soundly(collector)
            collect_soundly(collector)

    check()


TOUCHED = {
    "cpu": "proc/stat",
    "load": "loadavg",
    "pressure": "pressure",
    "memory": "proc/meminfo",
    "swap": "proc/meminfo proc/vmstat",
    "vm": "proc/vmstat",
    "own": "self proc/stat",
    "cpu_count": "online topology cpu.max self/cgroup",
    "cpu_frequency": "scaling_cur_freq",
    "cpu_throttles": "thermal_throttle topology",
    "numa": "system/node",
    "sensors": "hwmon",
    "edac": "edac",
    "cgroup": "fs/cgroup self/cgroup mountinfo",
    "disk": "diskstats class/block",
    "filesystem": "mountinfo",
    "nfs": "mountstats mountinfo",
    "lustre": "lustre mountinfo",
    "network": "net/dev class/net",
    "tcp": "net/snmp net/sockstat",
    "rdma": "infiniband",
    "file_descriptors": "file-nr",
}


def touches(entry: CollectorEntry, path: Path) -> bool:
    return any(part in str(path) for part in TOUCHED[entry.name].split())


def test_one_damaged_line_costs_only_its_own_family(tmp_path: Path) -> None:
    root = copy_of("node", tmp_path)
    path = root / "proc/meminfo"
    path.write_text(path.read_text().replace("Dirty:             98304 kB", "Dirty:             many kB"))
    collected = MemoryCollector(proc=root / "proc").collect()

    assert value_of(collected, "host_memory_dirty_bytes") is None
    assert value_of(collected, "host_memory_writeback_bytes") == 4194304
    assert [reason for reason, _ in collected.problems] == ["malformed"]
    assert "Dirty: expected an unsigned number, found 'many'" in collected.problems[0][1]


def test_a_truncated_file_costs_what_is_behind_its_end(tmp_path: Path) -> None:
    root = copy_of("node", tmp_path)
    path = root / "proc/stat"
    path.write_text(path.read_text().partition("ctxt")[0] + "ctx")
    collected = CpuCollector(proc=root / "proc").collect()

    assert value_of(collected, "host_interrupts_total") == 9876543210
    assert value_of(collected, "host_context_switches_total") is None
    assert {reason for reason, _ in collected.problems} == {"malformed"}


def test_a_huge_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    with (tmp_path / "loadavg").open("wb") as file:
        file.truncate(50 * MAX_BYTES)

    with pytest.raises(CollectError, match="longer than") as caught:
        LoadCollector(proc=tmp_path).collect()
    assert caught.value.reason == "malformed"


def test_a_directory_in_place_of_a_file_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / "loadavg").mkdir()

    with pytest.raises(CollectError) as caught:
        LoadCollector(proc=tmp_path).collect()
    assert caught.value.reason == "unreadable"


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "loadavg")

    with pytest.raises(CollectError) as caught:
        LoadCollector(proc=tmp_path).collect()
    assert caught.value.reason == "malformed"


def test_a_file_without_permission_costs_only_its_own_family(tmp_path: Path) -> None:
    root = copy_of("node", tmp_path)
    for directory in (root, *root.parents):
        if "pytest-of-" in str(directory):
            directory.chmod(0o755)
    (root / "proc/pressure/io").chmod(0)
    with as_nobody():
        collected = collect_soundly(PressureCollector(proc=root / "proc"))

    assert isinstance(collected, Collected)
    assert value_of(collected, "host_pressure_memory_waiting_seconds_total") == 7.654321
    assert value_of(collected, "host_pressure_io_waiting_seconds_total") is None
    assert [reason for reason, _ in collected.problems] == ["permission"]


def test_a_directory_without_permission_is_a_failure(tmp_path: Path) -> None:
    root = copy_of("node", tmp_path)
    (root / "sys/devices/system/edac/mc").chmod(0)
    try:
        with as_nobody(), pytest.raises(CollectError) as caught:
            EdacCollector(sys=root / "sys").collect()
    finally:
        (root / "sys/devices/system/edac/mc").chmod(0o755)

    assert caught.value.reason == "permission"


@pytest.mark.parametrize("entry", NODE, ids=lambda entry: str(entry.name))
def test_a_machine_that_offers_nothing_is_a_normal_state(entry: CollectorEntry, tmp_path: Path) -> None:
    collector = build(entry, tmp_path)
    collected = collect_soundly(collector)

    assert isinstance(collected, Collected)
    assert collected.problems == ()
    assert collected.unsupported != ()
    assert collector.collect() == collected


def test_a_missing_dev_shm_is_a_normal_state(tmp_path: Path) -> None:
    collected = ShmCollector(shm=tmp_path / "shm").collect()

    assert collected.families == ()
    assert len(collected.unsupported) == 1
