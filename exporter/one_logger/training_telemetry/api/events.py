"""Names of events of a training job. The layout is that of `nv_one_logger.training_telemetry.api.events`."""

from __future__ import annotations

from exporter.one_logger.names import StandardTrainingJobEventName

__all__ = ["StandardTrainingJobEventName"]
