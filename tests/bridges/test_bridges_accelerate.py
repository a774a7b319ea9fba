"""Bridges for Accelerate and Lightning Fabric, with the real packages on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridges_support import AUTO, FAILED, SAMPLES, SAVED, STEPS, Job, job, loops, wanted

pytestmark = pytest.mark.timeout(180)

PRELUDE = """
import contextlib, logging, warnings
warnings.simplefilter("ignore")
import torch
from torch.utils.data import DataLoader, TensorDataset

def parts():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    return model, optimizer, DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4)
"""

ACCELERATE = (
    PRELUDE
    + """
from accelerate import Accelerator

def train(epochs=1, fail=False, **options):
    accelerator = Accelerator(cpu=True, **options)
    model, optimizer, loader = accelerator.prepare(*parts())
    for epoch in range(epochs):
        for index, (batch,) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = model(batch).pow(2).mean()
                if fail and index == 2:
                    raise ZeroDivisionError("amid an iteration")
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return accelerator, model
"""
)

LOOPS = """
from exporter.bridges import install
install("accelerate")

def tracked():
    accelerator, _ = train(epochs=2, gradient_accumulation_steps=2)
    accelerator.log({"train_loss": 99.0, "eval_loss": 0.5, "lr": 0.25, "epoch": 2}, step=4)
    accelerator.end_training()

def saves():
    accelerator, model = train()
    accelerator.save_state("state")
    accelerator.save_model(model, "weights")
    with contextlib.suppress(Exception):
        accelerator.save_state("/proc/nowhere")
    accelerator.save_state("again")
    accelerator.load_state("state")

def failing():
    try:
        train(fail=True)
    except ZeroDivisionError as error:
        print("raised", error)
    train()
"""
recording = loops(ACCELERATE, LOOPS)

EXPECTED: dict[str, dict[str, float | None]] = {
    # Accumulated batches are one step; logged values are recorded.
    "tracked": {
        STEPS: 4,
        "microbatches_total": 8,
        SAMPLES: 32,
        "phase backward": 8,
        "phase optimizer": 4,
        "gauge loss,mode=validation": 0.5,
        "gauge learning_rate": 0.25,
    },
    # A saved state is a checkpoint, saved weights are not, and a failure hinders nothing.
    "saves": {SAVED: 2, FAILED: 1, "phase checkpoint_save_sync": 4, "phase checkpoint_load": 1},
    # The next loop after an exception counts right.
    "failing": {STEPS: 2 + 4},
}


@wanted("accelerate")
@pytest.mark.parametrize("run", EXPECTED)
def test_an_accelerate_loop_is_recorded(recording: Job, run: str) -> None:
    assert recording.unlike(EXPECTED[run], run) == {}


@wanted("accelerate")
def test_the_loss_is_recorded_before_its_division_and_exceptions_propagate(recording: Job) -> None:
    gauges = recording.gauges("tracked")

    assert 0 < gauges["loss,mode=train"] < 50
    assert gauges["grad_norm"] > 0
    assert "raised amid an iteration" in recording.done.stdout


@wanted("accelerate")
def test_an_unchanged_accelerate_job_is_recorded(tmp_path: Path) -> None:
    recording = job(
        tmp_path, ACCELERATE + "train(gradient_accumulation_steps=2)[0].save_state('state')", AUTO
    )

    assert recording.unlike({STEPS: 2, SAVED: 1, "run_info framework=accelerate": 1}) == {}


# Fabric -------------------------------------------------------------------------------------------------------

FABRIC = """
from {package} import Fabric
logging.getLogger("{package}").setLevel(logging.ERROR)
callbacks = []
if {explicit}:
    from exporter.bridges import fabric as bridge
    callbacks.append(bridge.callback())
fabric = Fabric(accelerator="cpu", devices=1, callbacks=callbacks)
fabric.launch()
model, optimizer, loader = parts()
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(loader)
for index, (batch,) in enumerate(loader):
    loss = model(batch).pow(2).mean()
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
fabric.save("whole.ckpt", {{"model": model, "optimizer": optimizer, "step": 4}})
fabric.save("weights.ckpt", {{"model": model}})
with contextlib.suppress(Exception):
    fabric.save("/proc/nowhere/x", {{"model": model, "optimizer": optimizer}})
fabric.load("whole.ckpt", {{"model": model, "optimizer": optimizer}})
"""


@wanted("lightning")
@pytest.mark.parametrize(("package", "explicit"), [("lightning.fabric", True), ("lightning_fabric", False)])
def test_a_fabric_loop_is_recorded_with_its_checkpoints(tmp_path: Path, package: str, explicit: bool) -> None:
    program = PRELUDE + FABRIC.format(package=package, explicit=explicit)
    recording = job(tmp_path, program, {} if explicit else AUTO)

    steps = {STEPS: 4, "phase backward": 4, "phase optimizer": 4, "run_info framework=fabric": 1}
    assert (
        recording.unlike(
            {**steps, SAVED: 1, FAILED: 1, "phase checkpoint_save_sync": 3, "phase checkpoint_load": 1}
        )
        == {}
    )
