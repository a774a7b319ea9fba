"""Times: compatibility module for `nv_one_logger.core.time`."""

from __future__ import annotations

from exporter.one_logger.timers import Timer
from exporter.training.attributes import TracingTimestamp

__all__ = ["Timer", "TracingTimestamp"]
