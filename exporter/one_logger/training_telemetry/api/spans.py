"""Names of spans of a training job: compatibility module for `nv_one_logger.training_telemetry.api.spans`."""

from __future__ import annotations

from exporter.one_logger.names import StandardTrainingJobSpanName

__all__ = ["StandardTrainingJobSpanName"]
