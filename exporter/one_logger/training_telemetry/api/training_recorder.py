"""Training recorder: compatibility module for `nv_one_logger.training_telemetry.api.training_recorder`."""

from __future__ import annotations

from exporter.one_logger.training_recorder import TrainingRecorder

__all__ = ["TrainingRecorder"]
