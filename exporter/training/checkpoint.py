"""One-logger's `api.checkpoint` under its own name; the code is in `names`."""

from __future__ import annotations

from exporter.training.names import CheckPointStrategy, CheckPointType

__all__ = ["CheckPointStrategy", "CheckPointType"]
