"""The bridge to OpenTelemetry: a job's spans as OTLP, through any span exporter of the SDK.

Used in the training process, on the exporter's own thread. Each span goes out once, when it has ended; one that is open when
the job ends goes out then. The job's own tracing is left alone: no context is attached, the tracer provider is none of its.
"""

from __future__ import annotations

import os
from collections import deque
from functools import cached_property
from typing import Any
from uuid import UUID

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import set_span_in_context
from opentelemetry.trace.status import Status, StatusCode

from exporter.errors import ExportError
from exporter.one_logger.exporters import BaseExporter
from exporter.one_logger.records import current
from exporter.recording.recorder import RECORDER
from exporter.training.attributes import Attributes, TracingTimestamp
from exporter.training.spans import ErrorEvent, Event, Span, TelemetryDataError

SPAN_ID = "one_logger_span_id"
MOST_EVENTS = 1024
"""Events of one span that are sent: the latest."""
MOST_KEPT = 4096
"""Ended spans that are kept while the backend refuses them: the latest."""
_LARGEST = 2**63 - 1


class OTelExporter(BaseExporter):
    """Sends spans through a span exporter of the OpenTelemetry SDK.

    The `resource` says who sends; None for the application's name as `service.name`, the run as `service.instance.id`, the
    host and the rank.
    """

    def __init__(self, otel_span_exporter: SpanExporter, resource: Resource | None = None) -> None:
        super().__init__()
        self._exporter = otel_span_exporter
        self._resource = resource
        self._ended: deque[SdkSpan] = deque(maxlen=MOST_KEPT)
        self._open: dict[UUID, SdkSpan] = {}

    def export_start(self, span: Span) -> None:
        """Begin the span, in the parent that is exported too."""
        super().export_start(span)
        self._of(span)

    def export_stop(self, span: Span) -> None:
        """End the span; it goes out with the next `write_out`."""
        super().export_stop(span)
        begun = self._of(span)
        del self._open[span.id]
        begun.set_attributes(_attributes(span.attributes))
        self._end(begun, None if span.stop_event is None else _nanoseconds(span.stop_event.timestamp))

    def export_event(self, event: Event, span: Span) -> None:
        """Add the event to its span."""
        super().export_event(event, span)
        self._of(span).add_event(event.name_str, _attributes(event.attributes), _nanoseconds(event.timestamp))

    def export_error(self, event: ErrorEvent, span: Span) -> None:
        """Add the error to its span, as an exception of OpenTelemetry's own names, and mark the span."""
        super().export_error(event, span)
        attributes = _attributes(event.attributes)
        for ours, theirs in (("type", "type"), ("message", "message"), ("traceback", "stacktrace")):
            if f"exception_{ours}" in attributes:
                attributes[f"exception.{theirs}"] = attributes.pop(f"exception_{ours}")
        begun = self._of(span)
        name = "exception" if event.exception_type else event.name_str
        begun.add_event(name, attributes, _nanoseconds(event.timestamp))
        begun.set_status(Status(StatusCode.ERROR, event.error_message))

    def export_telemetry_data_error(self, error: TelemetryDataError) -> None:
        """Send a span of its own, without a length: the application's may have ended, or not be exported."""
        super().export_telemetry_data_error(error)
        when = _nanoseconds(error.timestamp)
        begun = self._tracer.start_span(error.name_str, context={}, start_time=when)
        begun.set_attributes(_attributes(error.attributes))
        begun.set_status(Status(StatusCode.ERROR, error.error_message))
        self._end(begun, when)

    def write_out(self) -> None:
        """Send the spans that have ended. Raises ExportError: The backend refused them; they are kept."""
        waiting = tuple(self._ended)
        if waiting and self._exporter.export(waiting) is not SpanExportResult.SUCCESS:
            raise ExportError(f"{type(self._exporter).__name__} refused {len(waiting)} spans")
        self._ended.clear()

    def close(self) -> None:
        """Send what is left, spans that are open too, the innermost first, and shut the exporter down.

        Raises ExportError: The backend refused them.
        """
        while self._open:
            self._end(self._open.popitem()[1])
        try:
            self.write_out()
        finally:
            self._exporter.shutdown()
            super().close()

    def _end(self, begun: SdkSpan, when: int | None = None) -> None:
        begun.end(when)
        self._ended.append(begun)

    @cached_property
    def _tracer(self) -> Any:
        """A tracer of its own; made at the first record, when the provider knows the application's name."""
        resource, limits = self._resource or _resource(), SpanLimits(max_events=MOST_EVENTS)
        # atexit would end it before the job's last spans have arrived; `close` does it.
        provider = TracerProvider(resource=resource, span_limits=limits, shutdown_on_exit=False)
        return provider.get_tracer("training-exporter")

    def _of(self, span: Span) -> SdkSpan:
        begun = self._open.get(span.id)
        if begun is None:
            around = span.exported_parent
            parent = None if around is None else self._open.get(around.id)
            begun = self._open[span.id] = self._tracer.start_span(
                span.name_str,
                context={} if parent is None else set_span_in_context(parent, {}),  # never the job's own
                start_time=_nanoseconds(span.start_event.timestamp),
                attributes={**_attributes(span.attributes), SPAN_ID: str(span.id)},
            )
        return begun


def _resource() -> Resource:
    who, configured = RECORDER.process.identity(), current()
    name = "training" if configured is None else configured.settings.application_name
    service = os.environ.get("OTEL_SERVICE_NAME") or name
    told = {"service.name": service, "service.instance.id": who.run, "host.name": who.node}
    return Resource.create(told if who.rank is None else {**told, "training.rank": who.rank})


def _attributes(attributes: Attributes) -> dict[str, Any]:
    """Make what OTLP can encode: an integer beyond 64 bits becomes a float."""
    return {name: _fitting(each.value) for name, each in attributes.items() if each.value is not None}


def _fitting(value: Any) -> Any:
    if isinstance(value, list):
        return [_fitting(item) for item in value]
    large = isinstance(value, int) and not -_LARGEST <= value <= _LARGEST
    return float(value) if large else value


def _nanoseconds(timestamp: TracingTimestamp) -> int:
    return int(timestamp.seconds_since_epoch * 1e9)
