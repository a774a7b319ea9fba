"""Exceptions: compatibility module for `nv_one_logger.core.exceptions`."""

from __future__ import annotations

from exporter.errors import OneLoggerError
from exporter.training.attributes import assert_that

__all__ = ["OneLoggerError", "assert_that"]
