"""Provider of training telemetry: compatibility module for `nv_one_logger.training_telemetry.api.training_telemetry_provider`."""

from __future__ import annotations

from exporter.one_logger.names import DEFAULT_SPANS_EXPORT_BLACKLIST
from exporter.one_logger.provider import TrainingTelemetryProvider

__all__ = ["DEFAULT_SPANS_EXPORT_BLACKLIST", "TrainingTelemetryProvider"]
