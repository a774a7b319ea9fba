"""Bridge to fastai: an optimizer of the shape of fastai's, with torch's loaders and backward passes."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridges_support import AUTO, SAMPLES, SAVES, STEPS, VALIDATION_STEPS, needs, run_job

pytestmark = [needs("torch"), pytest.mark.timeout(120)]

OPTIMIZER_MODULE = """
class Optimizer:
    def __init__(self, parameters):
        self.parameters = list(parameters)
    @property
    def param_groups(self):
        return [{"params": self.parameters, "lr": 0.125}]
    def step(self, closure=None):
        for parameter in self.parameters:
            parameter.data.add_(parameter.grad, alpha=-0.125)
    def state_dict(self):
        return {"state": [{} for _ in self.parameters], "hypers": [{"lr": 0.125}]}
    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None
"""
LEARNER_PROGRAM = """
import torch
from fastai.optimizer import Optimizer
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(4, 1)
optimizer = Optimizer(model.parameters())
for _ in range(2):
    model.train()
    for (batch,) in DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=4):
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        for (batch,) in DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=4):
            model(batch)
torch.save({"model": model.state_dict(), "opt": optimizer.state_dict()}, "last.pth")
print("gauges", json.dumps({**gauges(), "own loss": loss.item()}))
"""


def test_steps_of_an_optimizer_that_does_not_derive_from_torch_are_counted(tmp_path: Path) -> None:
    package = tmp_path / "fastai"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '2.8'\n")
    (package / "optimizer.py").write_text(OPTIMIZER_MODULE)
    ended_job = run_job(tmp_path, LEARNER_PROGRAM, AUTO, library="torch")

    gauges = ended_job.gauges("gauges")
    expected = {
        STEPS: 20,
        SAMPLES: 80,
        VALIDATION_STEPS: 6,
        SAVES: 1,
        "epochs_total": 2,
        "run_info framework=fastai": 1,
    }
    assert ended_job.differences(expected) == {}
    assert gauges["loss,mode=train"] == pytest.approx(gauges["own loss"], rel=1e-5)
    assert gauges["learning_rate"] == 0.125
