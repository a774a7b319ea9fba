"""Exporter configuration manager: compatibility module for `nv_one_logger.exporter.export_config_manager`."""

from __future__ import annotations

from exporter.one_logger.export_config import ExporterConfigManager

__all__ = ["ExporterConfigManager"]
