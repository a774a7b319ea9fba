"""Spans and events, with one-logger's names and signatures.

An event owns a copy of its attributes, and a span keeps only its latest events. Every change of a span is a single operation
on a dictionary or a deque, so no lock is needed.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID, uuid4

from exporter.errors import OneLoggerError
from exporter.recording.conversion import AttributeValue, safe_repr, to_name
from exporter.training.attributes import (
    Attribute,
    Attributes,
    EventName,
    Name,
    SpanName,
    TracingTimestamp,
    assert_that,
    moment,
)
from exporter.training.misuse import report

DURATION = "duration_msec"
SPAN_START, SPAN_STOP = "span_start", "span_stop"
ERROR, TELEMETRY_DATA_ERROR = "error", "telemetry_data_error"
MOST_EVENTS = 64
"""Events that a span keeps beside its start and its stop: the latest."""
LONGEST_TRACEBACK = 16_384
"""Characters of a traceback; the end of it says most."""


NO_ID = UUID(int=0)


class Event:
    """A moment of a span, with attributes; it does not change, and always carries `timestamp_msec`."""

    __slots__ = ("name", "timestamp", "attributes")

    def __init__(
        self, name: EventName, timestamp: TracingTimestamp, attributes: Attributes | None = None
    ) -> None:
        self.name = name
        self.timestamp = moment(timestamp)
        # A copy: the caller may go on using what it passed, while the exporters still read this.
        self.attributes = Attributes.of(attributes).copied()
        self.attributes.add("timestamp_msec", self.timestamp.milliseconds_since_epoch)

    @property
    def name_str(self) -> str:
        """The name's text."""
        return to_name(self.name)

    @classmethod
    def create(
        cls, name: EventName, attributes: Attributes | None = None, timestamp: TracingTimestamp | None = None
    ) -> Event:
        """Make one of now, or of the time that is given."""
        return cls(name, moment(timestamp), attributes)

    def to_json(self) -> dict[str, Any]:
        """Give it as a dictionary that `from_json` reads."""
        return {
            "name": self.name_str,
            "timestamp": self.timestamp.to_json(),
            "attributes": self.attributes.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Event:
        """Read back what `to_json` gave, of an event of any class; `OneLoggerError` where it is none."""
        assert_that(data and data.get("name") and data.get("timestamp"), f"not an event: {data}")
        at = TracingTimestamp.from_json(data["timestamp"])
        attributes = Attributes.from_json(data.get("attributes") or {})
        if data["name"] == ERROR and "error_message" in data:
            kind, text, trace = (data.get(f"exception_{each}") for each in ("type", "message", "traceback"))
            return ErrorEvent(at, data["error_message"], kind, text, trace, attributes)
        if data["name"] == TELEMETRY_DATA_ERROR and "error_type" in data:
            what = TelemetryDataError.ErrorType(data["error_type"])
            return TelemetryDataError(at, what, data["error_message"], attributes)
        return Event(data["name"], at, attributes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Event) and (
            (self.name, self.timestamp, self.attributes) == (other.name, other.timestamp, other.attributes)
        )

    def __hash__(self) -> int:
        return hash((self.name_str, self.timestamp))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name_str!r}, {self.attributes.to_json()!r})"


class ErrorEvent(Event):
    """An error of the application, in words; of an exception, with its class, its text and the end of its traceback."""

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
        told = {name: getattr(self, name) for name in ErrorEvent.__slots__}
        said = Attributes({name: text for name, text in told.items() if text is not None})
        super().__init__(ERROR, timestamp, Attributes.merge(said, Attributes.of(attributes)))

    @classmethod
    def create(  # type: ignore[override]  # as in one-logger
        cls,
        error_message: str,
        exception: BaseException | None = None,
        exception_traceback: str | None = None,
        timestamp: TracingTimestamp | None = None,
    ) -> ErrorEvent:
        """Make one of now; of an exception, with its traceback."""
        kind = text = None
        if isinstance(exception, BaseException):
            kind = type(exception).__name__
            try:
                text = str(exception) or repr(exception)
            except Exception:  # noqa: BLE001  # the user's own `__str__`
                text = kind
            if exception.__traceback__ is not None and not exception_traceback:
                exception_traceback = "".join(traceback.format_exception(exception))[-LONGEST_TRACEBACK:]
        return cls(moment(timestamp), error_message, kind, text, exception_traceback)

    def to_json(self) -> dict[str, Any]:
        """Give it as a dictionary that `from_json` reads."""
        told = super().to_json() | {"error_message": self.error_message}
        if self.exception_type is not None:
            told["exception_type"] = self.exception_type
            told["exception_message"] = self.exception_message
            told["exception_traceback"] = self.exception_traceback or ""
        return told


class TelemetryDataError(Event):
    """Telemetry that is known to be incomplete: a defect of it, not of the application."""

    __slots__ = ("error_message", "error_type")

    class ErrorType(Name):
        """Whether anything arrived at all."""

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
        told = {"error_message": self.error_message, "telemetry_data_error_type": error_type.value}
        merged = Attributes.merge(Attributes(told), Attributes.of(attributes))
        super().__init__(TELEMETRY_DATA_ERROR, timestamp, merged)

    @classmethod
    def create(  # type: ignore[override]  # as in one-logger
        cls,
        error_type: TelemetryDataError.ErrorType,
        error_message: str,
        attributes: Attributes | None = None,
    ) -> TelemetryDataError:
        """Make one of now."""
        return cls(TracingTimestamp.now(), error_type, error_message, attributes)

    def to_json(self) -> dict[str, Any]:
        """Give it as a dictionary that `from_json` reads."""
        return super().to_json() | {"error_type": self.error_type.value, "error_message": self.error_message}


def _message(given: object) -> str:
    return given if isinstance(given, str) else safe_repr(given)


class Span:
    """A stretch of work: from its start event to its stop event, inside a parent."""

    __slots__ = (
        *("__weakref__", "_events", "id", "name", "parent_span", "exported_parent", "start_event"),
        *("stop_event", "initial_attributes", "updated_attributes", "on_event"),
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
        self.exported_parent = self.parent_span  # the nearest that is exported too: backends know no other
        self.start_event = start_event
        self.stop_event: Event | None = None  # None while it is active
        self._events: deque[Event] | None = None
        self.initial_attributes = Attributes.of(span_attributes)  # those of its start
        self.updated_attributes = type(self.initial_attributes)()  # those that were set since
        self.on_event: Callable[[Span, Event], object] | None = None  # called when the job adds an event

    @classmethod
    def create(
        cls,
        name: SpanName,
        parent_span: Span | None = None,
        span_attributes: Attributes | None = None,
        start_event_attributes: Attributes | None = None,
        start_time: TracingTimestamp | None = None,
    ) -> Span:
        """Begin one now, or at the time that is given; nothing is exported by this alone."""
        start = Event(SPAN_START, moment(start_time), start_event_attributes)
        return cls(uuid4(), name, start, parent_span, span_attributes)

    @property
    def name_str(self) -> str:
        """The name's text."""
        return to_name(self.name)

    def set_initial_attributes(self, attributes: Attributes) -> None:
        """Say what it is by what only its recording knows; what the job has given it stays."""
        attributes.update(self.initial_attributes)
        self.initial_attributes = attributes

    @property
    def events(self) -> list[Event]:
        """The start, the latest events of its own, oldest first, and the stop if it has stopped."""
        stop = [] if self.stop_event is None else [self.stop_event]
        return [self.start_event, *(self._events or ()), *stop]

    @property
    def active(self) -> bool:
        """Whether it has not stopped."""
        return self.stop_event is None

    @property
    def attributes(self) -> Attributes:
        """All of them, a new collection of the class that the span was given."""
        return type(self.initial_attributes).merge(self.initial_attributes, self.updated_attributes)

    def stop(
        self,
        stop_event_attributes: Attributes | None = None,
        stop_time: TracingTimestamp | None = None,
    ) -> None:
        """End it now, or at the time that is given; of one that has ended, nothing changes."""
        if self.stop_event is not None:
            return
        stop = Event(SPAN_STOP, moment(stop_time), stop_event_attributes)
        self.stop_event = stop
        seconds = stop.timestamp.perf_counter_seconds - self.start_event.timestamp.perf_counter_seconds
        self.add_attribute(DURATION, max(round(seconds * 1000), 0))

    def add_event(self, event: Event) -> Event:
        """Add an event; one to a span that has ended is a misuse, and not kept."""
        given: object = event
        if not isinstance(given, Event) or self.stop_event is not None:
            expected = f"an Event, of a span that has not ended yet: {self.name_str}"
            report("Span.add_event", "stopped_span", expected)
        else:
            self.keep(event)
            if self.on_event is not None:
                self.on_event(self, event)
        return event

    def keep(self, event: Event) -> None:
        """Add an event that has been told elsewhere."""
        if self._events is None:
            self._events = deque(maxlen=MOST_EVENTS)
        self._events.append(event)

    def add_attribute(self, name: str, value: AttributeValue) -> Attribute:
        """Set an attribute."""
        return self.updated_attributes.add_attribute(Attribute(name, value))

    def add_attributes(self, attributes: Attributes) -> None:
        """Set all of a collection."""
        self.updated_attributes.update(Attributes.of(attributes))

    def duration_msec(self) -> int:
        """Give how long it took, in whole milliseconds, rounded; `OneLoggerError` while it has not ended."""
        found: int | None = self.updated_attributes.get_int_value(DURATION)
        if found is None:
            raise OneLoggerError(f"{self} has not ended")
        return found

    def as_started(self, exported_parent: Span | None) -> Span:
        """Copy it as it was at its start, for another thread, with the parent that exporters know."""
        attributes = self.initial_attributes.copied()
        copy = Span(self.id, self.name, self.start_event, self.parent_span, attributes)
        copy.exported_parent = exported_parent
        return copy

    def as_it_is(self, exported_parent: Span | None) -> Span:
        """Copy it as it is now, for another thread, with the parent that exporters know."""
        copy = self.as_started(exported_parent)
        copy.updated_attributes.update(self.updated_attributes)
        copy._events = None if self._events is None else self._events.copy()  # noqa: SLF001  # of the same class
        copy.stop_event = self.stop_event
        return copy

    def to_json(self) -> dict[str, Any]:
        """Give it as a dictionary that `from_json` reads."""
        return {
            "name": self.name_str,
            "id": str(self.id),
            "events": [event.to_json() for event in self.events],
            "attributes": self.attributes.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Span:
        """Read back what `to_json` gave, one-logger's too; `OneLoggerError` where it is not a span."""
        complete = data and data.get("name") and data.get("id") and data.get("events")
        assert_that(complete, f"not a span: {data}")
        start, *others = [Event.from_json(event) for event in data["events"]]
        attributes = Attributes.from_json(data.get("attributes") or {})
        span = cls(UUID(str(data["id"])), data["name"], start, None, attributes)
        for event in others:
            if event.name == SPAN_STOP:
                span.stop(event.attributes, event.timestamp)
            else:
                span.keep(event)
        return span

    def __repr__(self) -> str:
        return f"Span({self.name_str!r}, id={self.id}, {'active' if self.active else 'stopped'})"


class InertSpan:
    """Span of a block that no observer asks for: what the job adds has no effect."""

    __slots__ = ()

    @property
    def name(self) -> SpanName:
        """The name of the span that would exist."""
        return ""

    @property
    def id(self) -> UUID:
        """An id that no record has."""
        return NO_ID

    @property
    def active(self) -> bool:
        """Whether the block is open."""
        return False

    def add_event(self, event: Event) -> Event:
        """Return the event."""
        return event

    def add_attribute(self, name: str, value: AttributeValue) -> Attribute:
        """Return the attribute."""
        return Attribute(name, value)

    def add_attributes(self, attributes: Attributes) -> None:
        """Ignore the attributes."""
