"""Bridge to DeepSpeed's engine, with the real package on the CPU, compared with the job's own log."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridges_support import AUTO, SAMPLES, SAVES, STEPS, needs, run_job

pytestmark = [needs("torch", "deepspeed"), pytest.mark.timeout(240)]

ENVIRONMENT = {
    **AUTO,
    "DS_ACCELERATOR": "cpu",
    "MASTER_ADDR": "127.0.0.1",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
}

IMPORTS = "import torch\nfrom programs.deepspeed_parts import engine_of, train\n"


TRAIN_AND_SAVE = """
train(engine)
engine.save_checkpoint("saved")
print("gauges", json.dumps(gauges()))
"""


def test_a_step_is_a_step_of_the_engine_and_the_loss_is_not_divided(tmp_path: Path) -> None:
    ended_job = run_job(
        tmp_path, f"{IMPORTS}engine = engine_of(){TRAIN_AND_SAVE}", ENVIRONMENT, library="torch"
    )

    expected = {STEPS: 3, "microbatches_total": 12, SAMPLES: 48, SAVES: 1, "run_info framework=deepspeed": 1}
    gauges = ended_job.gauges("gauges")
    assert ended_job.differences(expected) == {}
    assert gauges["loss,mode=train"] == pytest.approx(ended_job.own_value("loss"), rel=1e-5)
    assert gauges["learning_rate"] == 0.125
    assert gauges["step"] == 3


def test_norms_and_losses_of_an_engine_with_the_optimizer_of_zero_are_recorded(tmp_path: Path) -> None:
    program = f"{IMPORTS}engine = engine_of(zero_optimization={{'stage': 2}}){TRAIN_AND_SAVE}"
    ended_job = run_job(tmp_path, program, ENVIRONMENT, library="torch")

    gauges = ended_job.gauges("gauges")
    assert ended_job.differences({STEPS: 3, SAMPLES: 48, SAVES: 1}) == {}
    assert gauges["loss,mode=train"] == pytest.approx(ended_job.own_value("loss"), rel=1e-5)
    assert gauges["grad_norm"] == pytest.approx(ended_job.own_value("norm"), rel=1e-5)


def test_steps_without_finite_gradients_are_skipped_steps(tmp_path: Path) -> None:
    fp16_options = "fp16={'enabled': True, 'initial_scale_power': 40, 'hysteresis': 1}"
    program = f"""{IMPORTS}
engine = engine_of({fp16_options}, zero_optimization={{'stage': 2}})
train(engine, torch.float16)
print("own skipped", engine.skipped_steps)
print("gauges", json.dumps(gauges()))
"""
    ended_job = run_job(tmp_path, program, ENVIRONMENT, library="torch")

    assert ended_job.own_value("skipped") == 3
    assert ended_job.differences({STEPS: 3, "skipped_steps_total reason=overflow": 3}) == {}
    assert ended_job.gauges("gauges")["loss_scale"] == ended_job.own_value("scale")
