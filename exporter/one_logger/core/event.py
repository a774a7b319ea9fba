"""Events: compatibility module for `nv_one_logger.core.event`."""

from __future__ import annotations

from exporter.one_logger.names import StandardEventAttributeName, StandardEventName
from exporter.training.attributes import EventName
from exporter.training.spans import ErrorEvent, Event, TelemetryDataError

__all__ = [
    "ErrorEvent",
    "Event",
    "EventName",
    "StandardEventAttributeName",
    "StandardEventName",
    "TelemetryDataError",
]
