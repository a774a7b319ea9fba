"""Provider of one-logger's core: compatibility module for `nv_one_logger.api.one_logger_provider`."""

from __future__ import annotations

from exporter.one_logger.provider import OneLoggerProvider

__all__ = ["OneLoggerProvider"]
