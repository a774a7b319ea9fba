"""Logger exporter: compatibility module for `nv_one_logger.exporter.logger_exporter`."""

from __future__ import annotations

from exporter.one_logger.exporters import LoggerExporter

__all__ = ["LoggerExporter"]
