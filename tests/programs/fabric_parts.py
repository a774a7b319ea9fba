"""Parts of training jobs of Lightning Fabric: a training loop with its checkpoints."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Sequence
from typing import Any

from programs.torch_parts import loader, model_and_optimizer


def train(package: str, callbacks: Sequence[Any] = ()) -> None:
    """Train four steps, save a checkpoint and the weights, fail to save to a directory that does not exist, and load the checkpoint.

    *package* is the name under which the job imports Fabric: `lightning.fabric` or `lightning_fabric`.
    """
    logging.getLogger(package).setLevel(logging.ERROR)
    fabric = importlib.import_module(package).Fabric(accelerator="cpu", devices=1, callbacks=[*callbacks])
    fabric.launch()
    model, optimizer = fabric.setup(*model_and_optimizer())
    for (batch,) in fabric.setup_dataloaders(loader(16)):
        loss = model(batch).pow(2).mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    fabric.save("whole.ckpt", {"model": model, "optimizer": optimizer, "step": 4})
    fabric.save("weights.ckpt", {"model": model})
    with contextlib.suppress(Exception):
        fabric.save("/proc/nowhere/x", {"model": model, "optimizer": optimizer})
    fabric.load("whole.ckpt", {"model": model, "optimizer": optimizer})
