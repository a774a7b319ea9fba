"""Handle: the way from the event log to one handler, and back.

Used in the training process. A container's own method (`list.append`, `deque.append`, `SimpleQueue.put`) can neither hang
nor run anybody's code, so it is called at once, on the thread that logs; every other handler has a thread and a queue.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from queue import SimpleQueue
from typing import Any, Protocol

from exporter.recording.event_values import LEVELS, Datum, Event
from exporter.recording.identity import clean_text
from exporter.recording.notices import tell_once
from exporter.recording.worker import Counter, Marker, Worker

Adapt = Callable[[Event, object], object]
RawEvent = tuple[
    str, "str | None", str, Mapping[str, Datum], float, float, int, "str | None", tuple[str, ...]
]
"""Type, message, severity, data, timestamp, logged_at, monotonic_ns, span_id, parent_ids: an Event is made of them
when somebody looks, and is given its id then."""

ANSWER_SECONDS = 5.0
"""The longest that whoever logs waits for a handler that answers."""
_here = threading.local()
_CONTAINERS = (list, deque, SimpleQueue)
_CONTAINER_METHODS = frozenset({"append", "appendleft", "put", "put_nowait"})


class EventHandler(Protocol):
    """An object that is given events."""

    def handle(self, event: Any) -> object:
        """Take one `Event`, or what `adapt` has made of it."""
        ...


class Handle(Worker):
    """A registered handler: the way to unregister it, and what has become of its events.

    Attributes:
        name: Under which it is counted.
        own: The class of the objects that it takes as they were logged.
        registered: Whether it is still told.
        direct: Whether it is called at once, on the thread that logs.
        answers: Whether a face waits for it; see `answer`.
    """

    _late: Marker | None  # set once it has taken what it was late with

    def __init__(
        self,
        handler: Any,
        *,
        end: Callable[[Handle], None],
        name: str,
        types: tuple[str, ...] | None,
        severity: str,
        queue: int,
        adapt: Adapt | None,
        own: type | None,
        answers: bool,
    ) -> None:
        self.name, self.own, self.answers = name, own, answers
        self.registered = False
        self.direct = is_container_method(handler)
        self._end = end
        self._call: Callable[[Any], object] = getattr(handler, "handle", None) or handler
        self._types, self._level, self._adapt = types, LEVELS[severity], adapt
        super().__init__(self._give, name=f"events-{name}", bound=queue)

    def unregister(self) -> None:
        """Tell it no more; see `EventLog.unregister`."""
        self._end(self)

    def answer(self) -> None:
        """Wait until it has taken what was logged so far: what a face does whose original calls handlers at once.

        After `ANSWER_SECONDS` without an answer nobody waits any more until it has caught up. Nor does a handler wait on
        its own thread, since two could wait for each other: what it logs is told after it.
        """
        if getattr(_here, "is_handler", False) or not (self._late is None or self._late.is_set()):
            return
        marker = self.mark()
        self._late = None if marker is None or marker.wait(ANSWER_SECONDS) else marker
        if self._late is not None:
            told = f"has not answered within {ANSWER_SECONDS:g} s: it is told without waiting for it"
            tell_once(f"late {self.name}", f"the handler {self.name} {told}")

    def after_fork(self) -> None:
        """Begin anew."""
        self._late = None
        self._taken = Counter()
        super().after_fork()

    @property
    def delivered(self) -> int:
        """Events that the handler took."""
        return self.done + self._taken.read()

    def wants(self, type: str, severity: str) -> bool:
        """Whether it is to be given events of this type and severity."""
        wanted = self._types is None or any(fnmatchcase(type, pattern) for pattern in self._types)
        return wanted and LEVELS[severity] >= self._level

    def names(self, prefix: str) -> bool:
        """Whether it asks by name for events whose types begin so, not for all."""
        return any(pattern.startswith(prefix) for pattern in self._types or ())

    def take_at_once(self, item: object) -> None:
        """Call the handler here and now; only for those that are `direct`."""
        self._call(item)
        self._taken.bump()

    def put(self, item: Any, origin: object = None, *, bounded: bool = True) -> bool:
        """Hand over one event, or what else its registrar puts in the place of one; never raises, never waits."""
        if self.direct:
            self.take_at_once(item if self._adapt is None else self._adapt(item, origin))
            return True
        return self.registered and super().put((item, origin), bounded=bounded)

    def _give(self, item: tuple[Any, object]) -> None:
        _here.is_handler = self.answers
        self._call(item[0] if self._adapt is None else self._adapt(*item))

    def __repr__(self) -> str:
        return f"<Handle {self.name!r}: {'registered' if self.registered else 'unregistered'}>"


def is_container_method(handler: object) -> bool:
    """Whether calling it can only put something into a list, a deque or a SimpleQueue."""
    return (
        type(getattr(handler, "__self__", None)) in _CONTAINERS
        and type(handler) is type([].append)
        and getattr(handler, "__name__", "") in _CONTAINER_METHODS
    )


def name_of(handler: object) -> str:
    """Name a handler that was given no name: a function by its own, an object by its class."""
    if is_container_method(handler):
        return f"{type(handler.__self__).__name__}.{handler.__name__}"  # type: ignore[attr-defined]  # a bound method
    name = getattr(handler, "__qualname__", None) or type(handler).__qualname__
    return clean_text(str(name).replace("<locals>.", ""))[:100] or "handler"
