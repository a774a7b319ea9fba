"""The events of this process: `exporter.events`, and `exporter.log`.

Used in the training process; loaded at the first use of either. What happens to an event is in `event_log`.
"""

from __future__ import annotations

from exporter.recording.event_handle import Handle
from exporter.recording.event_log import EventLog
from exporter.recording.event_values import Event, Severity
from exporter.recording.late import WHEN_EVENTS_ARE_LOADED

EVENTS = EventLog()
"""The events of this process."""

for _wire in WHEN_EVENTS_ARE_LOADED:
    _wire(EVENTS)

log = EVENTS.log
enabled = EVENTS.enabled
register = EVENTS.register
unregister = EVENTS.unregister
limit = EVENTS.limit
count_types = EVENTS.count_types
recent = EVENTS.recent

__all__ = [
    "EVENTS",
    "Event",
    "EventLog",
    "Handle",
    "Severity",
    "count_types",
    "enabled",
    "limit",
    "log",
    "recent",
    "register",
    "unregister",
]
