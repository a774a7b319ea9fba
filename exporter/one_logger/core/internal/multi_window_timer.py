"""Timers of windows: compatibility module for `nv_one_logger.core.internal.multi_window_timer`."""

from __future__ import annotations

from exporter.one_logger.timers import MultiWindowTimer

__all__ = ["MultiWindowTimer"]
