"""File exporter. Same layout as `nv_one_logger.exporter.file_exporter`."""

from __future__ import annotations

from exporter.one_logger.exporters import FileExporter

__all__ = ["FileExporter"]
