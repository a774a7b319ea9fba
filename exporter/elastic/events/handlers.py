"""Destinations of events, which are `logging` handlers, and event handlers.

`_log_handlers` is the registry of destinations, under the name of torch's registry. A job may add entries.
"""

from __future__ import annotations

import abc
import logging

from exporter.elastic.bridge import PrometheusEventHandler
from exporter.elastic.events.api import Event, RdzvEvent

__all__ = ["PrometheusEventHandler", "get_logging_handler"]


class _EventWriter(logging.Handler):
    """Base of destinations with the documented method `get_logging_handler("console").info(event)`."""

    def info(self, event: Event | RdzvEvent) -> None:
        """Write an event."""
        self.handle(logging.LogRecord("torchelastic-events", logging.INFO, "", 0, str(event), None, None))


class ConsoleHandler(_EventWriter, logging.StreamHandler):  # type: ignore[type-arg]  # generic for type checkers only
    """Destination that writes events to standard error."""


class NullHandler(_EventWriter, logging.NullHandler):
    """Destination that writes nothing."""


_log_handlers: dict[str, logging.Handler] = {
    "console": ConsoleHandler(),
    "dynamic_rendezvous": NullHandler(),
    "null": NullHandler(),
}


def get_logging_handler(destination: str = "null") -> logging.Handler:
    """Return the handler of a destination. Raises KeyError for an unknown destination."""
    try:
        return _log_handlers[destination]
    except KeyError:
        destinations = ", ".join(_log_handlers)
        raise KeyError(f"no events destination {destination!r}; destinations are {destinations}") from None


class EventHandler(abc.ABC):
    """Interface of event handlers, as in the torch documentation on customization."""

    @abc.abstractmethod
    def record(self, event: Event) -> None:
        """Handle an event. Exceptions are counted."""


class NullEventHandler(EventHandler):
    """Event handler that does nothing."""

    def record(self, event: Event) -> None:
        """Do nothing."""
