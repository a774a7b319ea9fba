"""Compatibility module of torchelastic's events: `import exporter.elastic.events as events`.

An event is counted, delivered to the handlers and written to its destination. `LOGLEVEL` applies to the destination only.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from copy import copy
from functools import partial
from time import time
from typing import Any

from exporter.elastic import agent, bridge
from exporter.elastic.bridge import RECORDED_ATTRIBUTE, PrometheusEventHandler
from exporter.elastic.events.api import (
    Event,
    EventMetadataValue,
    EventSource,
    NodeState,
    RdzvEvent,
    fields_of,
)
from exporter.elastic.events.handlers import EventHandler, NullEventHandler, get_logging_handler
from exporter.recording.events import EVENTS
from exporter.recording.handle import Adapter, Handle

__all__ = [
    "Event",
    "EventHandler",
    "EventMetadataValue",
    "EventSource",
    "NodeState",
    "NullEventHandler",
    "PrometheusEventHandler",
    "RdzvEvent",
    "configure",
    "construct_and_record_rdzv_event",
    "get_logging_handler",
    "record",
    "record_rdzv_event",
    "unconfigure",
]

_handles: list[Handle] = []
"""Registrations of the handlers of `configure`."""


def configure(handler: EventHandler | Sequence[EventHandler] | None) -> None:
    """Replace the event handlers by one or several handlers. None removes all handlers.

    Events are counted for Prometheus with and without handlers. Raises TypeError for an object without `record(event)`.
    """
    handlers = bridge.checked_handlers(handler, "record")
    unconfigure()
    for event_handler in handlers:
        name, deliver = type(event_handler).__name__, partial(_deliver, event_handler)
        # The handler receives the `Event` of torchelastic, the origin, and not the event of `exporter.events`.
        adapter = Adapter(lambda _event, origin: origin, is_awaited=True)
        handle = EVENTS.register_adapted(deliver, adapter, name=name, queue=10_000)
        _handles.append(handle)


def _deliver(handler: EventHandler, event: object) -> None:
    """Deliver an `Event` to a handler. Events of a rendezvous and of other origins are not delivered."""
    if isinstance(event, Event):
        handler.record(event)


def unconfigure() -> None:
    """Remove all event handlers."""
    while _handles:
        _handles.pop().unregister()


def _event_of_torch(name: Any, source: Any, metadata: Any, timestamp_ms: float) -> Event | None:
    """Return the `Event` for an event of torch, or None for an unknown source."""
    has_source = str(source) in EventSource.__members__
    return Event(str(name), EventSource[str(source)], int(timestamp_ms), metadata) if has_source else None


bridge.CompatibilityHandlers.create_event = staticmethod(_event_of_torch)
_events_loggers: dict[str, logging.Logger] = {}
"""Loggers by destination, under the name of torch's registry."""


def _get_or_create_logger(destination: str = "null") -> logging.Logger:
    """Return the logger of a destination, under the name that torch uses."""
    logger = _events_loggers.get(destination)
    if logger is None:
        handler = get_logging_handler(destination)
        logger = logging.getLogger(f"torchelastic-events-{destination}")
        try:
            logger.setLevel(os.environ.get("LOGLEVEL", "INFO"))
        except ValueError:
            logger.setLevel(logging.INFO)
        logger.propagate = False
        if handler not in logger.handlers:
            logger.addHandler(handler)
        _events_loggers[destination] = logger
    return logger


def record(event: Event, destination: str = "null") -> None:
    """Record an event, and write it to a destination: `null`, `console` (standard error), or a destination that the job has added.

    Raises KeyError for an unknown destination.
    """
    logger = _get_or_create_logger(destination)
    recorded_event = event
    if not event.timestamp:
        recorded_event = copy(event)
        recorded_event.timestamp = int(time() * 1000)
    source = getattr(event.source, "value", event.source)
    agent.record_event(event.name, source, event.metadata, recorded_event.timestamp, recorded_event)
    _write(logger, recorded_event)


def record_rdzv_event(event: RdzvEvent) -> None:
    """Record an event of a rendezvous, and write it to the destination `dynamic_rendezvous`."""
    agent.record_rendezvous(fields_of(event), event)
    _write(_get_or_create_logger("dynamic_rendezvous"), event)


def _write(logger: logging.Logger, event: Event | RdzvEvent) -> None:
    """Write an event to a logger, marked as recorded."""
    # The serialization is the most expensive part, and is skipped if nothing is written.
    if not all(isinstance(handler, logging.NullHandler) for handler in logger.handlers):
        logger.info(event.serialize(), extra={RECORDED_ATTRIBUTE: True})


def construct_and_record_rdzv_event(
    run_id: str,
    message: str,
    node_state: NodeState,
    name: str = "",
    hostname: str = "",
    pid: int | None = None,
    master_endpoint: str = "",
    local_id: int | None = None,
    rank: int | None = None,
) -> None:
    """Create and record a rendezvous event, unless the handler of `dynamic_rendezvous` is a NullHandler.

    Name, host and process default to the values of the caller. The state FAILED adds the traceback of the current exception.
    """
    if isinstance(get_logging_handler("dynamic_rendezvous"), logging.NullHandler):
        return
    from socket import getfqdn  # noqa: PLC0415  # needed for rare events only

    code = sys._getframe(1).f_code  # noqa: SLF001  # `inspect.stack` reads the source files of all frames
    event = RdzvEvent(
        name=f"{os.path.basename(code.co_filename)}:{name or code.co_name}",  # noqa: PTH119  # without the import of pathlib
        run_id=run_id,
        message=message,
        hostname=hostname or getfqdn(),
        pid=pid or os.getpid(),
        node_state=node_state,
        master_endpoint=master_endpoint,
        rank=rank,
        local_id=local_id,
        error_trace=traceback.format_exc() if node_state == NodeState.FAILED else "",
    )
    record_rdzv_event(event)
