"""Record types: compatibility module for `nv_one_logger.exporter.internal.record_type`."""

from __future__ import annotations

from exporter.one_logger.names import RecordType

__all__ = ["RecordType"]
