"""Compatibility module for `nv_one_logger.api.timed_span`: `timed_span` and `get_recorder`."""

from __future__ import annotations

from exporter.one_logger.timed_span import timed_span
from exporter.one_logger.training_recorder import get_recorder

__all__ = ["get_recorder", "timed_span"]
