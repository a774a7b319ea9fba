"""Configuration of a training job. Same layout as `nv_one_logger.training_telemetry.api.config`."""

from __future__ import annotations

from exporter.one_logger.config import TrainingTelemetryConfig

__all__ = ["TrainingTelemetryConfig"]
