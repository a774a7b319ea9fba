"""Handlers of events: torch.monitor's functions, on the deliveries of the rest of the package.

Used in the training process.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable

from exporter.monitor.event import Event, Logged
from exporter.recording.delivery import is_container_method
from exporter.recording.event_values import Event as RecordedEvent
from exporter.recording.events import Handle, register, unregister

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    class SummaryWriter(Protocol):
        """What is needed of `torch.utils.tensorboard.SummaryWriter`."""

        def add_scalar(self, tag: str, scalar_value: float, *, walltime: float) -> Any:
            """Add one point."""
            ...


QUEUED_EVENTS = 10_000
_STAT_EVENT = "torch.monitor.Stat"


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

    Events that are logged elsewhere in the package come as events of this face. An object with `handle(event)`
    will do as well.

    Differs from torch 2.13: the callback runs on a thread of its own, behind a queue of 10,000 events, so that it
    may log, register and use Stats, and what it raises is counted instead of leaving `log_event` or `Stat.add`;
    the bound `append` or `put` of a list, deque or SimpleQueue is called at once, as in torch. None, which torch
    accepts and then fails at every event, is refused, and so is a callback that is registered already. At the
    end of the process nothing crashes, and what waits is delivered for up to two seconds.

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
        ValueError: It was unregistered before. (torch 2.13 crashes the process.)
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

    def __init__(self, writer: SummaryWriter) -> None:
        self._writer = writer

    def __call__(self, event: Event) -> None:
        """Write one event."""
        if event.name == _STAT_EVENT:
            for key, value in event.data.items():
                self._writer.add_scalar(key, value, walltime=event.timestamp.timestamp())  # type: ignore[arg-type]  # numbers


def _adapted(event: RecordedEvent, origin: object) -> Event:
    if isinstance(origin, Logged):
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
    if is_container_method(first):
        return getattr(first, "__name__", "") == getattr(second, "__name__", None)
    return getattr(first, "__func__", first) is getattr(second, "__func__", None)
