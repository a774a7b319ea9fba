"""Checkpoint strategies and types: compatibility module for `nv_one_logger.training_telemetry.api.checkpoint`."""

from __future__ import annotations

from exporter.one_logger.names import CheckPointStrategy, CheckPointType

__all__ = ["CheckPointStrategy", "CheckPointType"]
