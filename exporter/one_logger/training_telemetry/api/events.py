"""Names of events of a training job: compatibility module for `nv_one_logger.training_telemetry.api.events`."""

from __future__ import annotations

from exporter.one_logger.names import StandardTrainingJobEventName

__all__ = ["StandardTrainingJobEventName"]
