"""Compatibility module of torch.monitor, with the same names: `from exporter.monitor import Stat, log_event`.

Does not need torch. docs/torch-monitor.md lists the differences. `exporter.monitor.rfc` has the names of RFC-0018.
"""

from __future__ import annotations

from exporter.monitor.events import (
    STAT_EVENT,
    Event,
    EventHandlerHandle,
    TensorboardEventHandler,
    data_value_t,
    log_event,
    register_event_handler,
    unregister_event_handler,
)
from exporter.monitor.stat import Aggregation, Stat

VALUE, MEAN, COUNT, SUM, MAX, MIN = Aggregation
"""Members of `Aggregation`, which torch exports as names of the module too."""

__all__ = [
    "COUNT",
    "MAX",
    "MEAN",
    "MIN",
    "STAT_EVENT",
    "SUM",
    "VALUE",
    "Aggregation",
    "Event",
    "EventHandlerHandle",
    "Stat",
    "TensorboardEventHandler",
    "data_value_t",
    "log_event",
    "register_event_handler",
    "unregister_event_handler",
]
