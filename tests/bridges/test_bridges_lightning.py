"""The bridge to PyTorch Lightning, with the real Trainer on a CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from bridges_support import AUTO, LIGHTNING, Job, job, wanted

import exporter_auto

pytestmark = [wanted("lightning"), pytest.mark.timeout(240)]

PRELUDE = """
import contextlib, copy, logging, os, pickle, sys, tempfile, warnings
warnings.simplefilter("ignore")
import torch
import lightning.pytorch as pl
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from exporter.bridges import lightning as bridge
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)
ROOT = tempfile.mkdtemp(dir=os.environ["EXPORTER_FEED_DIR"] + "/..")

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.layer(batch[0]).pow(2).mean()
    def validation_step(self, batch, index):
        pass
    test_step = validation_step
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.125)

def loader(samples, size=4, **options):
    return DataLoader(TensorDataset(torch.randn(samples, 4)), batch_size=size, **options)

def trainer(**options):
    options = {"max_epochs": 1, "enable_checkpointing": False, "num_sanity_val_steps": 0, **options}
    callbacks = options.pop("callbacks", []) + [bridge.callback()]
    return pl.Trainer(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
                      devices=1, default_root_dir=ROOT, callbacks=callbacks, **options)
"""

SCENARIOS = """
def accumulation():
    trainer(accumulate_grad_batches=2, max_epochs=2, num_sanity_val_steps=1).fit(Module(), loader(20), loader(8))

def two_optimizers():
    class Gan(Module):
        automatic_optimization = False
        def training_step(self, batch, index):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.layer(batch[0]).mean())
                optimizer.step()
        def configure_optimizers(self):
            return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.Adam(self.parameters())]
    made = trainer(max_epochs=1)
    made.fit(Gan(), loader(12))
    path = f"{ROOT}/gan.ckpt"
    made.save_checkpoint(path)
    begin("two_optimizers_resumed")
    trainer(max_epochs=2).fit(Gan(), loader(12), ckpt_path=path)
    print("two_optimizers_resumed", gauges())

def failed_save():
    class Failing(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            if "bad" in str(path):
                raise OSError(28, "No space left on device")
            super().save_checkpoint(checkpoint, path, storage_options)
    made = trainer(plugins=[Failing()])
    class Saving(pl.Callback):
        def on_train_batch_end(self, trainer, *rest):
            with contextlib.suppress(OSError):
                trainer.save_checkpoint(f"{ROOT}/bad.ckpt")
            trainer.save_checkpoint(f"{ROOT}/good.ckpt")
            trainer.save_checkpoint(f"{ROOT}/weights.ckpt", weights_only=True)
    made.callbacks.append(Saving())
    made.fit(Module(), loader(8))
    assert os.path.exists(f"{ROOT}/good.ckpt")

def asynchronous():
    class Slow(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            if "bad" in str(path):
                raise OSError("broken")
            super().save_checkpoint(checkpoint, path, storage_options)
    made = trainer(plugins=[AsyncCheckpointIO(Slow())])
    class Saving(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            trainer.save_checkpoint(f"{ROOT}/{'good' if index < 2 else 'bad'}{index}.ckpt")
    made.callbacks.append(Saving())
    with contextlib.suppress(OSError):
        made.fit(Module(), loader(12))

def asynchronous_again():
    class Saving(pl.Callback):
        def on_train_batch_end(self, trainer, *rest):
            trainer.save_checkpoint(f"{ROOT}/again{trainer.global_step}.ckpt")
    made = trainer(plugins=[AsyncCheckpointIO(TorchCheckpointIO())], callbacks=[Saving()])
    for epochs in (1, 2):
        made.fit_loop.max_epochs = epochs
        made.fit(Module(), loader(4))

def failing():
    class Failing(Module):
        def training_step(self, batch, index):
            if index == 2:
                raise ZeroDivisionError("amid an iteration")
            return super().training_step(batch, index)
    try:
        trainer().fit(Failing(), loader(16))
    except ZeroDivisionError as error:
        print("raised", error)
    trainer().fit(Module(), loader(4))

def failing_callback():
    class Failing(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            if index == 2:
                raise ZeroDivisionError("after a step")
    with contextlib.suppress(ZeroDivisionError):
        trainer(callbacks=[Failing()]).fit(Module(), loader(16))

def several_loops():
    made = trainer(max_epochs=1)
    module = Module()
    made.fit(module, loader(8))
    made.test(module, loader(12), verbose=False)
    made.fit_loop.max_epochs = 2
    made.fit(module, loader(8))
    made.validate(module, loader(4), verbose=False)
    print("several_loops", gauges())

def resumed():
    made = trainer(max_epochs=1)
    made.fit(Module(), loader(8))
    made.save_checkpoint(f"{ROOT}/resume.ckpt")
    made = trainer(max_epochs=3)
    made.fit(Module(), loader(8), ckpt_path=f"{ROOT}/resume.ckpt")
    print("resumed", gauges())

def without_length():
    class Endless(IterableDataset):
        def __iter__(self):
            return iter(torch.randn(5, 4).split(1))
    class Bare(Module):
        def training_step(self, batch, index):
            return self.layer(batch).pow(2).mean()
    trainer().fit(Bare(), DataLoader(Endless(), batch_size=None))
    class Reader(Module):
        def training_step(self, dataloader_iter):
            batch, _, _ = next(dataloader_iter)
            return self.layer(batch[0]).pow(2).mean()
    trainer().fit(Reader(), loader(8))

def not_finite():
    class Odd(Module):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            return loss * (float("nan") if index == 1 else float("inf") if index == 2 else 1)
    trainer(gradient_clip_val=1.0).fit(Odd(), loader(12))

def given_up():
    class Skipping(Module):
        def on_train_batch_start(self, batch, index):
            return -1 if index == 1 and self.current_epoch == 0 else None
    class Failing(pl.Callback):
        def on_validation_start(self, trainer, module):
            if trainer.current_epoch == 1:
                raise ZeroDivisionError("in a validation")
    with contextlib.suppress(ZeroDivisionError):
        trainer(max_epochs=2, callbacks=[Failing()]).fit(Skipping(), loader(12), loader(4))

def pickled():
    class Sending(pl.Callback):
        def on_train_batch_end(self, trainer, *rest):
            trainer = copy.deepcopy(pickle.loads(pickle.dumps(trainer)))
            print("pickled", [type(each).__name__ for each in trainer.callbacks])
    globals()["Sending"] = Sending
    Sending.__qualname__ = "Sending"
    trainer(callbacks=[Sending()]).fit(Module(), loader(8))

def workers():
    trainer(max_epochs=1).fit(Module(), loader(8, num_workers=1), loader(4, num_workers=1))

for scenario in (accumulation, two_optimizers, failed_save, asynchronous, asynchronous_again, failing, failing_callback, several_loops, resumed,
                 without_length, not_finite, given_up, pickled, workers):
    begin(scenario.__name__)
    scenario()
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return job(tmp_path_factory.mktemp("lightning"), PRELUDE + SCENARIOS)


STEPS, VALIDATED, TESTED = (f"steps_total mode={mode}" for mode in ("train", "validation", "test"))
SAVED, FAILED = "checkpoints_total result=ok", "checkpoints_total result=failed"
EXPECTED: dict[str, dict[str, float | None]] = {
    # A step is one of the optimizer; the sanity check is time of validation and no validation.
    "accumulation": {
        STEPS: 6,
        "microbatches_total": 10,
        "samples_total mode=train": 40,
        "epochs_total": 2,
        "step_duration_seconds_count mode=train": 6,
        "phase validation": 3,
        VALIDATED: 4,
        "phase forward": 10,
        "phase backward": 10,
        "phase optimizer": 6,
        "phase data_loading": 10,
        "phase zero_grad": 6,
    },
    # In manual optimization a step is a batch, also after a restart.
    "two_optimizers": {STEPS: 3, "phase optimizer": 6, "phase backward": 6},
    "two_optimizers_resumed": {STEPS: 3, "gauge step": 6},
    # A save that fails does not hinder the next; weights alone are time only.
    "failed_save": {FAILED: 2, SAVED: 2, "phase checkpoint_save_sync": 6, STEPS: 2},
    # An asynchronous save has succeeded when it is written.
    "asynchronous": {
        "checkpoints_total kind=async result=ok": 2,
        "checkpoints_total kind=async result=failed": 1,
        "phase checkpoint_save_async": 3,
    },
    "asynchronous_again": {"checkpoints_total kind=async result=ok": 2},
    # The next `fit` after an exception counts right.
    "failing": {STEPS: 2 + 1},
    # A step that is made counts though a callback fails after it.
    "failing_callback": {STEPS: 3},
    "several_loops": {STEPS: 4, TESTED: 3, VALIDATED: 1, "gauge step": 4},
    # A loop begins where its checkpoint ended.
    "resumed": {
        "gauge step": 6,
        "gauge step_target": 6,
        "gauge learning_rate": 0.125,
        "phase checkpoint_load": 1,
    },
    # A loader without a length, and a step that fetches itself.
    "without_length": {STEPS: 5 + 2},
    "not_finite": {"nonfinite_total kind=loss value=nan": 2},
    # A step that is made counts though its epoch is given up or its validation fails.
    "given_up": {STEPS: 1 + 3, VALIDATED: 0},
    "pickled": {STEPS: 2, "phase data_loading": 2},
    # Workers of a loader tell nothing of their own.
    "workers": {STEPS: 2, "samples_total mode=train": 8},
}


@pytest.mark.parametrize("run", EXPECTED)
def test_what_a_trainer_does_is_told(told: Job, run: str) -> None:
    assert told.numbers(run, EXPECTED[run]) == EXPECTED[run]


def test_what_has_no_fixed_number_is_told_too(told: Job) -> None:
    assert "raised amid an iteration" in told.done.stdout
    assert told.value("training_background_seconds_total", "asynchronous", task="checkpoint_finalize")
    assert told.told()["resumed"]["training.loss,mode=train"] > 0
    assert (told.value("training_nonfinite_total", "not_finite", kind="grad") or 0) >= 1


def test_a_trainer_can_be_pickled_and_copied_amid_its_training(told: Job) -> None:
    assert told.done.stdout.count("pickled ['Sending', 'ExporterCallback']") == 2


def test_nothing_was_told_out_of_order_and_no_notice_was_given(told: Job) -> None:
    assert "training_misuse_total" not in told.page
    assert "exporter" not in told.done.stderr
    assert 'framework="lightning"' in told.page
    assert 'model="Module"' in told.page


# Without a line of code ---------------------------------------------------------------------------------------

UNCHANGED = """
import sys
loader = DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=4)
callbacks = []
if {explicit}:
    from exporter.bridges import lightning
    callbacks.append(lightning.callback())
trainer = pl.Trainer(max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
                     accelerator="cpu", devices=1, callbacks=callbacks, default_root_dir=".")
trainer.fit(Module(), loader)
print("bridged", "exporter.bridges.lightning" in sys.modules)
"""


@pytest.mark.parametrize(("package", "explicit"), [("lightning.pytorch", True), ("pytorch_lightning", False)])
def test_a_job_that_is_not_changed_is_told_once(tmp_path: Path, package: str, explicit: bool) -> None:
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"not installed: {package}")
    program = LIGHTNING.replace("lightning.pytorch", package) + UNCHANGED.format(explicit=explicit)
    told = job(tmp_path, program, AUTO)

    assert told.value("training_steps_total", mode="train") == 6
    assert told.value("training_samples_total", mode="train") == 24
    assert told.phases()["backward"] == told.phases()["optimizer"] == 6
    assert told.value("training_checkpoints_total", result="ok") == 2


def test_a_job_that_does_not_ask_for_it_is_left_alone(tmp_path: Path) -> None:
    told = job(tmp_path, LIGHTNING + UNCHANGED.format(explicit=False))

    assert "bridged False" in told.done.stdout
    assert "training_steps_total" not in told.page


@pytest.mark.parametrize("name", ["EXPORTER_AUTO", "EXPORTER_DISABLED"])
def test_nobody_is_given_a_callback_unless_it_is_wanted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPORTER_AUTO", "1")
    monkeypatch.setenv(name, {"EXPORTER_AUTO": "0", "EXPORTER_DISABLED": "1"}[name])

    assert exporter_auto.lightning_callbacks() == exporter_auto.pytorch_lightning_callbacks() == []
    assert exporter_auto.fabric_callbacks() == exporter_auto.lightning_fabric_callbacks() == []
    assert exporter_auto.OneLoggerExporterConfig.get_default_config()["enabled"] is False


TWO_RANKS = """
class Ranked(Module):
    def train_dataloader(self):
        size = 4 if self.global_rank == 0 else 2
        return DataLoader(TensorDataset(torch.randn(3 * size, 4)), batch_size=size)

if __name__ == "__main__":
    trainer = pl.Trainer(max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
                         enable_checkpointing=False, accelerator="cpu", devices=2, strategy="{strategy}",
                         use_distributed_sampler=False)
    trainer.fit(Ranked())
"""


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_ranks_that_lightning_starts_itself_are_told_apart_and_count_their_own_share(
    tmp_path: Path, strategy: str
) -> None:
    (tmp_path / "train.py").write_text(LIGHTNING + TWO_RANKS.format(strategy=strategy))
    told = job(
        tmp_path,
        "import runpy, sys; sys.argv = ['train.py']; runpy.run_path('train.py', run_name='__main__')"
        if strategy == "ddp_spawn"
        else "import subprocess, sys; subprocess.run([sys.executable, 'train.py'], check=True)",
        AUTO,
    )

    assert told.value("training_steps_total", mode="train", rank="0") == 3
    assert told.value("training_steps_total", mode="train", rank="1") == 3
    assert told.value("training_samples_total", mode="train", rank="0") == 12
    assert told.value("training_samples_total", mode="train", rank="1") == 6
    assert told.value("training_step_duration_seconds_count", mode="train") == 3
