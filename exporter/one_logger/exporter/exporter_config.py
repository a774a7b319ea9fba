"""Exporter configuration: compatibility module for `nv_one_logger.exporter.exporter_config`."""

from __future__ import annotations

from exporter.one_logger.export_config import ExporterConfig

__all__ = ["ExporterConfig"]
