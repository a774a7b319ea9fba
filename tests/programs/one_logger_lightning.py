"""Training job of PyTorch Lightning with one-logger's Trainer, or with one-logger's hook on the job's own Trainer."""

from __future__ import annotations

import contextlib
import logging
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning import pytorch as pl
from lightning.pytorch.plugins.io import TorchCheckpointIO

from exporter.one_logger import (
    FileExporter,
    OneLoggerConfig,
    TrainingTelemetryConfig,
    TrainingTelemetryProvider,
)
from exporter.one_logger.training_telemetry.integration.pytorch_lightning import (
    OneLoggerPTLTrainer,
    hook_trainer_cls,
)
from programs.torch_parts import loader

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(pl.LightningModule):  # type: ignore[misc]  # Lightning has no types here
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, index: int) -> Any:
        return self.layer(batch[0]).mean()

    def validation_step(self, batch: Any, index: int) -> None:
        pass

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class DiskFullForBadPaths(TorchCheckpointIO):  # type: ignore[misc]  # Lightning has no types here
    """Checkpoint I/O that fails for files with `bad` in the name."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        if "bad" in str(path):
            raise OSError(28, "No space left on device")
        super().save_checkpoint(checkpoint, path, storage_options)


def train_with_the_trainer_of_one_logger() -> None:
    """Train with `OneLoggerPTLTrainer`, which must not change the options of the job."""
    provider, options = _configured_provider(), _options()
    options["callbacks"] = None
    trainer = OneLoggerPTLTrainer(options, provider)
    print("unchanged", options["callbacks"] is None)
    _train(trainer, trainer.nv_one_logger_callback)


def train_with_a_hooked_trainer() -> None:
    """Train with a Trainer of the job, which `hook_trainer_cls` must not replace."""

    class OwnTrainer(pl.Trainer):  # type: ignore[misc]  # Lightning has no types here
        pass

    hooked_class, callback = hook_trainer_cls(OwnTrainer, _configured_provider())
    trainer = hooked_class(callbacks=pl.Callback(), **_options())
    print("unchanged", hooked_class is OwnTrainer and trainer.nv_one_logger_callback is callback)
    _train(trainer, callback)


def _configured_provider() -> Any:
    """Return the provider, which writes the records to `t.jsonl`."""
    telemetry = TrainingTelemetryConfig(
        perf_tag_or_fn="p", global_batch_size_or_fn=8, log_every_n_train_iterations=1
    )
    config = OneLoggerConfig(
        application_name="app", world_size_or_fn=1, session_tag_or_fn="s", telemetry_config=telemetry
    )
    provider = TrainingTelemetryProvider.instance()
    provider.with_base_config(config).with_exporter(FileExporter(Path("t.jsonl"))).configure_provider()
    return provider


def _options() -> dict[str, Any]:
    """Return the options of a Trainer of one epoch that accumulates two batches."""
    return {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
        "accumulate_grad_batches": 2,
        "num_sanity_val_steps": 1,
        "plugins": [DiskFullForBadPaths()],
    }


def _train(trainer: Any, callback: Any) -> None:
    """Train, save with and without an error, and test."""
    callback.on_model_init_start()
    module = Module()
    callback.on_model_init_end()
    trainer.fit(module, loader(16), loader(8))
    with contextlib.suppress(OSError):
        trainer.save_checkpoint("bad.ckpt")
    trainer.save_checkpoint("good.ckpt")
    trainer.test(module, loader(8), verbose=False)
    print("pickled", type(pickle.loads(pickle.dumps(callback))) is type(callback))
    callback.on_app_end()
