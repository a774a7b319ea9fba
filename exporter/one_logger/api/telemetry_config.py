"""Telemetry configuration protocol: compatibility module for `nv_one_logger.api.telemetry_config`."""

from __future__ import annotations

from exporter.one_logger.config import TelemetryConfig
from exporter.one_logger.names import ApplicationType

__all__ = ["ApplicationType", "TelemetryConfig"]
