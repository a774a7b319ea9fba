"""Exporters of one-logger's core: compatibility module for `nv_one_logger.exporter`."""

from __future__ import annotations

from exporter.one_logger.exporters import Exporter, FileExporter, LoggerExporter

__all__ = ["Exporter", "FileExporter", "LoggerExporter"]
