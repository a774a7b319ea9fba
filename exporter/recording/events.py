"""Public event API: `log`, `enabled`, `limit`, and the registration of handlers.

`log` and `enabled` never raise and never wait; `register` and `limit` raise for invalid arguments.
"""

from __future__ import annotations

from exporter.recording.recorder import RECORDER

__all__ = ["enabled", "limit", "log", "recent", "register", "unregister"]

EVENTS = RECORDER.events
"""The events of this process."""

log = EVENTS.log
enabled = EVENTS.enabled
register = EVENTS.register
unregister = EVENTS.unregister
limit = EVENTS.limit
recent = EVENTS.recent
