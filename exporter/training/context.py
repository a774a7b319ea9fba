"""One-logger's `api.context` under its own name; the code is in `contexts`."""

from __future__ import annotations

from exporter.training.contexts import (
    application,
    checkpoint_load,
    checkpoint_save,
    dataloader_init,
    model_init,
    optimizer_init,
    testing_loop,
    training_loop,
    validation_loop,
)
from exporter.training.hot import training_iteration, validation_iteration

__all__ = [
    "application",
    "checkpoint_load",
    "checkpoint_save",
    "dataloader_init",
    "model_init",
    "optimizer_init",
    "testing_loop",
    "training_iteration",
    "training_loop",
    "validation_iteration",
    "validation_loop",
]
