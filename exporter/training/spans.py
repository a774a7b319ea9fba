"""Spans and events, with one-logger's names and signatures.

Events copy their attributes. A span keeps its latest events. Adding an event or an attribute is a single operation on a deque or
a dictionary, so no lock is needed.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID, uuid4

from exporter.errors import OneLoggerError
from exporter.recording.conversion import AttributeValue, safe_repr, to_name
from exporter.recording.signal_safety import is_from_signal_handler
from exporter.training.attributes import (
    Attribute,
    Attributes,
    EventName,
    SpanName,
    StrEnum,
    TracingTimestamp,
    assert_that,
    to_timestamp,
)
from exporter.training.misuse import report

DURATION = "duration_msec"
SPAN_START, SPAN_STOP = "span_start", "span_stop"
ERROR, TELEMETRY_DATA_ERROR = "error", "telemetry_data_error"
MAX_EVENTS = 64
"""Limit of a span's events besides start and stop. The latest events are kept."""
MAX_TRACEBACK_CHARACTERS = 16_384
"""Maximum length of a traceback. The end of a longer traceback is kept."""

NO_ID = UUID(int=0)


class Event:
    """Event of a span. The attributes always include `timestamp_msec`."""

    __slots__ = ("name", "timestamp", "attributes")

    def __init__(
        self, name: EventName, timestamp: TracingTimestamp, attributes: Attributes | None = None
    ) -> None:
        self.name = name
        self.timestamp = to_timestamp(timestamp)
        # A copy: the caller may change the original while exporters read.
        self.attributes = Attributes.of(attributes).copied()
        self.attributes.add("timestamp_msec", self.timestamp.milliseconds_since_epoch)

    @property
    def name_str(self) -> str:
        """Name as text."""
        return to_name(self.name)

    @classmethod
    def create(
        cls, name: EventName, attributes: Attributes | None = None, timestamp: TracingTimestamp | None = None
    ) -> Event:
        """Return a new event. The time defaults to the current time."""
        return cls(name, to_timestamp(timestamp), attributes)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-compatible dictionary for `from_json`."""
        return {
            "name": self.name_str,
            "timestamp": self.timestamp.to_json(),
            "attributes": self.attributes.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Event:
        """Return the event of a `to_json` dictionary, in its original class.

        Raises:
            OneLoggerError: The dictionary has no name or no timestamp.
        """
        assert_that(data and data.get("name") and data.get("timestamp"), f"not an event: {data}")
        timestamp = TracingTimestamp.from_json(data["timestamp"])
        attributes = Attributes.from_json(data.get("attributes") or {})
        if data["name"] == ERROR and "error_message" in data:
            kind, text, trace = (data.get(f"exception_{name}") for name in ("type", "message", "traceback"))
            return ErrorEvent(timestamp, data["error_message"], kind, text, trace, attributes)
        if data["name"] == TELEMETRY_DATA_ERROR and "error_type" in data:
            error_type = TelemetryDataError.ErrorType(data["error_type"])
            return TelemetryDataError(timestamp, error_type, data["error_message"], attributes)
        return Event(data["name"], timestamp, attributes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Event) and (
            (self.name, self.timestamp, self.attributes) == (other.name, other.timestamp, other.attributes)
        )

    def __hash__(self) -> int:
        return hash((self.name_str, self.timestamp))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name_str!r}, {self.attributes.to_json()!r})"


class ErrorEvent(Event):
    """Error of the application, with the class, message and traceback of the exception."""

    __slots__ = ("error_message", "exception_type", "exception_message", "exception_traceback")

    def __init__(
        self,
        timestamp: TracingTimestamp,
        error_message: str,
        exception_type: str | None = None,
        exception_message: str | None = None,
        exception_traceback: str | None = None,
        attributes: Attributes | None = None,
    ) -> None:
        self.error_message = _message(error_message)
        self.exception_type = exception_type
        self.exception_message = exception_message or exception_type
        self.exception_traceback = exception_traceback
        values = {name: getattr(self, name) for name in ErrorEvent.__slots__}
        texts = Attributes({name: text for name, text in values.items() if text is not None})
        super().__init__(ERROR, timestamp, Attributes.merge(texts, Attributes.of(attributes)))

    @classmethod
    def create(  # type: ignore[override]  # as in one-logger
        cls,
        error_message: str,
        exception: BaseException | None = None,
        exception_traceback: str | None = None,
        timestamp: TracingTimestamp | None = None,
    ) -> ErrorEvent:
        """Return a new error event with the traceback of the exception. The time defaults to the current time."""
        kind = text = None
        if isinstance(exception, BaseException):
            kind = type(exception).__name__
            try:
                text = str(exception) or repr(exception)
            except Exception as error:  # the user's own `__str__`
                if is_from_signal_handler(error):
                    raise
                text = kind
            if exception.__traceback__ is not None and not exception_traceback:
                exception_traceback = "".join(traceback.format_exception(exception))[
                    -MAX_TRACEBACK_CHARACTERS:
                ]
        return cls(to_timestamp(timestamp), error_message, kind, text, exception_traceback)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-compatible dictionary for `from_json`."""
        data = super().to_json() | {"error_message": self.error_message}
        if self.exception_type is not None:
            data["exception_type"] = self.exception_type
            data["exception_message"] = self.exception_message
            data["exception_traceback"] = self.exception_traceback or ""
        return data


class TelemetryDataError(Event):
    """Event that reports incomplete telemetry, as opposed to an error of the application."""

    __slots__ = ("error_message", "error_type")

    class ErrorType(StrEnum):
        """Extent of the loss: all telemetry or a part is missing."""

        NO_TELEMETRY_DATA = "no_telemetry_data"
        INCOMPLETE_TELEMETRY_DATA = "incomplete_telemetry_data"

    def __init__(
        self,
        timestamp: TracingTimestamp,
        error_type: TelemetryDataError.ErrorType,
        error_message: str,
        attributes: Attributes | None = None,
    ) -> None:
        self.error_type = error_type
        self.error_message = _message(error_message)
        values = {"error_message": self.error_message, "telemetry_data_error_type": error_type.value}
        all_attributes = Attributes.merge(Attributes(values), Attributes.of(attributes))
        super().__init__(TELEMETRY_DATA_ERROR, timestamp, all_attributes)

    @classmethod
    def create(  # type: ignore[override]  # as in one-logger
        cls,
        error_type: TelemetryDataError.ErrorType,
        error_message: str,
        attributes: Attributes | None = None,
    ) -> TelemetryDataError:
        """Return a new event at the current time."""
        return cls(TracingTimestamp.now(), error_type, error_message, attributes)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-compatible dictionary for `from_json`."""
        return super().to_json() | {"error_type": self.error_type.value, "error_message": self.error_message}


def _message(value: object) -> str:
    """Return a text unchanged, and the representation of any other object."""
    return value if isinstance(value, str) else safe_repr(value)


class Span:
    """Span of work with a start event, a stop event and a parent."""

    __slots__ = (
        "__weakref__",
        "_events",
        "id",
        "name",
        "parent_span",
        "exported_parent",
        "start_event",
        "stop_event",
        "initial_attributes",
        "updated_attributes",
        "on_event",
    )

    def __init__(
        self,
        id: UUID,
        name: SpanName,
        start_event: Event,
        parent_span: Span | None = None,
        span_attributes: Attributes | None = None,
    ) -> None:
        self.id = id
        self.name = name
        self.parent_span = parent_span if isinstance(parent_span, Span) else None
        self.exported_parent = self.parent_span  # in copies for exporters, the nearest exported ancestor
        self.start_event = start_event
        self.stop_event: Event | None = None  # None if active
        self._events: deque[Event] | None = None
        self.initial_attributes = Attributes.of(span_attributes)  # set at the start
        self.updated_attributes = type(self.initial_attributes)()  # set after the start
        # Called after the job has added an event.
        self.on_event: Callable[[Span, Event], object] | None = None

    @classmethod
    def create(
        cls,
        name: SpanName,
        parent_span: Span | None = None,
        span_attributes: Attributes | None = None,
        start_event_attributes: Attributes | None = None,
        start_time: TracingTimestamp | None = None,
    ) -> Span:
        """Return a new span. The start time defaults to the current time. Nothing exports the span before an observer requests it."""
        start = Event(SPAN_START, to_timestamp(start_time), start_event_attributes)
        return cls(uuid4(), name, start, parent_span, span_attributes)

    @property
    def name_str(self) -> str:
        """Name as text."""
        return to_name(self.name)

    def set_initial_attributes(self, attributes: Attributes) -> None:
        """Add initial attributes. Attributes that the job has set take precedence. The collection *attributes* is changed and used."""
        attributes.update(self.initial_attributes)
        self.initial_attributes = attributes

    @property
    def events(self) -> list[Event]:
        """Start event, latest events with the oldest first, and stop event of a stopped span."""
        stop = [] if self.stop_event is None else [self.stop_event]
        return [self.start_event, *(self._events or ()), *stop]

    @property
    def active(self) -> bool:
        """True until the span stops."""
        return self.stop_event is None

    @property
    def attributes(self) -> Attributes:
        """Initial and updated attributes in a new collection, of the class of the initial attributes."""
        return type(self.initial_attributes).merge(self.initial_attributes, self.updated_attributes)

    def stop(
        self,
        stop_event_attributes: Attributes | None = None,
        stop_time: TracingTimestamp | None = None,
    ) -> None:
        """Stop the span at the given time, by default now. A second call is ignored."""
        if self.stop_event is not None:
            return
        stop = Event(SPAN_STOP, to_timestamp(stop_time), stop_event_attributes)
        self.stop_event = stop
        seconds = stop.timestamp.perf_counter_seconds - self.start_event.timestamp.perf_counter_seconds
        self.add_attribute(DURATION, max(round(seconds * 1000), 0))

    def add_event(self, event: Event) -> Event:
        """Add an event. An event after the stop, and an object that is not an event, are ignored and counted as misuse."""
        candidate: object = event
        if not isinstance(candidate, Event) or self.stop_event is not None:
            expected = f"an Event before the end of the span {self.name_str}"
            report("Span.add_event", "stopped_span", expected)
        else:
            self.append_event(event)
            if self.on_event is not None:
                self.on_event(self, event)
        return event

    def append_event(self, event: Event) -> None:
        """Add an event without calling `on_event`."""
        if self._events is None:
            self._events = deque(maxlen=MAX_EVENTS)
        self._events.append(event)

    def add_attribute(self, name: str, value: AttributeValue) -> Attribute:
        """Set and return an attribute."""
        return self.updated_attributes.add_attribute(Attribute(name, value))

    def add_attributes(self, attributes: Attributes) -> None:
        """Set attributes from a mapping."""
        self.updated_attributes.update(Attributes.of(attributes))

    def duration_msec(self) -> int:
        """Return the duration, rounded to milliseconds.

        Raises:
            OneLoggerError: The span is active.
        """
        duration: int | None = self.updated_attributes.get_int_value(DURATION)
        if duration is None:
            raise OneLoggerError(f"{self} has not ended")
        return duration

    def copy_at_start(self, exported_parent: Span | None) -> Span:
        """Return a copy of the span in the state of its start, for exporters on other threads."""
        attributes = self.initial_attributes.copied()
        copy = Span(self.id, self.name, self.start_event, self.parent_span, attributes)
        copy.exported_parent = exported_parent
        return copy

    def snapshot_copy(self, exported_parent: Span | None) -> Span:
        """Return a copy of the span in its current state, for exporters on other threads."""
        copy = self.copy_at_start(exported_parent)
        copy.updated_attributes.update(self.updated_attributes)
        copy._events = None if self._events is None else self._events.copy()  # noqa: SLF001  # both are spans
        copy.stop_event = self.stop_event
        return copy

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-compatible dictionary for `from_json`."""
        return {
            "name": self.name_str,
            "id": str(self.id),
            "events": [event.to_json() for event in self.events],
            "attributes": self.attributes.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Span:
        """Return the span of a `to_json` dictionary of this package or of one-logger.

        Raises:
            OneLoggerError: The dictionary has no name, no id or no event.
        """
        is_complete = data and data.get("name") and data.get("id") and data.get("events")
        assert_that(is_complete, f"not a span: {data}")
        start, *later_events = [Event.from_json(event) for event in data["events"]]
        attributes = Attributes.from_json(data.get("attributes") or {})
        span = cls(UUID(str(data["id"])), data["name"], start, None, attributes)
        for event in later_events:
            if event.name == SPAN_STOP:
                span.stop(event.attributes, event.timestamp)
            else:
                span.append_event(event)
        return span

    def __repr__(self) -> str:
        return f"Span({self.name_str!r}, id={self.id}, {'active' if self.active else 'stopped'})"


class NonRecordingSpan:
    """Span of a block that is not observed. Changes have no effect."""

    __slots__ = ()

    @property
    def name(self) -> SpanName:
        """Empty name."""
        return ""

    @property
    def id(self) -> UUID:
        """Nil UUID."""
        return NO_ID

    @property
    def active(self) -> bool:
        """False: the span records nothing."""
        return False

    def add_event(self, event: Event) -> Event:
        """Return the event."""
        return event

    def add_attribute(self, name: str, value: AttributeValue) -> Attribute:
        """Return the attribute."""
        return Attribute(name, value)

    def add_attributes(self, attributes: Attributes) -> None:
        """Ignore the attributes."""
