"""Recorder interface: compatibility module for `nv_one_logger.api.recorder`."""

from __future__ import annotations

from exporter.one_logger.recorders import Recorder

__all__ = ["Recorder"]
