"""Spans: stretches of a job's work, in a tree.

Used in the training process. A span is changed by the job's threads and read by the recording thread and those of the
exporters; every change is one operation on a dictionary or a deque, so no lock is needed. The class is one-logger's,
name for name, except that it keeps its latest events only: a training loop of a million updates takes no more memory
than one of ten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID, uuid4

from exporter.errors import OneLoggerError
from exporter.training.attributes import (
    Attribute,
    Attributes,
    AttributeValue,
    SpanName,
    TracingTimestamp,
    assert_that,
    moment,
    name_of,
    shown,
)
from exporter.training.events import Event
from exporter.training.metrics import report

DURATION = "duration_msec"
SPAN_START, SPAN_STOP = "span_start", "span_stop"
MOST_EVENTS = 64
"""Events that a span keeps beside its start and its stop: the latest."""


class Span:
    """A stretch of work: from its start event to its stop event, inside a parent.

    Attributes:
        id: Random, from the operating system.
        parent_span: What it is part of; None of a root.
        exported_parent: The nearest span around it that is exported too; for exporters, whose backends know no other.
        stop_event: None while it is active.
        initial_attributes: Those of its start.
        updated_attributes: Those that were set since, with `duration_msec` at the end.
        listener: Called with the span and the event when the job adds one to a running span; None where nobody asks.
    """

    __slots__ = (
        *("__weakref__", "_events", "id", "name", "parent_span", "exported_parent", "start_event"),
        *("stop_event", "initial_attributes", "updated_attributes", "listener"),
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
        self.set_parent(parent_span if isinstance(parent_span, Span) else None)
        self.start_event = start_event
        self.stop_event: Event | None = None
        self._events: deque[Event] | None = None
        self.initial_attributes = Attributes.of(span_attributes)
        self.updated_attributes = type(self.initial_attributes)()
        self.listener: Callable[[Span, Event], None] | None = None

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
        return name_of(self.name)

    def set_parent(self, parent_span: Span | None) -> None:
        """Put it into the tree; only its recording does, before anybody else has it."""
        self.parent_span = self.exported_parent = parent_span

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
        if not isinstance(given, Event):
            report("Span.add_event", "no_event", f"an Event, not {shown(event)}")
        elif self.stop_event is not None:
            report("Span.add_event", "stopped_span", f"a span that has not ended yet: {self.name_str}")
        else:
            self.keep(event)
            if self.listener is not None:
                self.listener(self, event)
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
        found = self.updated_attributes.get_int_value(DURATION)
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
