"""Registered event handlers: delivery on a thread per handler, counts, and adapters of compatibility modules.

Runs on the logging threads and on the threads of the handlers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from fnmatch import fnmatchcase
from queue import SimpleQueue
from typing import Any

from exporter.recording.event_values import LEVELS, Event
from exporter.recording.identity import clean_text
from exporter.recording.notices import log_once
from exporter.recording.value_class import Value, value_class
from exporter.recording.worker import Counter, Marker, Worker

ANSWER_SECONDS = 5.0
"""Longest wait of a logging call for a handler of a compatibility module."""
_CONTAINERS = (list, deque, SimpleQueue)
_CONTAINER_METHODS = frozenset({"append", "appendleft", "put", "put_nowait"})


@value_class
class Adapter(Value):
    """Delivery of events to a handler of a compatibility module.

    Attributes:
        convert: Returns the object that the handler receives, from an event and the logged object.
        native_class: The class of logged objects that the handler receives unchanged.
        is_awaited: True if the logging call waits for the handler, as in the original module.
    """

    convert: Callable[[Event, object], object]
    native_class: type | None = None
    is_awaited: bool = False


class Handle(Worker):
    """Registered handler, with `unregister` and the counts of delivered and lost events.

    Attributes:
        native_class: The class of logged objects that the handler receives unchanged.
        is_direct: True if the handler is called on the logging thread.
        is_awaited: True if the logging call waits for the handler; see `await_handling`.
    """

    _overdue_marker: Marker | None  # set after the handler has processed its backlog

    def __init__(
        self,
        handler: Any,
        *,
        end: Callable[[Handle], None],
        name: str,
        types: tuple[str, ...] | None,
        severity: str,
        queue: int,
        adapter: Adapter | None = None,
    ) -> None:
        self.name = name
        self.native_class = None if adapter is None else adapter.native_class
        self.is_awaited = adapter is not None and adapter.is_awaited
        self.is_registered = False
        self.is_direct = is_container_method(handler)
        self._end = end
        self._call: Callable[[Any], object] = getattr(handler, "handle", None) or handler
        self._types, self._level = types, LEVELS[severity]
        self._convert = None if adapter is None else adapter.convert
        super().__init__(self._deliver, name=f"events-{name}", bound=queue)

    def unregister(self) -> None:
        """Stop delivering to this handler; see `EventLog.unregister`."""
        self._end(self)

    def await_handling(self, timeout_seconds: float = ANSWER_SECONDS) -> None:
        """Wait until the handler has handled all events so far. After a timeout, calls do not wait while the handler is behind."""
        # The exporter's threads never wait, because two handlers that log could wait for each other.
        is_ours = threading.current_thread().name.startswith("exporter-")
        if is_ours or not (self._overdue_marker is None or self._overdue_marker.wait(0)):
            return
        marker = self.mark()
        self._overdue_marker = None if marker is None or marker.wait(timeout_seconds) else marker
        if self._overdue_marker is not None:
            text = f"has not returned within {timeout_seconds:g} s: logging calls no longer wait for this handler"
            log_once(f"late {self.name}", f"the handler {self.name} {text}")

    def after_fork(self) -> None:
        """Start with an empty queue and zero counts in a forked child."""
        self._overdue_marker = None
        self._direct_deliveries = Counter()
        super().after_fork()

    @property
    def delivered(self) -> int:
        """Number of delivered events."""
        return self.processed_items + self._direct_deliveries.read()

    def accepts(self, type: str, severity: str) -> bool:
        """Return True if the handler receives events of this type and severity."""
        is_matching = self._types is None or any(fnmatchcase(type, pattern) for pattern in self._types)
        return is_matching and LEVELS[severity] >= self._level

    def names(self, prefix: str) -> bool:
        """Return True if a pattern of the handler starts with the prefix."""
        return any(pattern.startswith(prefix) for pattern in self._types or ())

    def take_at_once(self, item: object) -> None:
        """Call a direct handler on this thread."""
        self._call(item)
        self._direct_deliveries.bump()

    def put(self, item: Any, origin: object = None, *, bounded: bool = True) -> bool:
        """Queue an event or a closed window. Never raises and never waits."""
        if self.is_direct:
            self.take_at_once(item if self._convert is None else self._convert(item, origin))
            return True
        return self.is_registered and super().put((item, origin), bounded=bounded)

    def _deliver(self, item: tuple[Any, object]) -> None:
        self._call(item[0] if self._convert is None else self._convert(*item))

    def __repr__(self) -> str:
        return f"<Handle {self.name!r}: {'registered' if self.is_registered else 'unregistered'}>"


def is_container_method(handler: object) -> bool:
    """Return True for a method that appends to a list, a deque or a SimpleQueue."""
    return (
        type(getattr(handler, "__self__", None)) in _CONTAINERS
        and type(handler) is type([].append)
        and getattr(handler, "__name__", "") in _CONTAINER_METHODS
    )


def name_of(handler: object) -> str:
    """Return the default name of a handler: a function's own name, an object's class name."""
    if is_container_method(handler):
        return f"{type(handler.__self__).__name__}.{handler.__name__}"  # type: ignore[attr-defined]  # a bound method
    name = getattr(handler, "__qualname__", None) or type(handler).__qualname__
    return clean_text(str(name).replace("<locals>.", ""))[:100] or "handler"
