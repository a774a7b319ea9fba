"""Bridge to Keras 3, with the real package on the torch backend."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridges_support import (
    AUTO,
    FAILED_SAVES,
    SAVES,
    STEPS,
    VALIDATION_STEPS,
    Job,
    job_fixture,
    needs,
    run_job,
)

pytestmark = [needs("keras", "torch"), pytest.mark.timeout(180)]

PRELUDE = """
import os
os.environ["KERAS_BACKEND"] = "torch"
"""

LOOPS_PROGRAM = """
from programs import keras_loops, loops
loops.run_loops(keras_loops)
"""
ended_job = job_fixture(PRELUDE + LOOPS_PROGRAM, "torch")

EXPECTED: dict[str, dict[str, float | None]] = {
    "ordinary": {
        STEPS: 6,
        VALIDATION_STEPS: 6,
        "epochs_total": 2,
        "phase validation": 2,
        SAVES: 2,
        "gauge step": 6,
        "gauge step_target": 6,
    },
    # A second loop continues at the end of the first.
    "several_loops": {"gauge step": 9, "gauge step_target": 9, "steps_total mode=test": 3},
    # The call of `fit` after an exception is counted correctly.
    "failing_fit": {STEPS: 2 + 3},
    "failed_save": {SAVES: 2, FAILED_SAVES: 2, STEPS: 6},
    "nonfinite_targets": {"nonfinite_total kind=loss value=nan": 3},
    "train_function_is_kept": {STEPS: 3},
}


@pytest.mark.parametrize("run", EXPECTED)
def test_training_and_evaluation_of_a_model_are_recorded(ended_job: Job, run: str) -> None:
    assert ended_job.differences(EXPECTED[run], run) == {}


def test_losses_are_recorded_and_exceptions_propagate(ended_job: Job) -> None:
    assert ended_job.gauges("ordinary")["loss,mode=train"] > 0
    assert ended_job.gauges("ordinary")["loss,mode=validation"] > 0
    assert (ended_job.quantity_value("phase data_loading", "ordinary") or 0) >= 6
    assert "raised amid an epoch" in ended_job.process.stdout


def test_an_unchanged_job_that_continues_after_an_exception_is_recorded_as_finished(
    tmp_path: Path,
) -> None:
    program = """
import keras
from programs.keras_parts import FailingCallback, fit
try:
    fit([FailingCallback()])
except ZeroDivisionError:
    model = fit([keras.callbacks.ModelCheckpoint("model.keras")], epochs=2)
print("asynchronous", keras.callbacks.CallbackList([], model=model)._async_train)
"""
    ended_job = run_job(tmp_path, PRELUDE + program, AUTO, library="torch")

    assert ended_job.differences({STEPS: 2 + 6, SAVES: 2, "uncommitted_seconds": 0}) == {}
    assert (ended_job.value("training_productive_seconds_total") or 0) > 0
    assert "asynchronous True" in ended_job.process.stdout
