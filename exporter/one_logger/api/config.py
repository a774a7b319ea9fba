"""Configuration of an application: compatibility module for `nv_one_logger.api.config`."""

from __future__ import annotations

from exporter.one_logger.config import LoggerConfig, OneLoggerConfig
from exporter.one_logger.names import OneLoggerErrorHandlingStrategy

__all__ = ["LoggerConfig", "OneLoggerConfig", "OneLoggerErrorHandlingStrategy"]
