"""Exceptions. The layout is that of `nv_one_logger.core.exceptions`."""

from __future__ import annotations

from exporter.errors import OneLoggerError

__all__ = ["OneLoggerError", "require"]
