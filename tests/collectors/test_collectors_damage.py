"""The host collectors on damaged machines: whatever a file holds, the outcome is a documented one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from collectors_support import OF_TREE, REASONS, build, copy_of, read_from, value_of
from energy_support import nobody
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exporter.collectors.catalogue import CollectorEntry
from exporter.collectors.host.pressure import PressureCollector

__all__ = ["read_from"]

ReadFrom = Callable[[Path], Path]

TOUCHED = {
    "cpu": "proc/stat",
    "pressure": "pressure",
    "memory": "proc/meminfo proc/vmstat",
    "hardware": "cpu.max self/cgroup",
    "cgroup": "fs/cgroup self/cgroup mountinfo",
    "disk": "diskstats",
    "filesystem": "mountinfo",
    "nfs": "mountstats mountinfo",
    "lustre": "lustre mountinfo",
    "network": "net/dev net/snmp",
    "rdma": "infiniband",
}


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


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_text("some avg10=0.00 total=many\n"), "malformed"),
        (lambda path: path.write_text(""), "malformed"),
        (lambda path: path.chmod(0), "permission"),
        (lambda path: (path.unlink(), path.mkdir()), "unreadable"),
    ],
)
def test_a_damaged_file_costs_what_is_in_it(
    damage: Callable[[Path], object], reason: str, tmp_path: Path, read_from: ReadFrom
) -> None:
    for directory in (tmp_path, *tmp_path.parents):
        if "pytest-of-" in str(directory):
            directory.chmod(0o755)
    root = read_from(copy_of("node", tmp_path))
    damage(root / "proc/pressure/io")
    with nobody() if reason == "permission" else nullcontext():
        collected = PressureCollector().collect()

    assert value_of(collected, "host_pressure_memory_waiting_seconds_total") == 7.654321
    assert value_of(collected, "host_pressure_io_waiting_seconds_total") is None
    assert [found for found, _ in collected.problems] == [reason]
    assert "pressure/io" in collected.problems[0][1]


# Without diskstats psutil asks this machine's sysfs.
WITHOUT_DISK = [entry for entry in OF_TREE if entry.name != "disk"]


@pytest.mark.parametrize("entry", WITHOUT_DISK, ids=lambda entry: str(entry.name))
def test_a_machine_that_offers_nothing_is_a_normal_state(
    entry: CollectorEntry, tmp_path: Path, read_from: ReadFrom
) -> None:
    collector = build(entry, read_from(tmp_path))
    collected = collector.collect()

    assert collected.problems == []
    assert collected.unsupported
    assert list(collector.collect()) == list(collected)
