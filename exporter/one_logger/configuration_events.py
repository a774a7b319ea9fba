"""Attributes of the events that export the configuration."""

from __future__ import annotations

import platform

from exporter.one_logger.config import OneLoggerConfig, TrainingTelemetryConfig
from exporter.one_logger.figures import StepFacts
from exporter.one_logger.standard_attributes import (
    OneLoggerInitializationAttributes,
    TrainingTelemetryAttributes,
)
from exporter.recording.recorder import RECORDER

VERSION = "2.3.1"
"""Version of one-logger whose record format is written."""


def initialization_attributes(
    settings: OneLoggerConfig, world_size: int, session_tag: str, *, is_baseline: bool
) -> OneLoggerInitializationAttributes:
    """Return the attributes of `one_logger_initialization`."""
    return OneLoggerInitializationAttributes.create(
        world_size=world_size,
        one_logger_training_telemetry_version=VERSION,
        enable_for_current_rank=settings.enable_for_current_rank,
        session_tag=session_tag,
        is_baseline_run=is_baseline,
        summary_data_schema_version=settings.summary_data_schema_version,
        node_name=platform.node(),
        rank=RECORDER.process.identity().rank or 0,
        custom_metadata=settings.custom_metadata,
    )


def training_attributes(
    training: TrainingTelemetryConfig,
    facts: StepFacts,
    perf_tag: str | list[str],
    iterations_target: int | None,
) -> TrainingTelemetryAttributes:
    """Return the attributes of `update_training_telemetry_config`."""
    return TrainingTelemetryAttributes.create(
        perf_tag=perf_tag,
        global_batch_size=facts.samples,
        log_every_n_train_iterations=training.log_every_n_train_iterations,
        micro_batch_size=training.micro_batch_size,
        seq_length=facts.seq_length,
        flops_per_sample=facts.flops_per_sample or None,
        train_iterations_target=iterations_target,
        train_samples_target=training.train_samples_target,
        checkpoint_strategy=training.save_checkpoint_strategy,
        is_train_iterations_enabled=training.is_train_iterations_enabled,
        is_validation_iterations_enabled=training.is_validation_iterations_enabled,
        is_test_iterations_enabled=training.is_test_iterations_enabled,
        is_save_checkpoint_enabled=training.is_save_checkpoint_enabled,
        is_log_throughput_enabled=facts.is_throughput_enabled,
        custom_metadata=training.custom_metadata,
    )
