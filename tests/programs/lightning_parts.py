"""Parts of training jobs of PyTorch Lightning: a module, a data loader and a Trainer."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch

from programs.torch_parts import loader

pl: Any = importlib.import_module(os.environ.get("LIGHTNING_PACKAGE", "lightning.pytorch"))
"""Lightning, under the name that the job imports: `lightning.pytorch` or `pytorch_lightning`."""

for name in (pl.__name__, "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

__all__ = ["Module", "loader", "pl", "quiet_trainer", "recorded_trainer"]


class Module(pl.LightningModule):  # type: ignore[misc]  # Lightning has no types here
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, index: int) -> Any:
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.125)


def quiet_trainer(**options: Any) -> Any:
    """Return a Trainer on the CPU without progress output."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(**quiet, accelerator="cpu", default_root_dir=".", **{"devices": 1, **options})


def recorded_trainer(callbacks: Sequence[Any] = (), **options: Any) -> Any:
    """Return a Trainer of one epoch with the callback of the bridge."""
    from exporter.bridges import lightning as bridge

    defaults = {"max_epochs": 1, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    return quiet_trainer(**{**defaults, **options}, callbacks=[*callbacks, bridge.callback()])
