"""Destinations: the `logging` handlers that events are written to, and the handlers that are given events.

Used in the training process and in torchrun's agent. `_log_handlers` is torch's registry of destinations, under torch's
name: entries may be added. Whoever is configured with `configure` is given every event, on a thread of its own.
"""

from __future__ import annotations

import abc
import json
import logging
from collections.abc import Sequence
from time import time
from typing import Any

from exporter.elastic import agent
from exporter.elastic.events.api import Event, EventSource, RdzvEvent
from exporter.recording import events as recorded
from exporter.recording.event_values import Event as RecordedEvent
from exporter.recording.handle import Handle

RECORDED = "exporter_recorded"
"""Attribute of log records that stand for events which are recorded already."""


class _Writing(logging.Handler):
    """What torch's documentation promises of its handlers: `get_logging_handler("console").info(event)`."""

    def info(self, event: Event | RdzvEvent) -> None:
        """Write one event."""
        self.handle(logging.LogRecord("torchelastic-events", logging.INFO, "", 0, str(event), None, None))


class ConsoleHandler(_Writing, logging.StreamHandler):  # type: ignore[type-arg]  # generic for type checkers only
    """Writes events to standard error."""


class NullHandler(_Writing, logging.NullHandler):
    """Writes nothing."""


_log_handlers: dict[str, logging.Handler] = {
    "console": ConsoleHandler(),
    "dynamic_rendezvous": NullHandler(),
    "null": NullHandler(),
}


def get_logging_handler(destination: str = "null") -> logging.Handler:
    """Give the handler of a destination. Raises KeyError: There is no such destination."""
    try:
        return _log_handlers[destination]
    except KeyError:
        known = ", ".join(_log_handlers)
        raise KeyError(f"no events destination {destination!r}; known: {known}") from None


class PrometheusEventHandler(logging.Handler):
    """Records the events that torch's own module logs as lines of JSON; takes no lock and never raises.

    For `logging.getLogger("torchelastic-events-null").addHandler(...)`, or under a name in torch's registry of
    destinations for `torchrun --event-log-handler NAME`. The bridge does this by itself.
    """

    def handle(self, record: logging.LogRecord) -> bool:
        """Take one record, without the lock that handlers otherwise hold."""
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Record one event, once however many of these take it; what is no event is passed over."""
        if getattr(record, RECORDED, False):
            return
        try:
            fields = json.loads(record.msg)
        except (TypeError, ValueError, RecursionError):
            return
        if not isinstance(fields, dict):
            return
        setattr(record, RECORDED, True)
        if "node_state" in fields:
            agent.tell_rendezvous(fields)
        elif fields.keys() >= {"name", "source", "metadata"}:
            name, source, metadata = fields["name"], fields["source"], fields["metadata"]
            stamp = fields.get("timestamp")
            at = stamp if isinstance(stamp, int | float) and stamp > 0 else time() * 1000
            known = str(source) in EventSource.__members__
            event = Event(str(name), EventSource[str(source)], int(at), metadata) if known else None
            agent.tell(name, source, metadata, at, event)


class EventHandler(abc.ABC):
    """Takes every event that is recorded; the interface that torch's customisation page promises."""

    @abc.abstractmethod
    def record(self, event: Event) -> None:
        """Take one event. What this raises is counted; while it is busy, further events wait."""


class NullEventHandler(EventHandler):
    """Does nothing."""

    def record(self, event: Event) -> None:
        """Do nothing."""


_registered: list[tuple[EventHandler, Handle]] = []


def configure(handler: EventHandler | Sequence[EventHandler] | None) -> None:
    """Have events given to a handler, to a list of them, or to nobody; those of before are given no more.

    Prometheus counts events whoever is configured. Raises TypeError: That is no handler: an object with `record(event)`.
    """
    handlers: list[Any] = (
        list(handler) if isinstance(handler, list | tuple) else [] if handler is None else [handler]
    )
    for each in handlers:
        _check(each)
    unconfigure()
    for each in handlers:
        add_handler(each)


def add_handler(handler: EventHandler) -> None:
    """Have events given to one more handler. Raises TypeError: That is no handler: an object with `record(event)`."""
    _check(handler)

    def take(event: Event | None) -> None:
        if event is not None:
            handler.record(event)

    def origin(_event: RecordedEvent, origin: object, *_more: object) -> object:
        return origin if isinstance(origin, Event) else None

    handle = recorded.register(take, name=type(handler).__name__, adapt=origin)
    _registered.append((handler, handle))


def unconfigure(handler: EventHandler | None = None) -> None:
    """Give events no more to a handler, or to any; waits a moment until it has taken those of before."""
    for pair in list(_registered):
        if handler is None or pair[0] is handler:
            _registered.remove(pair)
            pair[1].unregister()


def _check(handler: object) -> None:
    if isinstance(handler, type) or not callable(getattr(handler, "record", None)):
        raise TypeError(f"an events handler must be an object with record(event), not {handler!r}")
