"""Bridges to Accelerate and Lightning Fabric, with the real packages on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridges_support import AUTO, FAILED_SAVES, SAMPLES, SAVES, STEPS, Job, job_fixture, needs, run_job

pytestmark = pytest.mark.timeout(180)

LOOPS_PROGRAM = """
from exporter.bridges import install
install("accelerate")
from programs import accelerate_loops, loops
loops.run_loops(accelerate_loops)
"""
ended_job = job_fixture(LOOPS_PROGRAM, "torch")

EXPECTED: dict[str, dict[str, float | None]] = {
    # Accumulated batches are one step; logged values are recorded.
    "logged_values": {
        STEPS: 4,
        "microbatches_total": 8,
        SAMPLES: 32,
        "phase backward": 8,
        "phase optimizer": 4,
        "gauge loss,mode=validation": 0.5,
        "gauge learning_rate": 0.25,
    },
    # A saved state is a checkpoint and saved weights are not. A failed save does not affect later saves.
    "saves_and_load": {
        SAVES: 2,
        FAILED_SAVES: 1,
        "phase checkpoint_save_sync": 4,
        "phase checkpoint_load": 1,
    },
    # The loop after an exception is counted correctly.
    "failing_loop": {STEPS: 2 + 4},
}


@needs("accelerate")
@pytest.mark.parametrize("run", EXPECTED)
def test_an_accelerate_loop_is_recorded(ended_job: Job, run: str) -> None:
    assert ended_job.differences(EXPECTED[run], run) == {}


@needs("accelerate")
def test_the_loss_is_recorded_before_its_division_and_exceptions_propagate(ended_job: Job) -> None:
    gauges = ended_job.gauges("logged_values")

    # The first loop is `logged_values`. Its logged `train_loss` of 99 is not the loss of a step.
    assert gauges["loss,mode=train"] == pytest.approx(ended_job.own_value("loss"), rel=1e-5)
    assert gauges["grad_norm"] > 0
    assert "raised amid an iteration" in ended_job.process.stdout


@needs("accelerate")
def test_an_unchanged_accelerate_job_is_recorded(tmp_path: Path) -> None:
    program = """
from programs.accelerate_parts import train
train(gradient_accumulation_steps=2)[0].save_state("state")
"""
    ended_job = run_job(tmp_path, program, AUTO, library="torch")

    assert ended_job.differences({STEPS: 2, SAVES: 1, "run_info framework=accelerate": 1}) == {}


# Fabric -------------------------------------------------------------------------------------------------------

FABRIC_PROGRAM = """
import {package}
from programs.fabric_parts import train
callbacks = []
if {explicit}:
    from exporter.bridges import fabric as bridge
    callbacks.append(bridge.callback())
train({package!r}, callbacks)
"""


@needs("lightning")
@pytest.mark.parametrize(("package", "explicit"), [("lightning.fabric", True), ("lightning_fabric", False)])
def test_a_fabric_loop_is_recorded_with_its_checkpoints(tmp_path: Path, package: str, explicit: bool) -> None:
    program = FABRIC_PROGRAM.format(package=package, explicit=explicit)
    library = "lightning" if explicit else "torch"
    ended_job = run_job(tmp_path, program, {} if explicit else AUTO, library=library)

    steps = {STEPS: 4, "phase backward": 4, "phase optimizer": 4, "run_info framework=fabric": 1}
    assert (
        ended_job.differences(
            {**steps, SAVES: 1, FAILED_SAVES: 1, "phase checkpoint_save_sync": 3, "phase checkpoint_load": 1}
        )
        == {}
    )
