"""Training telemetry: callbacks, context managers and configuration: compatibility module for `nv_one_logger.training_telemetry.api`."""

from __future__ import annotations

from exporter.one_logger.config import TrainingTelemetryConfig
from exporter.one_logger.names import CheckPointStrategy, StandardTrainingJobSpanName
from exporter.one_logger.provider import TrainingTelemetryProvider
from exporter.one_logger.training_recorder import TrainingRecorder
from exporter.training.api import application, checkpoint_save, training_iteration, training_loop
from exporter.training.callbacks import (
    on_app_end,
    on_app_start,
    on_dataloader_init_end,
    on_dataloader_init_start,
    on_distributed_init_end,
    on_distributed_init_start,
    on_load_checkpoint_end,
    on_load_checkpoint_start,
    on_model_init_end,
    on_model_init_start,
    on_optimizer_init_end,
    on_optimizer_init_start,
    on_save_checkpoint_end,
    on_save_checkpoint_start,
    on_save_checkpoint_success,
    on_testing_end,
    on_testing_start,
    on_train_end,
    on_train_start,
    on_training_single_iteration_end,
    on_training_single_iteration_start,
    on_validation_end,
    on_validation_single_iteration_end,
    on_validation_single_iteration_start,
    on_validation_start,
)

__all__ = [
    "CheckPointStrategy",
    "StandardTrainingJobSpanName",
    "TrainingRecorder",
    "TrainingTelemetryConfig",
    "TrainingTelemetryProvider",
    "application",
    "checkpoint_save",
    "on_app_end",
    "on_app_start",
    "on_dataloader_init_end",
    "on_dataloader_init_start",
    "on_distributed_init_end",
    "on_distributed_init_start",
    "on_load_checkpoint_end",
    "on_load_checkpoint_start",
    "on_model_init_end",
    "on_model_init_start",
    "on_optimizer_init_end",
    "on_optimizer_init_start",
    "on_save_checkpoint_end",
    "on_save_checkpoint_start",
    "on_save_checkpoint_success",
    "on_testing_end",
    "on_testing_start",
    "on_train_end",
    "on_train_start",
    "on_training_single_iteration_end",
    "on_training_single_iteration_start",
    "on_validation_end",
    "on_validation_single_iteration_end",
    "on_validation_single_iteration_start",
    "on_validation_start",
    "training_iteration",
    "training_loop",
]
