"""Attribute classes of standard spans and events: compatibility module for `nv_one_logger.training_telemetry.api.attributes`."""

from __future__ import annotations

from exporter.one_logger.standard_attributes import (
    CheckpointSaveSpanAttributes,
    OneLoggerInitializationAttributes,
    SaveCheckpointSuccessEventAttributes,
    SyncCheckpointMetricsUpdateAttributes,
    TestingMetricsUpdateAttributes,
    TrainingLoopAttributes,
    TrainingMetricsUpdateAttributes,
    TrainingTelemetryAttributes,
    ValidationMetricsUpdateAttributes,
)

__all__ = [
    "CheckpointSaveSpanAttributes",
    "OneLoggerInitializationAttributes",
    "SaveCheckpointSuccessEventAttributes",
    "SyncCheckpointMetricsUpdateAttributes",
    "TestingMetricsUpdateAttributes",
    "TrainingLoopAttributes",
    "TrainingMetricsUpdateAttributes",
    "TrainingTelemetryAttributes",
    "ValidationMetricsUpdateAttributes",
]
