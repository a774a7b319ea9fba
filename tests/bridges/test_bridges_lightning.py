"""The bridge to PyTorch Lightning, with the real Trainer on a CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from bridges_support import (
    AUTO,
    FAILED,
    LIGHTNING,
    SAMPLES,
    SAVED,
    STEPS,
    VALIDATED,
    Job,
    job,
    loops,
    script,
    wanted,
)

import exporter_auto

pytestmark = [wanted("lightning"), pytest.mark.timeout(240)]

LOOPS = """
import contextlib, copy, os, pickle
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch.utils.data import IterableDataset
from exporter.bridges import lightning as bridge

class Trained(Module):
    def validation_step(self, batch, index):
        pass
    test_step = validation_step

class Gan(Module):
    automatic_optimization = False
    def training_step(self, batch, index):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch[0]).mean())
            optimizer.step()
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.Adam(self.parameters())]

class Failing(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        if "bad" in str(path):
            raise OSError(28, "No space left on device")
        super().save_checkpoint(checkpoint, path, storage_options)

class Sending(pl.Callback):
    def on_train_batch_end(self, trainer, *rest):
        trainer = copy.deepcopy(pickle.loads(pickle.dumps(trainer)))
        print("pickled", [type(each).__name__ for each in trainer.callbacks])

def trainer(callbacks=(), **options):
    return bare_trainer(**{"max_epochs": 1, "enable_checkpointing": False, "num_sanity_val_steps": 0, **options},
                        callbacks=[*callbacks, bridge.callback()])

def accumulation():
    trainer(accumulate_grad_batches=2, max_epochs=2, num_sanity_val_steps=1).fit(Trained(), loader(20), loader(8))

def two_optimizers():
    made = trainer()
    made.fit(Gan(), loader(12))
    made.save_checkpoint("gan.ckpt")

def two_optimizers_resumed():
    trainer(max_epochs=2).fit(Gan(), loader(12), ckpt_path="gan.ckpt")

def failed_save():
    class Saving(pl.Callback):
        def on_train_batch_end(self, trainer, *rest):
            with contextlib.suppress(OSError):
                trainer.save_checkpoint("bad.ckpt")
            trainer.save_checkpoint("good.ckpt")
            trainer.save_checkpoint("weights.ckpt", weights_only=True)
    trainer([Saving()], plugins=[Failing()]).fit(Module(), loader(8))
    assert os.path.exists("good.ckpt")

def asynchronous():
    class Saving(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            trainer.save_checkpoint(f"{'good' if index < 2 else 'bad'}{index}.ckpt")
    with contextlib.suppress(OSError):
        trainer([Saving()], plugins=[AsyncCheckpointIO(Failing())]).fit(Module(), loader(12))

def asynchronous_again():
    class Saving(pl.Callback):
        def on_train_batch_end(self, trainer, *rest):
            trainer.save_checkpoint(f"again{trainer.global_step}.ckpt")
    made = trainer([Saving()], plugins=[AsyncCheckpointIO(TorchCheckpointIO())])
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
        trainer([Failing()]).fit(Module(), loader(16))

def several_loops():
    made, module = trainer(), Trained()
    made.fit(module, loader(8))
    made.test(module, loader(12), verbose=False)
    made.fit_loop.max_epochs = 2
    made.fit(module, loader(8))
    made.validate(module, loader(4), verbose=False)

def resumed():
    made = trainer()
    made.fit(Module(), loader(8))
    made.save_checkpoint("resume.ckpt")
    trainer(max_epochs=3).fit(Module(), loader(8), ckpt_path="resume.ckpt")

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
    class Skipping(Trained):
        def on_train_batch_start(self, batch, index):
            return -1 if index == 1 and self.current_epoch == 0 else None
    class Failing(pl.Callback):
        def on_validation_start(self, trainer, module):
            if trainer.current_epoch == 1:
                raise ZeroDivisionError("in a validation")
    with contextlib.suppress(ZeroDivisionError):
        trainer([Failing()], max_epochs=2).fit(Skipping(), loader(12), loader(4))

def pickled():
    trainer([Sending()]).fit(Module(), loader(8))
"""
recorded = loops(LIGHTNING, LOOPS)

EXPECTED: dict[str, dict[str, float | None]] = {
    # A step is an optimizer step; the sanity check adds validation time but no validation.
    "accumulation": {
        STEPS: 6,
        "microbatches_total": 10,
        SAMPLES: 40,
        "epochs_total": 2,
        "step_duration_seconds_count mode=train": 6,
        "phase validation": 3,
        VALIDATED: 4,
        "phase forward": 10,
        "phase backward": 10,
        "phase optimizer": 6,
        "phase data_loading": 10,
        "phase zero_grad": 6,
        "run_info framework=lightning model=Trained": 1,
    },
    # In manual optimization a step is a batch, also after a restart.
    "two_optimizers": {STEPS: 3, "phase optimizer": 6, "phase backward": 6},
    "two_optimizers_resumed": {STEPS: 3, "gauge step": 6},
    # A save that fails does not hinder the next; weights alone are time only.
    "failed_save": {FAILED: 2, SAVED: 2, "phase checkpoint_save_sync": 6, STEPS: 2},
    # An asynchronous save succeeds when the file is written.
    "asynchronous": {
        "checkpoints_total kind=async result=ok": 2,
        "checkpoints_total kind=async result=failed": 1,
        "phase checkpoint_save_async": 3,
    },
    "asynchronous_again": {"checkpoints_total kind=async result=ok": 2},
    # The next `fit` after an exception counts right.
    "failing": {STEPS: 2 + 1},
    # A completed step counts although a callback fails afterwards.
    "failing_callback": {STEPS: 3},
    "several_loops": {STEPS: 4, "steps_total mode=test": 3, VALIDATED: 1, "gauge step": 4},
    # A loop starts at the step of its checkpoint.
    "resumed": {
        "gauge step": 6,
        "gauge step_target": 6,
        "gauge learning_rate": 0.125,
        "phase checkpoint_load": 1,
    },
    # A loader without a length, and a step that fetches itself.
    "without_length": {STEPS: 5 + 2},
    "not_finite": {"nonfinite_total kind=loss value=nan": 2},
    # A completed step counts although its epoch is aborted or its validation fails.
    "given_up": {STEPS: 1 + 3, VALIDATED: 0},
    "pickled": {STEPS: 2, "phase data_loading": 2},
}


@pytest.mark.parametrize("run", EXPECTED)
def test_training_validation_and_saves_of_a_trainer_are_recorded(recorded: Job, run: str) -> None:
    assert recorded.unlike(EXPECTED[run], run) == {}


def test_loops_without_a_fixed_number_of_steps_are_recorded(recorded: Job) -> None:
    assert recorded.value("training_background_seconds_total", "asynchronous", task="checkpoint_finalize")
    assert recorded.gauges("resumed")["loss,mode=train"] > 0
    assert (recorded.value("training_nonfinite_total", "not_finite", kind="grad") or 0) >= 1


def test_exceptions_propagate_and_a_trainer_can_be_pickled_and_copied_while_training(recorded: Job) -> None:
    assert "raised amid an iteration" in recorded.done.stdout
    assert recorded.done.stdout.count("pickled ['Sending', 'ExporterCallback']") == 2


# Without a line of code ---------------------------------------------------------------------------------------

UNCHANGED = """
callbacks = []
if {explicit}:
    from exporter.bridges import lightning
    callbacks.append(lightning.callback())
bare_trainer(max_epochs=2, callbacks=callbacks).fit(Module(), loader(12))
"""


@pytest.mark.parametrize(("package", "explicit"), [("lightning.pytorch", True), ("pytorch_lightning", False)])
def test_an_unchanged_job_is_recorded_once(tmp_path: Path, package: str, explicit: bool) -> None:
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"not installed: {package}")
    program = LIGHTNING.replace("lightning.pytorch", package) + UNCHANGED.format(explicit=explicit)
    recorded = job(tmp_path, program, AUTO)

    assert recorded.unlike({STEPS: 6, SAMPLES: 24, "phase backward": 6, "phase optimizer": 6, SAVED: 2}) == {}


@pytest.mark.parametrize("name", ["EXPORTER_AUTO", "EXPORTER_DISABLED"])
def test_the_callback_factory_returns_nothing_unless_it_is_enabled(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPORTER_AUTO", "1")
    monkeypatch.setenv(name, {"EXPORTER_AUTO": "0", "EXPORTER_DISABLED": "1"}[name])

    assert exporter_auto.lightning_callbacks() == exporter_auto.pytorch_lightning_callbacks() == []
    assert exporter_auto.fabric_callbacks() == exporter_auto.lightning_fabric_callbacks() == []
    assert exporter_auto.OneLoggerExporterConfig.get_default_config()["enabled"] is False


TWO_RANKS = """
class Ranked(Module):
    def train_dataloader(self):
        size = 4 if self.global_rank == 0 else 2
        return loader(3 * size, size)

if __name__ == "__main__":
    bare_trainer(max_epochs=1, enable_checkpointing=False, devices=2, strategy="{strategy}",
                 use_distributed_sampler=False).fit(Ranked())
"""
STARTED = {
    "ddp": "subprocess.run([sys.executable, 'train.py'], check=True)",
    "ddp_spawn": "import runpy; sys.argv = ['train.py']; runpy.run_path('train.py', run_name='__main__')",
}


@pytest.mark.parametrize("strategy", STARTED)
def test_ranks_started_by_lightning_are_distinct_and_count_their_own_samples(
    tmp_path: Path, strategy: str
) -> None:
    recorded = script(tmp_path, LIGHTNING + TWO_RANKS.format(strategy=strategy), STARTED[strategy])

    for rank, samples in (("0", 12), ("1", 6)):
        assert recorded.unlike({f"{STEPS} rank={rank}": 3, f"{SAMPLES} rank={rank}": samples}) == {}
    assert recorded.number("step_duration_seconds_count mode=train") == 3
