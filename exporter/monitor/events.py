"""Events and their handlers: torch.monitor's, without its lock.

Used on the threads that log. A handler has a thread of its own, for which `log_event` waits, at most five seconds.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic_ns, time
from typing import Any

from exporter.recording.conversion import Datum, to_scalar
from exporter.recording.event_values import Event as RecordedEvent
from exporter.recording.event_values import RawEvent, check_data
from exporter.recording.events import EVENTS, unregister
from exporter.recording.handle import Adapter, Handle

data_value_t = str | float | int | bool
"""What the data of an event may be."""
EventHandlerHandle = Handle
"""What `register_event_handler` returns, for `unregister_event_handler`; dropping it changes nothing."""

STAT_EVENT = "torch.monitor.Stat"
"""The name of the event that a closed window is logged as."""
UNNAMED = "unnamed"
QUEUED_EVENTS = 10_000
"""Events that may wait for one handler."""


def check_name(name: object, of: str) -> str:
    """Take text, or bytes, as torch does. Raises TypeError: It is neither."""
    if isinstance(name, bytes):
        return name.decode()
    if not isinstance(name, str):
        raise TypeError(f"the name of {of} must be str, not {type(name).__name__}")
    return name


def _check_timestamp(timestamp: object) -> dt.datetime:
    if isinstance(timestamp, dt.datetime):
        return timestamp
    if isinstance(timestamp, dt.date):
        return dt.datetime(timestamp.year, timestamp.month, timestamp.day)  # noqa: DTZ001  # local, as in torch
    raise TypeError(f"the timestamp of an event must be a datetime, not {type(timestamp).__name__}")


def _check_data(data: object) -> Mapping[str, Datum]:
    if not isinstance(data, Mapping):
        raise TypeError(f"the data of an event must be a mapping, not {type(data).__name__}")
    own: dict[Any, Any] = dict(data)
    try:
        return check_data(own, whole=True)
    except TypeError:
        return check_data({_plain(name): _plain(value) for name, value in own.items()}, whole=True)


def _plain(value: Any) -> Any:
    """Take what torch takes besides: bytes, and the scalars of numpy, which know their plain value."""
    if isinstance(value, bytes):
        return value.decode()
    is_scalar = type(value).__module__ == "numpy" and not getattr(value, "shape", (1,))
    return to_scalar(value) if is_scalar else value


def _field(slot: str, check: Callable[[Any], Any], shown: Callable[[Any], Any] = lambda value: value) -> Any:
    """Make a property that is checked when it is assigned, also where a subclass has one of its own."""
    return property(
        lambda self: shown(getattr(self, slot)), lambda self, value: setattr(self, slot, check(value))
    )


class Event:
    """Event represents a specific typed event to be logged.

    Its name is the label `type` of `training_events_total`, so there should be few of them; a naive datetime is local
    time. Data are str, float, int of at most 64 bits or bool; bytes become str, here and in names. They are read as a
    copy: assign another dict to change them. Raises TypeError, or ValueError for an int of more than 64 bits.
    """

    __slots__ = ("__weakref__", "_data", "_name", "_timestamp")
    name: str = _field("_name", partial(check_name, of="an event"))
    timestamp: dt.datetime = _field("_timestamp", _check_timestamp)
    data: dict[str, Datum] = _field("_data", _check_data, dict)

    def __init__(self, name: str, timestamp: dt.datetime, data: Mapping[str, Datum]) -> None:
        self._name = check_name(name, "an event")
        self._timestamp = _check_timestamp(timestamp)
        self._data = _check_data(data)

    def asdict(self) -> dict[str, object]:
        """Give the fields in a dict of their own."""
        return {"name": self.name, "timestamp": self.timestamp, "data": self.data}

    def raw(self) -> RawEvent:
        """Give what the rest of the package makes an event of."""
        now = time()
        try:
            happened = self._timestamp.timestamp()
        except (OverflowError, ValueError, OSError):
            happened = now  # a year that Unix time does not reach here
        name = self._name or UNNAMED
        return RawEvent(name, None, "info", check_data(self._data), happened, now, monotonic_ns())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r}, timestamp={self.timestamp!r}, data={self.data!r})"


def log_event(event: Event) -> None:
    """Log an event to all registered handlers, and count it. Raises TypeError: That is no event."""
    if not isinstance(event, Event):
        raise TypeError(f"log_event takes an exporter.monitor.Event, not {event!r}")
    kind = EVENTS.kind(event._name or UNNAMED, "info")  # noqa: SLF001  # of this file, and not what a subclass makes of it
    if kind.enabled:
        EVENTS.record(kind, event, event._timestamp, event)  # noqa: SLF001  # likewise
        EVENTS.answer(kind)


# Handlers ------------------------------------------------------------------------------------------------------


def register_event_handler(callback: Callable[[Event], None]) -> EventHandlerHandle:
    """Register a callback to be called with every event that is logged from now on, in order; again is twice.

    What it logs itself is told after it has returned. Raises TypeError: It cannot be called.
    """
    adapter = Adapter(_adapted, own=Event, awaited=True)
    return EVENTS.register_adapted(callback, adapter, queue=QUEUED_EVENTS)


def unregister_event_handler(handler: EventHandlerHandle) -> None:
    """Unregister what `register_event_handler` returned, once it has what was logged before; again is harmless."""
    unregister(handler)


class TensorboardEventHandler:
    """Writes the events of Stats to the given SummaryWriter as scalars; ignores all others."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def __call__(self, event: Event) -> None:
        """Write one event."""
        if event.name == STAT_EVENT:
            for key, value in event.data.items():
                self._writer.add_scalar(key, value, walltime=event.timestamp.timestamp())


def _adapted(event: RecordedEvent, origin: object) -> Event:
    if isinstance(origin, Event):
        return origin
    message = {} if event.message is None else {"message": event.message}
    when = dt.datetime.fromtimestamp(event.timestamp)  # noqa: DTZ006  # local and naive, as torch's own
    return Event(event.type, when, {**message, **event.data})
