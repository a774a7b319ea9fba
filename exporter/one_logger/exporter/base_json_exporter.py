"""Base class of JSON exporters. Same layout as `nv_one_logger.exporter.base_json_exporter`."""

from __future__ import annotations

from exporter.one_logger.exporters import BaseJsonExporter

__all__ = ["BaseJsonExporter"]
