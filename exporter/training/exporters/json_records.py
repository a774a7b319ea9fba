"""Records: a job's spans and events as JSON objects, of one-logger's shapes.

Used in the training process, on an exporter's own thread. The start of a span is held back until the next record, so
that one without children, events or errors is a single `complete`. Beside one-logger's fields each record says whose
it is (`application_name`, `rank`, `node_name`) and each span what it is part of (`parent_id`). A record is always JSON: a number
that is not finite becomes text.
"""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from math import isfinite
from time import monotonic

from exporter.errors import ExportError
from exporter.recording.identity import identity
from exporter.training.events import ErrorEvent, Event, TelemetryDataError
from exporter.training.exporters.base import BaseExporter
from exporter.training.names import RecordType
from exporter.training.provider import current
from exporter.training.spans import Span
from exporter.training.types import Attributes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


KNOWN_SECONDS = 1.0


class BaseJsonExporter(BaseExporter):
    """Makes the records; a class that derives from it says where they go, by `_write`."""

    def __init__(self) -> None:
        super().__init__()
        self._record_count = 0
        self._lock = (
            threading.RLock()
        )  # for those that derive from it and are used by hand, from several threads
        self._pid = os.getpid()
        self._last_start_span: Span | None = None
        self._who: dict[str, Any] = {}
        self._known_until = 0.0

    def initialize(self) -> None:
        """Be ready."""
        super().initialize()
        self._last_start_span = None

    def export_start(self, span: Span) -> None:
        """Hold the start back until the next record."""
        super().export_start(span)
        self._write_held_back()
        self._last_start_span = span

    def export_stop(self, span: Span) -> None:
        """Write the stop, or the whole span where nothing came between.

        Raises:
            ExportError: The span has not stopped, or it could not be written.
        """
        super().export_stop(span)
        if span.stop_event is None:
            raise ExportError(f"Span {span.id} has no stop event")
        if self._last_start_span is not None and self._last_start_span.id == span.id:
            self._record_span(span, RecordType.COMPLETE)
            self._last_start_span = None
            return
        self._write_held_back()
        self._record_span(span, RecordType.STOP)

    def export_event(self, event: Event, span: Span) -> None:
        """Write the event."""
        super().export_event(event, span)
        self._write_held_back()
        self._export_json_dict(
            {
                "type": RecordType.EVENT.value,
                "span_id": str(span.id),
                "event": self._event_data_to_json(event),
            }
        )

    def export_error(self, event: ErrorEvent, span: Span) -> None:
        """Write the error."""
        super().export_error(event, span)
        self._write_held_back()
        self._export_json_dict(
            {
                "type": RecordType.APPLICATION_ERROR.value,
                "span_id": str(span.id),
                "event": self._event_data_to_json(event),
            }
        )

    def export_telemetry_data_error(self, error: TelemetryDataError) -> None:
        """Write the error."""
        super().export_telemetry_data_error(error)
        self._export_json_dict(
            {"type": RecordType.TELEMETRY_DATA_ERROR.value, "error": self._event_data_to_json(error)}
        )

    def close(self) -> None:
        """Write what is held back."""
        try:
            if self.ready:
                self._write_held_back()
        finally:
            super().close()

    @abstractmethod
    def _write(self, json_dict: dict[str, Any]) -> None:
        """Write one record.

        Raises:
            ExportError: It could not be; it is offered again.
        """

    def _write_held_back(self) -> None:
        if self._last_start_span is not None:
            self._record_span(self._last_start_span, RecordType.START)
            self._last_start_span = None

    def _record_span(self, span: Span, record_type: RecordType) -> None:
        parent = span.exported_parent
        record: dict[str, Any] = {
            "type": record_type.value,
            "id": str(span.id),
            "name": span.name_str,
            "parent_id": None if parent is None else str(parent.id),
        }
        attributes = span.attributes
        if attributes:
            record["attributes"] = self._attributes_to_json(attributes)
        if record_type is not RecordType.STOP:
            record["start_event"] = self._event_data_to_json(span.start_event)
        if record_type is not RecordType.START and span.stop_event is not None:
            record["stop_event"] = self._event_data_to_json(span.stop_event)
        self._export_json_dict(record)

    def _export_json_dict(self, json_dict: dict[str, Any]) -> None:
        with self._lock:
            json_dict["count"] = self._record_count + 1
            json_dict["pid"] = self._pid
            self._write(json_dict | self._whose())
            self._record_count += 1  # a record that is offered again keeps its number

    def _whose(self) -> dict[str, Any]:
        """Say whose a record is: the application, if the provider was told, the rank and the node."""
        now = monotonic()
        if now >= self._known_until:  # asking the environment for each record would be a third of its cost
            who = identity()
            self._who = {"rank": who.rank, "node_name": who.node}
            self._known_until = now + KNOWN_SECONDS
        configured = current()
        if configured is None:
            return self._who
        return self._who | {"application_name": configured.settings.application_name}

    def _event_data_to_json(self, event: Event) -> dict[str, Any]:
        return {"name": event.name_str, "attributes": self._attributes_to_json(event.attributes)}

    @staticmethod
    def _attributes_to_json(attributes: Attributes) -> dict[str, Any]:
        return {name: finite(attribute.value) for name, attribute in attributes.copied().items()}


def finite(value: Any) -> Any:
    """Make a value fit for JSON."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if isinstance(value, list):
        return [finite(item) for item in value]
    return value
