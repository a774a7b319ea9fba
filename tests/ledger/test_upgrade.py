"""Upgrade: the totals of the previous release continue.

tests/data/state contains the state files of the run `llama`, written by the previous release. The run has an earlier attempt and a
running attempt, and the energy of a GPU.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from energy_support import EnergyNode, gpu_reading
from ledger_support import Clock, SimulatedSidecar

from exporter.collectors.job import EnergyReading
from exporter.ledger.goodput import accounting
from exporter.ledger.state.codec import from_line
from exporter.ledger.state.files import read_state_file
from exporter.recording.values import END_REASONS

STATE_FILES = Path(__file__).parents[1] / "data/state"
SAVED_AT = Clock(wall=1_700_000_030.0, monotonic=129.0)
RUN_LABELS = {"run": "llama"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    shutil.copytree(STATE_FILES, tmp_path / "ledger")
    return tmp_path


def test_totals_and_goodput_continue(directory: Path) -> None:
    sidecar = SimulatedSidecar(directory, clock=Clock(SAVED_AT.wall + 1.0, SAVED_AT.monotonic + 1.0))
    pages = [sidecar.collect_after(1.0) for _ in range(6)]
    page = pages[-1]

    assert page.count("loss", rank="0", **RUN_LABELS) == 14
    assert page.get("training_productive_seconds_total", **RUN_LABELS) == 5
    assert page.get("training_badput_seconds_total", cause="downtime", **RUN_LABELS) == 4.5
    assert page.get("training_lost_steps_total", **RUN_LABELS) == 3
    assert page.get("training_restarts_total", reason="signal", **RUN_LABELS) == 1
    assert sidecar.state.damaged_files == sidecar.state.errors == 0


class Node(EnergyNode):
    """Simulated machine with the run and the GPU of the state."""

    run = "llama"

    def readings(self) -> Sequence[EnergyReading]:
        return (gpu_reading(3000.0, self.clock.monotonic),)


def test_energy_carbon_and_cost_continue(directory: Path) -> None:
    node = Node(directory, clock=Clock(SAVED_AT.wall + 5.0, SAVED_AT.monotonic + 5.0))
    page = node.collect()

    gpu_labels = {"component": "gpu", **RUN_LABELS}
    assert page.get("training_energy_joules_total", method="exclusive", **gpu_labels) == 1500
    assert page.get("training_carbon_grams_total", **gpu_labels) == pytest.approx(0.18)
    cost_labels = {"kind": "device_time", "currency": "EUR", **RUN_LABELS}
    assert page.get("training_cost_total", **cost_labels) == pytest.approx(0.0185)
    assert page.get("training_wasted_energy_joules_total", cause="lost_progress", **RUN_LABELS) == 500
    phase_labels = {"phase": "iteration", "method": "exclusive", **gpu_labels}
    assert page.get("training_phase_energy_joules_total", **phase_labels) == 1000


def test_a_cause_that_the_state_lacks_starts_at_zero(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounting, "BADPUT_CAUSES", (*accounting.BADPUT_CAUSES, "evaluation"))
    monkeypatch.setattr(f"{accounting.__name__}.END_REASONS", (*END_REASONS, "firmware"))
    (path,) = directory.glob("ledger/goodput*")
    goodput = from_line(accounting.Goodput, read_state_file(path).content)

    assert goodput.badput["evaluation"] == 0
    assert goodput.badput["downtime"] == 4.5
    assert goodput.interruptions["firmware"] == 0


def test_the_state_without_a_cause_is_published(directory: Path) -> None:
    for path in directory.glob("ledger/goodput*"):
        state_file = read_state_file(path)
        assert b'"hang":0.0,' in state_file.content
        changed_content = state_file.content.replace(b'"hang":0.0,', b"").replace(
            b'"unknown":0', b'"newer":2'
        )
        sidecar = SimulatedSidecar(directory, clock=Clock(SAVED_AT.wall + 1.0, SAVED_AT.monotonic + 1.0))
        sidecar.state.claim(state_file.key)
        sidecar.state.save(state_file.key, changed_content)
        sidecar.state.close()
    sidecar = SimulatedSidecar(directory, clock=Clock(SAVED_AT.wall + 1.0, SAVED_AT.monotonic + 1.0))
    pages = [sidecar.collect_after(1.0) for _ in range(6)]
    page = pages[-1]

    assert page.get("training_badput_seconds_total", cause="hang", **RUN_LABELS) == 0
    assert page.get("training_interruptions_total", reason="newer", **RUN_LABELS) == 2
