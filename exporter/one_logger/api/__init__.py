"""Configuration of one-logger's core: compatibility module for `nv_one_logger.api`."""

from __future__ import annotations

from exporter.one_logger.config import LoggerConfig, OneLoggerConfig
from exporter.one_logger.names import OneLoggerErrorHandlingStrategy

__all__ = ["LoggerConfig", "OneLoggerConfig", "OneLoggerErrorHandlingStrategy"]
