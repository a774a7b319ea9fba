"""Configuration of a training job: compatibility module for `nv_one_logger.training_telemetry.api.config`."""

from __future__ import annotations

from exporter.one_logger.config import TrainingTelemetryConfig

__all__ = ["TrainingTelemetryConfig"]
