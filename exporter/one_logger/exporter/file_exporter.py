"""File exporter: compatibility module for `nv_one_logger.exporter.file_exporter`."""

from __future__ import annotations

from exporter.one_logger.exporters import FileExporter

__all__ = ["FileExporter"]
