"""What `check` says about a machine, on recorded /proc and /sys trees."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from exporter.cli import probes
from exporter.cli.configuration import Configuration
from exporter.cli.finding import Surroundings, bytes_text
from exporter.cli.gpu_settings import GpuSection
from exporter.cli.machine_probes import cgroup, nvidia, rapl, shared_memory


def around(tmp_path: Path) -> Surroundings:
    """A machine in a directory."""
    return Surroundings(proc=tmp_path / "proc", sys=tmp_path / "sys", shm=tmp_path / "shm", environ={})


def make(path: Path, text: str = "") -> Path:
    """A file and its directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_machine_with_nothing_is_in_order_and_said_to_have_nothing(tmp_path: Path) -> None:
    found = [finding for probe in (rapl, nvidia) for finding in probe(Configuration(), around(tmp_path))]

    assert [finding.status for finding in found] == ["ok", "ok"]
    assert ["absent" in finding.found for finding in found] == [True, True]


def test_control_groups_of_either_version_are_recognised(tmp_path: Path) -> None:
    make(tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes")
    (first,) = cgroup(Configuration(), around(tmp_path))
    make(tmp_path / "sys/fs/cgroup/cgroup.controllers")
    (second,) = cgroup(Configuration(), around(tmp_path))

    assert (first.status, first.found) == ("ok", "version 1")
    assert (second.status, second.found) == ("ok", "version 2")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_energy_counters_for_root_only_are_told_with_the_command_that_opens_them(tmp_path: Path) -> None:
    counter = make(tmp_path / "sys/class/powercap/intel-rapl:0/energy_uj", "1\n")
    counter.chmod(0)

    (finding,) = rapl(Configuration(), around(tmp_path))

    assert (finding.status, f"chmod a+r {counter}" in finding.remedy) == ("warn", True)


def test_readable_energy_counters_are_counted(tmp_path: Path) -> None:
    make(tmp_path / "sys/class/powercap/intel-rapl:0/energy_uj", "1\n")
    make(tmp_path / "sys/class/powercap/intel-rapl:0:0/energy_uj", "1\n")

    (finding,) = rapl(Configuration(), around(tmp_path))

    assert (finding.status, finding.found) == ("ok", "2 energy counters are readable")


def test_the_nvidia_driver_is_named_without_being_touched(tmp_path: Path) -> None:
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Tue Jan  7 2025\nGCC version:\n"
    make(tmp_path / "proc/driver/nvidia/version", version)

    (finding,) = nvidia(Configuration(), around(tmp_path))

    assert "570.86.10" in finding.found


def test_shared_memory_of_a_container_without_a_setting_is_small(tmp_path: Path) -> None:
    (finding,) = shared_memory(Configuration(), around(tmp_path))

    assert (finding.status, "--feed.dir" in finding.remedy) == ("warn", True)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (64 << 20, "64 MiB"), (1536, "1.5 KiB"), (3 << 40, "3 TiB")]
)
def test_sizes_are_written_for_people(count: int, text: str) -> None:
    assert bytes_text(count) == text


def test_a_default_directory_that_nobody_can_make_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "default_directory", lambda uid: tmp_path / f"missing/exporter-{uid}")
    monkeypatch.setattr(probes, "is_trusted", lambda path, uid: False)

    (finding,) = probes.feed_directory(Configuration(), around(tmp_path))

    assert (finding.status, "cannot be created" in finding.found) == ("FAIL", True)


def test_a_machine_that_is_played_is_told(tmp_path: Path) -> None:
    played = dataclasses.replace(Configuration(), gpu=GpuSection(replay="h100"))
    (finding,) = nvidia(played, around(tmp_path))

    assert finding.status == "ok"
    assert "the described machine h100 is played" in finding.found
