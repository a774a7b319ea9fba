"""Export of spans: an end or an event is exported only if the start was."""

from __future__ import annotations

from uuid import UUID

from exporter.one_logger.delivery import Delivery
from exporter.training.spans import ErrorEvent, Event, Span

RECORDER_VALUE = "recorder"
"""Key under which the values of a block contain the DefaultRecorder that has started the block."""


class SpanExport:
    """Exporter of spans to a delivery, which remembers the open spans whose start was exported."""

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self._open: set[UUID] = set()

    def start(self, span: Span) -> None:
        """Export the start of a span, if spans of this name are exported."""
        if self.delivery.accepts(span.name):
            self._open.add(span.id)
            self.delivery.start(span)

    def event(self, span: Span, event: Event) -> None:
        """Export an event, if the start of the span was exported."""
        if span.id in self._open:
            self.delivery.event(span, event)

    def error(self, span: Span, event: ErrorEvent) -> None:
        """Export an error, if the start of the span was exported."""
        if span.id in self._open:
            self.delivery.error(span, event)

    def stop(self, span: Span) -> None:
        """Export the stop, if the start of the span was exported."""
        if span.id in self._open:
            self._open.discard(span.id)
            self.delivery.stop(span)

    def forget(self, span: Span) -> None:
        """Discard an open span without exporting a stop."""
        self._open.discard(span.id)
