"""Training jobs of PyTorch Lightning. Each function is a job.

`programs.loops.run` calls the functions in sequence in the same process; each call is a separate run.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch.utils.data import DataLoader, IterableDataset

from programs.lightning_parts import Module, loader, pl, recorded_trainer


class Trained(Module):
    def validation_step(self, batch: Any, index: int) -> None:
        pass

    test_step = validation_step


class Gan(Module):
    automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch[0]).mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.Adam(self.parameters())]


class FullDisk(TorchCheckpointIO):  # type: ignore[misc]  # Lightning has no types here
    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        if "bad" in str(path):
            raise OSError(28, "No space left on device")
        super().save_checkpoint(checkpoint, path, storage_options)


class Pickling(pl.Callback):  # type: ignore[misc]  # Lightning has no types here
    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        trainer = copy.deepcopy(pickle.loads(pickle.dumps(trainer)))
        print("pickled", [type(callback).__name__ for callback in trainer.callbacks])


def accumulation() -> None:
    trainer = recorded_trainer(accumulate_grad_batches=2, max_epochs=2, num_sanity_val_steps=1)
    trainer.fit(Trained(), loader(20), loader(8))


def two_optimizers() -> None:
    trainer = recorded_trainer()
    trainer.fit(Gan(), loader(12))
    trainer.save_checkpoint("gan.ckpt")


def two_optimizers_resumed() -> None:
    recorded_trainer(max_epochs=2).fit(Gan(), loader(12), ckpt_path="gan.ckpt")


def failed_save() -> None:
    class Saving(pl.Callback):  # type: ignore[misc]  # Lightning has no types here
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            with contextlib.suppress(OSError):
                trainer.save_checkpoint("bad.ckpt")
            trainer.save_checkpoint("good.ckpt")
            trainer.save_checkpoint("weights.ckpt", weights_only=True)

    recorded_trainer([Saving()], plugins=[FullDisk()]).fit(Module(), loader(8))
    assert Path("good.ckpt").exists()


def asynchronous() -> None:
    class Saving(pl.Callback):  # type: ignore[misc]  # Lightning has no types here
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            trainer.save_checkpoint(f"{'good' if index < 2 else 'bad'}{index}.ckpt")

    with contextlib.suppress(OSError):
        recorded_trainer([Saving()], plugins=[AsyncCheckpointIO(FullDisk())]).fit(Module(), loader(12))


def asynchronous_again() -> None:
    class Saving(pl.Callback):  # type: ignore[misc]  # Lightning has no types here
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            trainer.save_checkpoint(f"again{trainer.global_step}.ckpt")

    trainer = recorded_trainer([Saving()], plugins=[AsyncCheckpointIO(TorchCheckpointIO())])
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(Module(), loader(4))


def failing() -> None:
    class Failing(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            if index == 2:
                raise ZeroDivisionError("amid an iteration")
            return super().training_step(batch, index)

    try:
        recorded_trainer().fit(Failing(), loader(16))
    except ZeroDivisionError as error:
        print("raised", error)
    recorded_trainer().fit(Module(), loader(4))


def failing_callback() -> None:
    class Failing(pl.Callback):  # type: ignore[misc]  # Lightning has no types here
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if index == 2:
                raise ZeroDivisionError("after a step")

    with contextlib.suppress(ZeroDivisionError):
        recorded_trainer([Failing()]).fit(Module(), loader(16))


def several_loops() -> None:
    trainer, module = recorded_trainer(), Trained()
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


def without_length() -> None:
    class Stream(IterableDataset):  # type: ignore[misc]  # torch has no types here
        def __iter__(self) -> Iterator[Any]:
            return iter(torch.randn(5, 4).split(1))

    class Unbatched(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            return self.layer(batch).pow(2).mean()

    class Fetching(Module):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]  # Lightning accepts both
            batch, _, _ = next(dataloader_iter)
            return self.layer(batch[0]).pow(2).mean()

    recorded_trainer().fit(Unbatched(), DataLoader(Stream(), batch_size=None))
    recorded_trainer().fit(Fetching(), loader(8))


def not_finite() -> None:
    class Diverging(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            loss = super().training_step(batch, index)
            return loss * {1: float("nan"), 2: float("inf")}.get(index, 1)

    recorded_trainer(gradient_clip_val=1.0).fit(Diverging(), loader(12))


def aborted_epoch_and_failed_validation() -> None:
    class Skipping(Trained):
        def on_train_batch_start(self, batch: Any, index: int) -> int | None:
            return -1 if index == 1 and self.current_epoch == 0 else None

    class Failing(pl.Callback):  # type: ignore[misc]  # Lightning has no types here
        def on_validation_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 1:
                raise ZeroDivisionError("in a validation")

    with contextlib.suppress(ZeroDivisionError):
        recorded_trainer([Failing()], max_epochs=2).fit(Skipping(), loader(12), loader(4))


def pickled() -> None:
    recorded_trainer([Pickling()]).fit(Module(), loader(8))
