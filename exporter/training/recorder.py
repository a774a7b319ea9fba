"""Recorders: core one-logger's way to make spans, events and errors by hand.

Used in the training process, on the job's threads. No call here raises, whatever it is given and whatever state it is
in, unless the job chose `PROPAGATE_EXCEPTIONS`; none gives None. A recorder keeps a tree of its own, per thread and
asyncio task; that of a training job (`exporter.training.training_recorder`) shares the tree of the standard spans.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextvars import ContextVar
from uuid import UUID

from exporter.training.delivery import EXIT_SECONDS, Filter, Sink
from exporter.training.events import ErrorEvent, Event, TelemetryDataError
from exporter.training.names import ExportCustomizationMode, SpanName, name_of
from exporter.training.provider import current, misuse
from exporter.training.spans import Span
from exporter.training.types import Attributes, TracingTimestamp, all_are

TYPE_CHECKING = False
if TYPE_CHECKING:
    from exporter.training.exporters.base import Exporter

__all__ = ["DefaultRecorder", "ExportCustomizationMode", "Recorder"]


class Recorder(ABC):
    """Makes spans, and takes what happens in them."""

    @abstractmethod
    def start(
        self,
        span_name: SpanName,
        span_attributes: Attributes | None = None,
        start_event_attributes: Attributes | None = None,
        start_time: TracingTimestamp | None = None,
        parent_span: Span | None = None,
    ) -> Span:
        """Begin a span, in the parent that is given or else in the latest that is active here."""

    @abstractmethod
    def stop(
        self,
        span: Span,
        stop_event_attributes: Attributes | None = None,
        stop_time: TracingTimestamp | None = None,
    ) -> None:
        """End a span."""

    @abstractmethod
    def event(self, span: Span, event: Event) -> Event:
        """Record an event of a span that is active."""

    @abstractmethod
    def error(self, span: Span, error_message: str, exception: BaseException | None = None) -> ErrorEvent:
        """Record an error of the application."""

    @abstractmethod
    def telemetry_data_error(self, error_message: str, attributes: Attributes | None = None) -> None:
        """Tell the exporters that the telemetry is incomplete."""

    @abstractmethod
    def close(self) -> None:
        """End every span that is active, and let the exporters finish."""


class DefaultRecorder(Recorder):
    """A recorder with exporters of its own.

    Args:
        exporters: To whom; each is started at once, on a thread of its own.
        export_customization_mode: Whether the names are all that go out, or all that do not.
        span_name_filter: Names of spans.
    """

    def __init__(
        self,
        exporters: Iterable[Exporter] = (),
        export_customization_mode: ExportCustomizationMode = ExportCustomizationMode.EXPORT_ALL_SPANS,
        span_name_filter: Iterable[SpanName] | None = None,
    ) -> None:
        self.sink = Sink(exporters, Filter(export_customization_mode, span_name_filter))
        self.sink.begin()
        self._lock = threading.Lock()
        self._spans: dict[UUID, Span] = {}
        self._latest: ContextVar[Span | None] = ContextVar("latest_active_span", default=None)
        self._closed = False

    def start(
        self,
        span_name: SpanName,
        span_attributes: Attributes | None = None,
        start_event_attributes: Attributes | None = None,
        start_time: TracingTimestamp | None = None,
        parent_span: Span | None = None,
    ) -> Span:
        """Begin a span; after `close` one that goes nowhere."""
        parent = parent_span or active_or_ancestor(self._latest.get())
        span = Span.create(span_name, parent, span_attributes, start_event_attributes, start_time)
        if not self._takes("start"):
            return span
        with self._lock:
            self._spans[span.id] = span
        self._latest.set(span)
        span.listener = self.sink.event
        self.sink.start(span)
        return span

    def stop(
        self,
        span: Span,
        stop_event_attributes: Attributes | None = None,
        stop_time: TracingTimestamp | None = None,
    ) -> None:
        """End a span; one that is not active is a misuse."""
        if not self._takes("stop"):
            return
        with self._lock:
            found = self._spans.pop(getattr(span, "id", None), None)  # type: ignore[arg-type]  # anything may come
        if found is None:
            misuse("recorder.stop", "no_such_span", "a span that is active")
            return
        found.stop(stop_event_attributes, stop_time)
        if self._latest.get() is found:
            self._latest.set(active_or_ancestor(found.parent_span))
        self.sink.stop(found)

    def event(self, span: Span, event: Event) -> Event:
        """Record an event of a span that is active."""
        if self._takes("event"):
            if all_are(((span, Span), (event, Event))):
                span.add_event(event)  # its listener exports it
            else:
                misuse("recorder.event", "no_such_span", "a span and an event")
        return event

    def error(self, span: Span, error_message: str, exception: BaseException | None = None) -> ErrorEvent:
        """Record an error of the application."""
        event = ErrorEvent.create(error_message, exception)
        if self._takes("error"):
            if all_are(((span, Span),)):
                span.keep(event)
                self.sink.error(span, event)
            else:
                misuse("recorder.error", "no_such_span", "a span that is active")
        return event

    def telemetry_data_error(self, error_message: str, attributes: Attributes | None = None) -> None:
        """Tell the exporters that the telemetry is incomplete."""
        if self._takes("telemetry_data_error"):
            kind = TelemetryDataError.ErrorType.INCOMPLETE_TELEMETRY_DATA
            self.sink.telemetry_data_error(TelemetryDataError.create(kind, error_message, attributes))

    def close(self) -> None:
        """End every active span, the innermost first, and close the exporters; again is harmless."""
        if self._closed:
            return
        with self._lock:
            active = list(self._spans.values())
        for span in reversed(active):
            self.stop(span)
        self._closed = True
        self.sink.close(EXIT_SECONDS)

    def get_active_spans_by_name(self, span_name: SpanName) -> list[Span]:
        """Give the active spans of a name, in the order of their starts."""
        with self._lock:
            active = list(self._spans.values())
        return [span for span in active if span.name_str == name_of(span_name)]

    def _takes(self, call: str) -> bool:
        if self._closed:
            misuse(f"recorder.{call}", "closed", "to be called before the recorder is closed")
            return False
        return not self._is_off()

    def _is_off(self) -> bool:
        configured = current()
        return configured is not None and configured.recorder is self and not configured.enabled


def active_or_ancestor(span: Span | None) -> Span | None:
    """Give the span if it is active, else the nearest around it that is."""
    while span is not None and not span.active:
        span = span.parent_span
    return span
