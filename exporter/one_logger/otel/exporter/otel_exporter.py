"""Exporter to OpenTelemetry: passes spans to a span exporter of the SDK, for example as OTLP.

A span is sent after its end or when the exporter is closed, and again if the backend rejects it. The tracing of the job is not
affected, because no context is attached and the tracer provider is separate.
"""

from __future__ import annotations

import os
import sys
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
from exporter.recording.conversion import to_repr
from exporter.recording.recorder import RECORDER
from exporter.training.attributes import Attributes, TracingTimestamp
from exporter.training.spans import ErrorEvent, Event, Span, TelemetryDataError

__all__ = ["OTelExporter"]

SPAN_ID = "one_logger_span_id"
MAX_EVENTS = 1024
"""Limit of the events of a span. The latest events are sent."""
MAX_UNSENT_SPANS = 4096
"""Limit of the ended spans that are stored while the backend rejects them. Above the limit, the oldest span is dropped and counted."""
MAX_INTEGER = 2**63 - 1
"""Largest integer of an attribute in OTLP."""


class OTelExporter(BaseExporter):
    """Exporter through a span exporter of the OpenTelemetry SDK.

    Args:
        otel_span_exporter: Span exporter of the SDK.
        resource: Resource of the spans. None means the application as `service.name`, the run as `service.instance.id`, host and
            rank.
    """

    def __init__(self, otel_span_exporter: SpanExporter, resource: Resource | None = None) -> None:
        super().__init__()
        self._exporter = otel_span_exporter
        self._resource = resource
        self._ended_spans: deque[SdkSpan] = deque(maxlen=MAX_UNSENT_SPANS)
        self._open_spans: dict[UUID, SdkSpan] = {}

    def export_start(self, span: Span) -> None:
        """Start a span with the nearest exported ancestor as parent."""
        super().export_start(span)
        self._otel_span(span)

    def export_stop(self, span: Span) -> None:
        """End a span. The next `write_out` sends it."""
        super().export_stop(span)
        otel_span = self._otel_span(span)
        del self._open_spans[span.id]
        otel_span.set_attributes(_attributes(span.attributes))
        self._end(otel_span, None if span.stop_event is None else _nanoseconds(span.stop_event.timestamp))

    def export_event(self, event: Event, span: Span) -> None:
        """Add an event to a span."""
        super().export_event(event, span)
        self._otel_span(span).add_event(
            event.name_str, _attributes(event.attributes), _nanoseconds(event.timestamp)
        )

    def export_error(self, event: ErrorEvent, span: Span) -> None:
        """Add an error to a span, with OpenTelemetry's names of attributes, and set the status of the span."""
        super().export_error(event, span)
        attributes = _attributes(event.attributes)
        for own_name, otel_name in (("type", "type"), ("message", "message"), ("traceback", "stacktrace")):
            if f"exception_{own_name}" in attributes:
                attributes[f"exception.{otel_name}"] = attributes.pop(f"exception_{own_name}")
        otel_span = self._otel_span(span)
        name = "exception" if event.exception_type else event.name_str
        otel_span.add_event(name, attributes, _nanoseconds(event.timestamp))
        otel_span.set_status(Status(StatusCode.ERROR, event.error_message))

    def export_telemetry_data_error(self, error: TelemetryDataError) -> None:
        """Send a separate span without a duration, because the span of the application may have ended or not be exported."""
        super().export_telemetry_data_error(error)
        timestamp = _nanoseconds(error.timestamp)
        otel_span = self._tracer.start_span(error.name_str, context={}, start_time=timestamp)
        otel_span.set_attributes(_attributes(error.attributes))
        otel_span.set_status(Status(StatusCode.ERROR, error.error_message))
        self._end(otel_span, timestamp)

    def write_out(self) -> None:
        """Send the spans that have ended.

        Raises:
            ExportError: The backend rejected the spans, which are kept.
        """
        spans = tuple(self._ended_spans)
        if spans and self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise ExportError(f"{type(self._exporter).__name__} rejected {len(spans)} spans")
        self._ended_spans.clear()

    def close(self) -> None:
        """End the open spans, the latest first, and send all spans. A later application of the process may use the exporter again.

        Raises:
            ExportError: The backend rejected the spans, which are dropped and counted.
        """
        while self._open_spans:
            _, latest_span = self._open_spans.popitem()
            self._end(latest_span)
        try:
            self.write_out()
            self._exporter.force_flush()
        finally:
            self.dropped_records += len(self._ended_spans)
            self._ended_spans.clear()
            super().close()

    def shut_down(self) -> None:
        """Shut the span exporter down, which sends nothing afterwards."""
        self._exporter.shutdown()

    def _end(self, otel_span: SdkSpan, end_time: int | None = None) -> None:
        """End a span of the SDK at a Unix time in nanoseconds, by default now, and store the span until it is sent."""
        otel_span.end(end_time)
        if len(self._ended_spans) == self._ended_spans.maxlen:
            self.dropped_records += 1
        self._ended_spans.append(otel_span)

    @cached_property
    def _tracer(self) -> Any:
        """Tracer of this exporter, created at the first record, because the application name is set by then."""
        resource, limits = self._resource or self._default_resource(), SpanLimits(max_events=MAX_EVENTS)
        # `shut_down` shuts the span exporter down. At exit, the provider would do so before the last spans arrive.
        provider = TracerProvider(resource=resource, span_limits=limits, shutdown_on_exit=False)
        return provider.get_tracer("training-exporter")

    def _otel_span(self, span: Span) -> SdkSpan:
        """Return the open span of the SDK for a span. A span that is not open, for example after `close`, is started again."""
        otel_span = self._open_spans.get(span.id)
        if otel_span is None:
            parent_span = span.exported_parent
            otel_parent = None if parent_span is None else self._open_spans.get(parent_span.id)
            # An explicit context, because the default would be the context of the job.
            context = {} if otel_parent is None else set_span_in_context(otel_parent, {})
            otel_span = self._open_spans[span.id] = self._tracer.start_span(
                span.name_str,
                context=context,
                start_time=_nanoseconds(span.start_event.timestamp),
                attributes={**_attributes(span.attributes), SPAN_ID: str(span.id)},
            )
        return otel_span

    def _default_resource(self) -> Resource:
        process = RECORDER.process.identity()
        attributes: dict[str, str | int] = {
            "service.name": os.environ.get("OTEL_SERVICE_NAME") or self.application_name or "training",
            "service.instance.id": process.run,
            "host.name": process.node,
        }
        if process.rank is not None:
            attributes["training.rank"] = process.rank
        return Resource.create(attributes)


def _attributes(attributes: Attributes) -> dict[str, Any]:
    """Return the attributes as values of OpenTelemetry."""
    return {
        name: _encodable(attribute.value)
        for name, attribute in attributes.items()
        if attribute.value is not None
    }


def _encodable(value: Any) -> Any:
    """Return a value with each integer of more than 64 bits as a float, or as text beyond the range of floats."""
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    if not isinstance(value, int) or -MAX_INTEGER <= value <= MAX_INTEGER:
        return value
    return float(value) if abs(value) <= sys.float_info.max else to_repr(value)


def _nanoseconds(timestamp: TracingTimestamp) -> int:
    """Return the Unix time in nanoseconds."""
    return int(timestamp.seconds_since_epoch * 1e9)
