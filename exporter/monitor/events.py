"""torch.monitor's events and handlers, without torch's lock.

Each handler has a thread. `log_event` waits for each handler, at most five seconds, so that a handler has usually returned
when the call returns, as in torch.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic_ns, time
from typing import Any

from exporter.recording.conversion import Datum, to_scalar
from exporter.recording.event_values import (
    MAX_EVENT_NAME_CHARACTERS,
    UNNAMED_TYPE,
    RawEvent,
    check_data,
)
from exporter.recording.event_values import Event as RecordedEvent
from exporter.recording.events import EVENTS, unregister
from exporter.recording.handle import Adapter, Handle

data_value_t = str | float | int | bool
"""Type of an event's values, under torch's name."""
EventHandlerHandle = Handle
"""Return type of `register_event_handler`. The handler stays registered if the handle is not kept."""

STAT_EVENT = "torch.monitor.Stat"
"""Name of the event of a closed window."""
MAX_QUEUED_EVENTS = 10_000
"""Maximum number of events that wait for a handler."""


def check_name(name: object, owner: str) -> str:
    """Return a name from str or bytes, as torch does. Raises TypeError for other types."""
    if isinstance(name, bytes):
        return name.decode()
    if not isinstance(name, str):
        raise TypeError(f"the name of {owner} must be str, not {type(name).__name__}")
    return name


def _check_timestamp(timestamp: object) -> dt.datetime:
    """Return a datetime, or the start of a date, as torch does. Raises TypeError for other types."""
    if isinstance(timestamp, dt.datetime):
        return timestamp
    if isinstance(timestamp, dt.date):
        return dt.datetime(timestamp.year, timestamp.month, timestamp.day)  # noqa: DTZ001  # local and naive, as in torch
    raise TypeError(f"the timestamp of an event must be a datetime, not {type(timestamp).__name__}")


def _check_data(data: object) -> Mapping[str, Datum]:
    """Return a copy of the data with checked names and values; bytes and scalars of numpy are converted.

    Raises TypeError for other types, and ValueError for an int of more than 64 bits.
    """
    if not isinstance(data, Mapping):
        raise TypeError(f"the data of an event must be a mapping, not {type(data).__name__}")
    values: dict[Any, Any] = dict(data)
    try:
        return check_data(values, keep_full_texts=True)
    except TypeError:
        return check_data(
            {_to_plain(name): _to_plain(value) for name, value in values.items()}, keep_full_texts=True
        )


def _to_plain(value: Any) -> Any:
    """Return bytes as str, and scalars of numpy as Python values. torch accepts both."""
    if isinstance(value, bytes):
        return value.decode()
    is_numpy_scalar = type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
    return to_scalar(value) if is_numpy_scalar else value


def _field(
    slot: str, check: Callable[[Any], Any], convert: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Return a property for a slot that checks assigned values and converts the value that is read."""
    return property(
        lambda self: convert(getattr(self, slot)), lambda self, value: setattr(self, slot, check(value))
    )


class Event:
    """Event to be logged, as in torch.

    The name is the label `type` of `training_events_total`: use few names. A naive datetime is local time. Values are str, float,
    bool, or int of at most 64 bits; bytes become str, in values and names. `data` returns a copy: assign another dict to change
    the data. Raises TypeError for other types, and ValueError for an int of more than 64 bits.
    """

    __slots__ = ("__weakref__", "_data", "_name", "_timestamp")
    name: str = _field("_name", partial(check_name, owner="an event"))
    timestamp: dt.datetime = _field("_timestamp", _check_timestamp)
    data: dict[str, Datum] = _field("_data", _check_data, dict)

    def __init__(self, name: str, timestamp: dt.datetime, data: Mapping[str, Datum]) -> None:
        self._name = check_name(name, "an event")
        self._timestamp = _check_timestamp(timestamp)
        self._data = _check_data(data)

    def asdict(self) -> dict[str, object]:
        """Return the fields as a new dict."""
        return {"name": self.name, "timestamp": self.timestamp, "data": self.data}

    def raw(self) -> RawEvent:
        """Return the event as the recording stores it."""
        now = time()
        try:
            event_time = self._timestamp.timestamp()
        except (OverflowError, ValueError, OSError):
            event_time = now  # the timestamp is outside the range of Unix time
        name = self._name[:MAX_EVENT_NAME_CHARACTERS] or UNNAMED_TYPE
        return RawEvent(
            type=name,
            message=None,
            severity="info",
            data=check_data(self._data),
            timestamp=event_time,
            logged_at=now,
            monotonic_ns=monotonic_ns(),
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r}, timestamp={self.timestamp!r}, data={self.data!r})"


def log_event(event: Event) -> None:
    """Count an event and deliver the event to all registered handlers. Raises TypeError for other objects than an Event."""
    if not isinstance(event, Event):
        raise TypeError(f"log_event takes an exporter.monitor.Event, not {event!r}")
    kind = EVENTS.kind(event._name or UNNAMED_TYPE, "info")  # noqa: SLF001  # a subclass may override the property
    if kind.enabled:
        EVENTS.record(kind, event, event._timestamp, event)  # noqa: SLF001  # a subclass may override the property
        EVENTS.await_handlers(kind)


# Handlers ------------------------------------------------------------------------------------------------------


def register_event_handler(callback: Callable[[Event], None]) -> EventHandlerHandle:
    """Register a callback for all later events, in order. A callback that is registered twice is called twice.

    Events that the callback logs are delivered after the callback has returned. Raises TypeError for an object that is not callable.
    """
    adapter = Adapter(_monitor_event, native_class=Event, is_awaited=True)
    return EVENTS.register_adapted(callback, adapter, queue=MAX_QUEUED_EVENTS)


def unregister_event_handler(handler: EventHandlerHandle) -> None:
    """Unregister a handler, and wait a bounded time for the delivery of earlier events. A second call has no effect."""
    unregister(handler)


class TensorboardEventHandler:
    """Handler that writes the events of Stats to a SummaryWriter as scalars and ignores other events."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def __call__(self, event: Event) -> None:
        """Write an event."""
        if event.name == STAT_EVENT:
            for key, value in event.data.items():
                self._writer.add_scalar(key, value, walltime=event.timestamp.timestamp())


def _monitor_event(event: RecordedEvent, origin: object) -> Event:
    """Return the logged event itself, or the event of another module with the message as part of its data."""
    if isinstance(origin, Event):
        return origin
    message = {} if event.message is None else {"message": event.message}
    try:
        timestamp = dt.datetime.fromtimestamp(event.timestamp)  # noqa: DTZ006  # local and naive, as in torch
    except (OverflowError, ValueError, OSError):
        timestamp = dt.datetime.now()  # noqa: DTZ005  # the time of the event is outside the range of datetime
    return Event(event.type, timestamp, {**message, **event.data})
