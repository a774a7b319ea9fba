"""Default recorder: compatibility module for `nv_one_logger.recorder.default_recorder`."""

from __future__ import annotations

from exporter.one_logger.names import ExportCustomizationMode
from exporter.one_logger.recorders import DefaultRecorder

__all__ = ["DefaultRecorder", "ExportCustomizationMode"]
