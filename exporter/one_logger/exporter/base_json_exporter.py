"""Base class of JSON exporters: compatibility module for `nv_one_logger.exporter.base_json_exporter`."""

from __future__ import annotations

from exporter.one_logger.exporters import BaseJsonExporter

__all__ = ["BaseJsonExporter"]
