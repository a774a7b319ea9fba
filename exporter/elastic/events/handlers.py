"""Destinations (`logging` handlers) and event handlers.

`_log_handlers` is torch's registry of destinations, under torch's name: entries may be added.
"""

from __future__ import annotations

import abc
import logging

from exporter.elastic.bridge import PrometheusEventHandler
from exporter.elastic.events.api import Event, RdzvEvent

__all__ = ["PrometheusEventHandler", "get_logging_handler"]


class _Writing(logging.Handler):
    """Base with the method of torch's documentation: `get_logging_handler("console").info(event)`."""

    def info(self, event: Event | RdzvEvent) -> None:
        """Write an event."""
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
    """Return the handler of a destination; raises KeyError for an unknown destination."""
    try:
        return _log_handlers[destination]
    except KeyError:
        known = ", ".join(_log_handlers)
        raise KeyError(f"no events destination {destination!r}; known: {known}") from None


class EventHandler(abc.ABC):
    """Interface of event handlers, from torch's customisation page."""

    @abc.abstractmethod
    def record(self, event: Event) -> None:
        """Handle an event; exceptions are counted."""


class NullEventHandler(EventHandler):
    """Does nothing."""

    def record(self, event: Event) -> None:
        """Do nothing."""
