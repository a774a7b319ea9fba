"""Spans: compatibility module for `nv_one_logger.core.span`."""

from __future__ import annotations

from exporter.one_logger.names import NVTXColor, StandardSpanAttributeName, StandardSpanName
from exporter.training.attributes import SpanName
from exporter.training.spans import Span

__all__ = ["NVTXColor", "Span", "SpanName", "StandardSpanAttributeName", "StandardSpanName"]
