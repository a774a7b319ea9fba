"""Capturing a machine: what is written down can be replayed, and shows the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gpu_support import captured, machine, replay, small

from exporter.replay.description import MachineDescription
from exporter.replay.machines import load_machine


def shown(described: MachineDescription) -> set[tuple[str, ...]]:
    """The families of the first GPU, with their further labels."""
    families = replay(described, 70, details=True, visible="0").families()
    return {
        (family.name, *(text for name, text in sorted(sample.labels.items()) if name not in {"gpu", "uuid"}))
        for family in families
        if family.name not in {"gpu", "gpu_mig"}
        for sample in family.samples
        if "gpu" in sample.labels and "mig_uuid" not in sample.labels
    }


@pytest.mark.parametrize("name", ["h100", "t4", "old-driver", "a100-mig"])
def test_a_captured_machine_shows_what_the_real_one_does(name: str) -> None:
    real = shown(load_machine(name))
    again = shown(machine(captured(load_machine(name))))

    assert len(real) > 30
    assert again == real


def test_counters_are_written_down_with_their_pace() -> None:
    found = machine(captured(small())).plain()["gpus"]

    assert found[0]["values"]["energy"]["idle"] == 100_000
    assert found[0]["values"]["energy"]["counter_from"] > 5000
    assert found[0]["values"]["power"] == 100_000
    assert [gpu["name"] for gpu in found] == ["Small", "Small"]


def test_a_card_that_does_not_answer_is_left_out() -> None:
    lost = small("\ntimeline:\n  - {gpus: [0], lost: true}\n")

    assert len(machine(captured(lost)).plain()["gpus"]) == 1


def test_without_the_library_it_says_so() -> None:
    if any(Path("/dev").glob("nvidia*")):
        pytest.skip("this machine has NVIDIA's driver")
    done = subprocess.run(
        [sys.executable, "-m", "exporter.replay.capture"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "NVML does not answer: nvmlInit: library_not_found\n"
