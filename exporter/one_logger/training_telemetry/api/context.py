"""Context managers: compatibility module for `nv_one_logger.training_telemetry.api.context`."""

from __future__ import annotations

from exporter.training.api import (
    application,
    checkpoint_load,
    checkpoint_save,
    dataloader_init,
    model_init,
    optimizer_init,
    testing_loop,
    training_iteration,
    training_loop,
    validation_iteration,
    validation_loop,
)

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
