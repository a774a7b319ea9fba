"""Training jobs of PyTorch Lightning. Each function is a job.

`programs.loops.run_loops` calls the functions in sequence in the same process; each call is a separate run.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, IterableDataset

from programs.lightning_parts import Module, loader, pl, recorded_trainer


class ValidatedModule(Module):
    def validation_step(self, batch: Any, index: int) -> None:
        pass

    test_step = validation_step


class TwoOptimizers(Module):
    """Module that steps two optimizers in each batch, in manual optimization."""

    automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch[0]).mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.Adam(self.parameters())]


class DiskFullForBadPaths(TorchCheckpointIO):  # type: ignore[misc]  # Lightning has no types here
    """Checkpoint I/O that fails for paths that contain `bad`."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        if "bad" in str(path):
            raise OSError(28, "No space left on device")
        super().save_checkpoint(checkpoint, path, storage_options)


class TrainerPickler(pl.Callback):  # type: ignore[misc]  # Lightning has no types here
    """Callback that pickles and copies the Trainer after each batch."""

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        trainer = copy.deepcopy(pickle.loads(pickle.dumps(trainer)))
        print("pickled", [type(callback).__name__ for callback in trainer.callbacks])


def accumulation() -> None:
    trainer = recorded_trainer(accumulate_grad_batches=2, max_epochs=2, num_sanity_val_steps=1)
    trainer.fit(ValidatedModule(), loader(20), loader(8))


def tested_with_the_step_of_the_validation() -> None:
    class ModuleWithLoss(ValidatedModule):
        def test_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", 2.5)

    recorded_trainer().test(ModuleWithLoss(), loader(8))


def two_optimizers() -> None:
    trainer = recorded_trainer()
    trainer.fit(TwoOptimizers(), loader(12))
    trainer.save_checkpoint("two_optimizers.ckpt")


def two_optimizers_resumed() -> None:
    recorded_trainer(max_epochs=2).fit(TwoOptimizers(), loader(12), ckpt_path="two_optimizers.ckpt")


def failed_save() -> None:
    class ThreeSaves(pl.Callback):  # type: ignore[misc]  # Lightning has no types here
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            with contextlib.suppress(OSError):
                trainer.save_checkpoint("bad.ckpt")
            trainer.save_checkpoint("good.ckpt")
            trainer.save_checkpoint("weights.ckpt", weights_only=True)

    recorded_trainer([ThreeSaves()], plugins=[DiskFullForBadPaths()]).fit(Module(), loader(8))
    assert Path("good.ckpt").exists()


def async_checkpoints() -> None:
    class GoodAndBadSaves(pl.Callback):  # type: ignore[misc]  # Lightning has no types here
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            trainer.save_checkpoint(f"{'good' if index < 2 else 'bad'}{index}.ckpt")

    with contextlib.suppress(OSError):
        recorded_trainer([GoodAndBadSaves()], plugins=[AsyncCheckpointIO(DiskFullForBadPaths())]).fit(
            Module(), loader(12)
        )


def async_checkpoints_and_weights() -> None:
    class SlowFirstWrite(DiskFullForBadPaths):
        """Checkpoint I/O that delays the first write until all three saves are queued."""

        has_queued_all = threading.Event()

        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            self.has_queued_all.wait(60)
            super().save_checkpoint(checkpoint, path, storage_options)

    class PathStrategy(SingleDeviceStrategy):  # type: ignore[misc]  # Lightning has no types here
        """Strategy that passes a `Path` to the writer, as the strategies for FSDP and model parallelism do."""

        def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
            super().save_checkpoint(checkpoint, Path(filepath), storage_options)

    class ThreeSaves(pl.Callback):  # type: ignore[misc]  # Lightning has no types here
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            trainer.save_checkpoint("./first.ckpt")
            trainer.save_checkpoint("weights.ckpt", weights_only=True)
            trainer.save_checkpoint("bad.ckpt")
            SlowFirstWrite.has_queued_all.set()

    with contextlib.suppress(OSError):
        recorded_trainer(
            [ThreeSaves()],
            strategy=PathStrategy(device="cpu"),
            plugins=[AsyncCheckpointIO(SlowFirstWrite())],
        ).fit(Module(), loader(4))


def async_checkpoints_over_two_fits() -> None:
    class SaveOfEachStep(pl.Callback):  # type: ignore[misc]  # Lightning has no types here
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            trainer.save_checkpoint(f"again{trainer.global_step}.ckpt")

    trainer = recorded_trainer([SaveOfEachStep()], plugins=[AsyncCheckpointIO(TorchCheckpointIO())])
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(Module(), loader(4))


def failing_module() -> None:
    class FailingModule(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            if index == 2:
                raise ZeroDivisionError("amid an iteration")
            return super().training_step(batch, index)

    try:
        recorded_trainer().fit(FailingModule(), loader(16))
    except ZeroDivisionError as error:
        print("raised", error)
    recorded_trainer().fit(Module(), loader(4))  # the next loop is recorded again


def failing_callback() -> None:
    class FailureAfterThirdBatch(pl.Callback):  # type: ignore[misc]  # Lightning has no types here
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if index == 2:
                raise ZeroDivisionError("after a step")

    with contextlib.suppress(ZeroDivisionError):
        recorded_trainer([FailureAfterThirdBatch()]).fit(Module(), loader(16))


def several_loops() -> None:
    trainer, module = recorded_trainer(), ValidatedModule()
    trainer.fit(module, loader(8))
    trainer.test(module, loader(12), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(8))
    trainer.validate(module, loader(4), verbose=False)


def resumed() -> None:
    trainer = recorded_trainer()
    trainer.fit(Module(), loader(8))
    trainer.save_checkpoint("resume.ckpt")
    recorded_trainer(max_epochs=3).fit(Module(), loader(8), ckpt_path="resume.ckpt")


def loaders_without_length() -> None:
    class StreamDataset(IterableDataset):  # type: ignore[misc]  # torch has no types here
        def __iter__(self) -> Iterator[Any]:
            return iter(torch.randn(5, 4).split(1))

    class UnbatchedModule(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            return self.layer(batch).pow(2).mean()

    class FetchingModule(Module):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]  # Lightning accepts both
            batch, _, _ = next(dataloader_iter)
            return self.layer(batch[0]).pow(2).mean()

    recorded_trainer().fit(UnbatchedModule(), DataLoader(StreamDataset(), batch_size=None))
    recorded_trainer().fit(FetchingModule(), loader(8))


def nonfinite_losses() -> None:
    class DivergingModule(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            loss = super().training_step(batch, index)
            return loss * {1: float("nan"), 2: float("inf")}.get(index, 1)

    recorded_trainer(gradient_clip_val=1.0).fit(DivergingModule(), loader(12))


def aborted_epoch_and_failed_validation() -> None:
    class ModuleWithShortFirstEpoch(ValidatedModule):
        def on_train_batch_start(self, batch: Any, index: int) -> int | None:
            return -1 if index == 1 and self.current_epoch == 0 else None

    class FailureInSecondValidation(pl.Callback):  # type: ignore[misc]  # Lightning has no types here
        def on_validation_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 1:
                raise ZeroDivisionError("in a validation")

    with contextlib.suppress(ZeroDivisionError):
        recorded_trainer([FailureInSecondValidation()], max_epochs=2).fit(
            ModuleWithShortFirstEpoch(), loader(12), loader(4)
        )


def pickled() -> None:
    recorded_trainer([TrainerPickler()]).fit(Module(), loader(8))
