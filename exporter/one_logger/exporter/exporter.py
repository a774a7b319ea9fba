"""Exporter interface: compatibility module for `nv_one_logger.exporter.exporter`."""

from __future__ import annotations

from exporter.errors import ExportError
from exporter.one_logger.exporters import BaseExporter, Exporter

__all__ = ["BaseExporter", "ExportError", "Exporter"]
