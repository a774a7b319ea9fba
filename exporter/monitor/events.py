"""Events and their handlers: torch.monitor's, without its lock.

Used in the training process, on the threads that log. An event is counted at once; handlers are called by their own
threads, with the object that was logged.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from time import monotonic_ns, time
from typing import Any

from exporter.recording.event_values import Datum, check_data
from exporter.recording.event_values import Event as RecordedEvent
from exporter.recording.events import EVENTS, register, unregister
from exporter.recording.handle import Handle, RawEvent, is_container_method

data_value_t = str | float | int | bool
"""What the data of an event may be."""

STAT_EVENT = "torch.monitor.Stat"
"""The name of the event that a closed window is logged as."""
UNNAMED = "unnamed"
"""The type under which an event of no name is counted."""
QUEUED_EVENTS = 10_000
"""Events that may wait for one handler."""


def check_name(name: object, of: str) -> str:
    """Take text, or bytes, as torch does. Raises TypeError: It is neither."""
    if isinstance(name, bytes):
        return name.decode()
    if not isinstance(name, str):
        raise TypeError(f"the name of {of} must be str, not {type(name).__name__}")
    return name


class _State:
    """What an Event is at one moment; a change of the Event makes another, so what was logged stays as it was."""

    __slots__ = ("data", "kind", "name", "timestamp")

    def __init__(self, name: object, timestamp: object, data: object) -> None:
        self.name = check_name(name, "an event")
        self.timestamp = _check_timestamp(timestamp)
        self.data = _check_data(data)
        self.kind = EVENTS.kind(self.name or UNNAMED, "info")

    def raw(self) -> RawEvent:
        """Give what the rest of the package makes an event of."""
        now = time()
        try:
            happened = self.timestamp.timestamp()
        except (OverflowError, ValueError, OSError):
            happened = now  # a year that Unix time does not reach here
        type_ = self.kind.type or self.name or UNNAMED
        return type_, None, "info", check_data(self.data), happened, now, monotonic_ns(), None, ()

    def logged(self, origin: object) -> _Logged:
        """Keep it together with the object that was logged."""
        return _Logged(origin, self)


class Event:
    """Event represents a specific typed event to be logged.

    A change of it after it was logged is not seen by a handler that is told later. Handlers of `exporter.events` get
    texts cut to 32,768 characters; those of this face get the event itself.

    Args:
        name: What happened; the label `type` of `training_events_total`, so there should be few of them.
        timestamp: When it happened; a naive datetime is local time.
        data: str, float, int of at most 64 bits, or bool; bytes become str, here and in names.

    Raises:
        TypeError: An argument or a datum is of the wrong type.
        ValueError: An int needs more than 64 bits.
    """

    __slots__ = ("__weakref__", "_state")

    def __init__(self, name: str, timestamp: dt.datetime, data: Mapping[str, Datum]) -> None:
        self._state = _State(name, timestamp, data)

    @property
    def name(self) -> str:
        """The name of the event."""
        return self._state.name

    @name.setter
    def name(self, name: str) -> None:
        self._state = _State(name, self._state.timestamp, self._state.data)

    @property
    def timestamp(self) -> dt.datetime:
        """When it happened."""
        return self._state.timestamp

    @timestamp.setter
    def timestamp(self, timestamp: dt.datetime) -> None:
        self._state = _State(self._state.name, timestamp, self._state.data)

    @property
    def data(self) -> dict[str, Datum]:
        """A copy of the data; assign another dict to change them."""
        return dict(self._state.data)

    @data.setter
    def data(self, data: Mapping[str, Datum]) -> None:
        self._state = _State(self._state.name, self._state.timestamp, data)

    def asdict(self) -> dict[str, object]:
        """Give the fields in a dict of their own."""
        return {"name": self.name, "timestamp": self.timestamp, "data": self.data}

    def __getstate__(self) -> tuple[dict[str, object], dict[str, object]]:
        return self.asdict(), getattr(self, "__dict__", {})

    def __setstate__(self, state: tuple[dict[str, Any], dict[str, object]]) -> None:
        fields, own = state
        Event.__init__(self, **fields)
        if own:  # a subclass has such, whatever its own constructor takes
            self.__dict__.update(own)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r}, timestamp={self.timestamp!r}, data={self.data!r})"


def log_event(event: Event) -> None:
    """Log an event to all registered handlers, and count it. Raises TypeError: That is no event."""
    try:
        state = event._state  # noqa: SLF001  # of the class above
        kind = state.kind
    except AttributeError:
        raise TypeError(f"log_event takes an exporter.monitor.Event, not {event!r}") from None
    if kind.enabled:
        EVENTS.record(kind, state, state.timestamp, event)


class _Logged:
    """An event that waits for its handlers, and what it was when it was logged."""

    __slots__ = ("_event", "_state")

    def __init__(self, event: object, state: _State) -> None:
        self._event = event
        self._state = state

    def as_logged(self) -> Event:
        """Give the object itself, or, where it has been changed since, one that is as it was."""
        event, state = self._event, self._state
        if isinstance(event, Event) and event._state is state:  # noqa: SLF001  # of this file
            return event
        return Event(state.name, state.timestamp, state.data)


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
    return value.item() if is_scalar else value


# Handlers ------------------------------------------------------------------------------------------------------


class EventHandlerHandle:
    """What `register_event_handler` returns, for `unregister_event_handler`; dropping it changes nothing."""

    __slots__ = ("_callback", "_handle")

    def __init__(self, callback: object, handle: Handle) -> None:
        self._callback = callback
        self._handle = handle

    def __repr__(self) -> str:
        state = "registered" if self._handle.registered else "unregistered"
        return f"<EventHandlerHandle {self._handle.name!r}: {state}>"


_registered: list[EventHandlerHandle] = []


def register_event_handler(callback: Callable[[Event], None]) -> EventHandlerHandle:
    """Register a callback to be called with every event that is logged from now on, in order.

    Events that are logged elsewhere in the package come as events of this face. It runs on a thread of its own, behind
    a queue of 10,000 events; the bound `append` or `put` of a list, deque or SimpleQueue is called at once. An object with
    `handle(event)` will do as well.

    Raises:
        TypeError: It cannot be called.
        ValueError: It is registered already.
    """
    # No lock: a signal handler may do this, too, while the thread that it interrupts is here.
    if any(_same(each._callback, callback) for each in list(_registered)):  # noqa: SLF001  # of this file
        raise ValueError(f"{callback!r} is registered already; unregister it first")
    made = EventHandlerHandle(callback, register(callback, queue=QUEUED_EVENTS, adapt=_adapted, own=Event))
    _registered.append(made)
    return made


def unregister_event_handler(handler: EventHandlerHandle) -> None:
    """Unregister what `register_event_handler` returned; after this the callback is called no more.

    It is first given what was logged before, for up to two seconds.

    Raises:
        TypeError: That is no handle.
        ValueError: It was unregistered before.
    """
    if not isinstance(handler, EventHandlerHandle):
        raise TypeError(
            f"unregister_event_handler takes what register_event_handler returned, not {handler!r}"
        )
    try:
        _registered.remove(handler)
    except ValueError:
        raise ValueError(f"{handler!r} was unregistered before") from None
    unregister(handler._handle)  # noqa: SLF001  # of this file


class TensorboardEventHandler:
    """Writes the events of Stats to the given SummaryWriter as scalars; ignores all others.

    Example: `register_event_handler(TensorboardEventHandler(SummaryWriter("log_dir")))`.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def __call__(self, event: Event) -> None:
        """Write one event."""
        if event.name == STAT_EVENT:
            for key, value in event.data.items():
                self._writer.add_scalar(key, value, walltime=event.timestamp.timestamp())


def _adapted(event: RecordedEvent, origin: object) -> Event:
    if isinstance(origin, _Logged):
        return origin.as_logged()
    message = {} if event.message is None else {"message": event.message}
    when = dt.datetime.fromtimestamp(event.timestamp)  # noqa: DTZ006  # local and naive, as torch's own
    return Event(event.type, when, {**message, **event.data})


def _same(first: object, second: object) -> bool:
    """Whether they are the same callback: bound methods are made anew each time that they are looked up."""
    if first is second:
        return True
    own = getattr(first, "__self__", None)
    if own is None or own is not getattr(second, "__self__", None):
        return False
    part = "__name__" if is_container_method(first) else "__func__"
    return bool(getattr(first, part, first) == getattr(second, part, None))
