"""Bridge to PyTorch Ignite: an unchanged job with the real package, compared with the log of the job."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridges_support import AUTO, SAMPLES, SAVES, STEPS, VALIDATION_STEPS, needs, run_job

pytestmark = [needs("torch", "ignite"), pytest.mark.timeout(120)]

SETUP_CODE = """
import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from torch.utils.data import DataLoader, TensorDataset

def pairs(samples):
    return TensorDataset(torch.randn(samples, 4), torch.randn(samples, 1))

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
evaluator = create_supervised_evaluator(model)

def train(loader, **options):
    trainer = create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss, **options)
    @trainer.on(Events.EPOCH_COMPLETED)
    def validate(engine):
        evaluator.run(DataLoader(pairs(140), batch_size=20))
    trainer.run(loader, max_epochs=3)
    return trainer
"""
TRAIN_AND_SAVE_CODE = """
trainer = train(DataLoader(pairs(400), batch_size=20))
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "whole.pt")
print("own loss", trainer.state.output)
print("gauges", json.dumps(gauges()))
"""
ACCUMULATION_CODE = """
train(DataLoader(pairs(400), batch_size=20), gradient_accumulation_steps=4)
"""
LIST_OF_BATCHES_CODE = """
batches = [(torch.randn(20, 4), torch.randn(20, 1)) for _ in range(5)]
trainer = create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss)
trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: evaluator.run(batches[:2]))
trainer.run(batches, max_epochs=2)
"""


def test_steps_samples_epochs_and_validations_match_the_log_of_the_job(tmp_path: Path) -> None:
    ended_job = run_job(tmp_path, SETUP_CODE + TRAIN_AND_SAVE_CODE, AUTO, library="torch")

    expected = {
        STEPS: 60,
        SAMPLES: 1200,
        VALIDATION_STEPS: 21,
        "epochs_total": 3,
        "phase validation": 3,
        SAVES: 1,
    }
    assert ended_job.differences({**expected, "run_info framework=ignite": 1}) == {}
    assert ended_job.gauges("gauges")["epoch"] == 3
    assert ended_job.gauges("gauges")["loss,mode=train"] == pytest.approx(
        ended_job.own_value("loss"), rel=1e-5
    )


def test_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    ended_job = run_job(tmp_path, SETUP_CODE + ACCUMULATION_CODE, AUTO, library="torch")

    assert (
        ended_job.differences({STEPS: 15, "microbatches_total": 60, SAMPLES: 1200, VALIDATION_STEPS: 21})
        == {}
    )


def test_batches_of_a_list_are_counted_like_those_of_a_loader(tmp_path: Path) -> None:
    ended_job = run_job(tmp_path, SETUP_CODE + LIST_OF_BATCHES_CODE, AUTO, library="torch")

    assert ended_job.differences({STEPS: 10, SAMPLES: 200, VALIDATION_STEPS: 4, "epochs_total": 2}) == {}
