"""One-logger's `api.config` and `api.telemetry_config` under their own names; the code is in `configuration`."""

from __future__ import annotations

from exporter.training.configuration import (
    LoggerConfig,
    OneLoggerConfig,
    TelemetryConfig,
    TrainingTelemetryConfig,
)
from exporter.training.names import ApplicationType, CheckPointStrategy, OneLoggerErrorHandlingStrategy

__all__ = [
    "ApplicationType",
    "CheckPointStrategy",
    "LoggerConfig",
    "OneLoggerConfig",
    "OneLoggerErrorHandlingStrategy",
    "TelemetryConfig",
    "TrainingTelemetryConfig",
]
