"""What `check` says about a machine, on recorded /proc and /sys trees."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from exporter.cli import probes
from exporter.cli.configuration import Configuration
from exporter.cli.probes import Finding, Machine, cgroup, nvidia, rapl, shared_memory
from exporter.cli.sections import GpuSection


def make(path: Path, text: str = "") -> Path:
    """A file and its directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(Configuration(), {}, tmp_path)


def test_a_machine_with_nothing_is_in_order_and_said_to_have_nothing(machine: Machine) -> None:
    for probe in (rapl, nvidia):
        (found,) = probe(machine)
        assert (found.status, "absent" in found.found) == ("ok", True)


def test_control_groups_of_either_version_are_recognised(machine: Machine) -> None:
    make(machine.root / "sys/fs/cgroup/memory/memory.limit_in_bytes")
    first = list(cgroup(machine))
    make(machine.root / "sys/fs/cgroup/cgroup.controllers")

    assert first == [Finding("ok", "cgroup", "version 1")]
    assert list(cgroup(machine)) == [Finding("ok", "cgroup", "version 2")]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_energy_counters_for_root_only_are_told_with_the_command_that_opens_them(machine: Machine) -> None:
    counter = make(machine.root / "sys/class/powercap/intel-rapl:0/energy_uj", "1\n")
    counter.chmod(0)

    (finding,) = rapl(machine)

    assert (finding.status, f"chmod a+r {counter}" in finding.remedy) == ("warn", True)


def test_the_nvidia_driver_is_named_without_being_touched(machine: Machine) -> None:
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Tue Jan  7 2025\nGCC version:\n"
    make(machine.root / "proc/driver/nvidia/version", version)

    (finding,) = nvidia(machine)

    assert "570.86.10" in finding.found


def test_a_machine_that_is_played_is_told(machine: Machine) -> None:
    played = dataclasses.replace(Configuration(), gpu=GpuSection(replay="h100"))
    (finding,) = nvidia(dataclasses.replace(machine, configuration=played))

    assert finding.status == "ok"
    assert "the described machine h100 is played" in finding.found


def test_missing_shared_memory_is_told_with_a_remedy(machine: Machine) -> None:
    (finding,) = shared_memory(machine)

    assert (finding.status, "--feed.dir" in finding.remedy) == ("warn", True)


def test_a_default_directory_that_nobody_can_make_is_a_failure(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "default_directory", lambda uid: machine.root / f"missing/exporter-{uid}")
    monkeypatch.setattr(probes, "is_trusted", lambda path, uid: False)

    (finding,) = probes.feed_directory(machine)

    assert (finding.status, "cannot be created" in finding.found) == ("FAIL", True)
