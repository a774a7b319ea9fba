"""Bridge to Hugging Face Transformers, with the real Trainer on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridges_support import (
    AUTO,
    FAILED_SAVES,
    SAMPLES,
    SAVES,
    STEPS,
    VALIDATION_STEPS,
    Job,
    job_fixture,
    needs,
    run_job,
)

pytestmark = [needs("transformers", "accelerate"), pytest.mark.timeout(240)]

LOOPS_PROGRAM = """
from programs import loops, transformers_loops
loops.run_loops(transformers_loops)
"""
ended_job = job_fixture(LOOPS_PROGRAM, "transformers")

EXPECTED: dict[str, dict[str, float | None]] = {
    "pairs_of_completions": {STEPS: 5, SAMPLES: 9, "tokens_total mode=train": 2 * 9 * 8},
    "batches_of_several_steps": {
        STEPS: 2,
        "microbatches_total": 4,
        SAMPLES: 8,
        "tokens_total mode=train": 64,
    },
    "accumulation": {
        STEPS: 4,
        "microbatches_total": 8,
        SAMPLES: 16,
        "tokens_total mode=train": 128,
        "epochs_total": 2,
        "step_duration_seconds_count mode=train": 4,
        VALIDATION_STEPS: 2,
        SAVES: 2,
        "phase forward": 8,
        "phase backward": 8,
        "phase optimizer": 4,
        "phase validation": 2,
        "phase checkpoint_save_sync": 2,
        "gauge step": 4,
        "gauge step_target": 4,
    },
    # A failed save does not affect the next save.
    "failed_save": {FAILED_SAVES: 1, SAVES: 2, STEPS: 3},
    # The training after an exception is counted correctly.
    "failing_trainer": {STEPS: 2 + 1},
    # A loop starts at the step of its checkpoint.
    "resumed_trainer": {STEPS: 3, "gauge step": 5},
    # A NaN loss that the Trainer filters from its log is counted. A norm that is both observed and logged is counted once.
    "nonfinite_loss": {
        "nonfinite_total kind=loss value=nan": 1,
        "nonfinite_total kind=grad value=nan": 1,
    },
    # A loader that ends before its epoch loses no step.
    "loader_without_length": {STEPS: 4},
    "evaluation_and_prediction": {
        VALIDATION_STEPS: 1,
        "steps_total mode=test": 1,
        "run_info framework=transformers": 1,
    },
    # A Trainer with its own training step is counted through the hooks.
    "overridden_training_step": {STEPS: 2},
}


@pytest.mark.parametrize("run", EXPECTED)
def test_training_validation_and_saves_of_a_trainer_are_recorded(ended_job: Job, run: str) -> None:
    assert ended_job.differences(EXPECTED[run], run) == {}


def test_recomputed_flops_are_in_the_hardware_flops_only(
    ended_job: Job,
) -> None:
    model_flops = ended_job.value("training_model_flops_total", "accumulation") or 0
    hardware_flops = ended_job.value("training_hardware_flops_total", "accumulation") or 0

    assert model_flops > 0
    # Per parameter and token: 2 forward and 4 backward; recomputing adds 2.
    assert hardware_flops / model_flops == pytest.approx(8 / 6)


def test_losses_norms_and_phases_of_a_trainer_are_recorded(ended_job: Job) -> None:
    gauges = ended_job.gauges("accumulation")

    assert 3 < gauges["loss,mode=train"] < 5
    assert 3 < gauges["loss,mode=validation"] < 5
    assert gauges["grad_norm"] > 0
    assert "learning_rate" in gauges
    assert ended_job.gauges("overridden_training_step")["loss,mode=train"] > 0
    for phase, run, min_entries in (
        ("data_loading", "accumulation", 4),
        ("checkpoint_load", "resumed_trainer", 1),
    ):
        assert (ended_job.quantity_value(f"phase {phase}", run) or 0) >= min_entries


def test_exceptions_propagate_and_callbacks_can_be_pickled_and_copied(ended_job: Job) -> None:
    assert "raised amid an iteration" in ended_job.process.stdout
    assert "'ExporterCallback'" in ended_job.process.stdout.partition("copied ")[2].partition("\n")[0]


UNCHANGED_JOB = """
from programs.transformers_parts import recorded_trainer, small_trainer
trainer = {trainer}(max_steps=3, save_strategy="steps", save_steps=3, eval_strategy="steps", eval_steps=3)
trainer.train()
print("callbacks", [type(callback).__name__ for callback in trainer.callback_handler.callbacks])
"""


@pytest.mark.parametrize("trainer", ["small_trainer", "recorded_trainer"], ids=["unchanged", "explicit"])
def test_an_unchanged_job_is_recorded_once(tmp_path: Path, trainer: str) -> None:
    library = "transformers" if trainer == "recorded_trainer" else None
    ended_job = run_job(tmp_path, UNCHANGED_JOB.format(trainer=trainer), AUTO, library=library)

    assert "ExporterAutoCallback" in ended_job.process.stdout
    assert (
        ended_job.differences(
            {STEPS: 3, VALIDATION_STEPS: 1, "phase forward": 3, "phase backward": 3, SAVES: 1}
        )
        == {}
    )
    assert "already one" not in ended_job.process.stderr
