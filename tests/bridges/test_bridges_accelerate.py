"""The bridges to Accelerate and to Lightning Fabric, whose loops are the job's own; with the real ones on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridges_support import AUTO, Job, job, wanted

pytestmark = pytest.mark.timeout(180)

PRELUDE = """
import contextlib, logging, os, sys, tempfile, warnings
warnings.simplefilter("ignore")
import torch
from torch.utils.data import DataLoader, TensorDataset
ROOT = tempfile.mkdtemp(dir=os.environ["EXPORTER_FEED_DIR"] + "/..")

def parts(samples=16):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    return model, optimizer, DataLoader(TensorDataset(torch.randn(samples, 4)), batch_size=4)
"""

ACCELERATE = """
from accelerate import Accelerator

def loop(accelerator, samples=16, epochs=1, fail=False):
    model, optimizer, loader = accelerator.prepare(*parts(samples))
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
    return model
"""

SCENARIOS = """
from exporter.bridges import install, torch_loop
install("accelerate")

def tracked():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loop(accelerator, epochs=2)
    accelerator.log({"train_loss": 99.0, "eval_loss": 0.5, "lr": 0.25, "epoch": 2}, step=4)
    accelerator.end_training()
    print("tracked", gauges())

def saves():
    accelerator = Accelerator(cpu=True)
    model = loop(accelerator)
    accelerator.save_state(f"{ROOT}/state")
    accelerator.save_model(model, f"{ROOT}/weights")
    with contextlib.suppress(Exception):
        accelerator.save_state("/proc/nowhere")
    accelerator.save_state(f"{ROOT}/again")
    accelerator.load_state(f"{ROOT}/state")

def failing():
    try:
        loop(Accelerator(cpu=True), fail=True)
    except ZeroDivisionError as error:
        print("raised", error)
    loop(Accelerator(cpu=True))

for scenario in (tracked, saves, failing):
    torch_loop.ACTIVE.fallback.yields()
    begin(scenario.__name__)
    scenario()
torch_loop.ACTIVE.fallback.yields()
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return job(tmp_path_factory.mktemp("accelerate"), PRELUDE + ACCELERATE + SCENARIOS)


STEPS, SAVED, FAILED = (
    "steps_total mode=train",
    "checkpoints_total result=ok",
    "checkpoints_total result=failed",
)
EXPECTED: dict[str, dict[str, float | None]] = {
    # Accumulated batches are one step; what the job logs is taken.
    "tracked": {
        STEPS: 4,
        "microbatches_total": 8,
        "samples_total mode=train": 32,
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
def test_what_an_accelerate_loop_does_is_told(told: Job, run: str) -> None:
    assert told.numbers(run, EXPECTED[run]) == EXPECTED[run]


@wanted("accelerate")
def test_the_loss_is_the_one_before_it_is_divided_and_no_notice_was_given(told: Job) -> None:
    gauges = told.told()["tracked"]

    assert 0 < gauges["training.loss,mode=train"] < 50
    assert gauges["training.grad_norm"] > 0
    assert "raised amid an iteration" in told.done.stdout
    assert "training_misuse_total" not in told.page
    assert "exporter" not in told.done.stderr


@wanted("accelerate")
def test_an_accelerate_job_that_is_not_changed_is_told(tmp_path: Path) -> None:
    program = "accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)\nloop(accelerator)\n"
    program += "accelerator.save_state(f'{ROOT}/state')"
    told = job(tmp_path, PRELUDE + ACCELERATE + program, AUTO)

    assert told.value("training_steps_total", mode="train") == 2
    assert told.value("training_checkpoints_total", result="ok") == 1
    assert 'framework="accelerate"' in told.page


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
fabric.save(f"{{ROOT}}/whole.ckpt", {{"model": model, "optimizer": optimizer, "step": 4}})
fabric.save(f"{{ROOT}}/weights.ckpt", {{"model": model}})
with contextlib.suppress(Exception):
    fabric.save("/proc/nowhere/x", {{"model": model, "optimizer": optimizer}})
fabric.load(f"{{ROOT}}/whole.ckpt", {{"model": model, "optimizer": optimizer}})
"""


@wanted("lightning")
@pytest.mark.parametrize(("package", "explicit"), [("lightning.fabric", True), ("lightning_fabric", False)])
def test_a_fabric_loop_is_told_with_its_checkpoints(tmp_path: Path, package: str, explicit: bool) -> None:
    program = PRELUDE + FABRIC.format(package=package, explicit=explicit)
    told = job(tmp_path, program, {} if explicit else AUTO)

    assert told.value("training_steps_total", mode="train") == 4
    assert told.phases()["backward"] == told.phases()["optimizer"] == 4
    assert told.value("training_checkpoints_total", result="ok") == 1
    assert told.value("training_checkpoints_total", result="failed") == 1
    assert told.phases()["checkpoint_save_sync"] == 3
    assert told.phases()["checkpoint_load"] == 1
    assert 'framework="fabric"' in told.page
