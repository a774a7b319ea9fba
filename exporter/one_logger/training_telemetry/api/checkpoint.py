"""Checkpoint strategies and types. Same layout as `nv_one_logger.training_telemetry.api.checkpoint`."""

from __future__ import annotations

from exporter.one_logger.names import CheckPointStrategy, CheckPointType

__all__ = ["CheckPointStrategy", "CheckPointType"]
