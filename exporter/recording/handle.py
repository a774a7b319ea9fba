"""Registered event handlers: delivery on a thread per handler, counts, and adapters of compatibility modules.

Runs on the threads that log events, and on the threads of the handlers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from fnmatch import fnmatchcase
from queue import SimpleQueue
from typing import Any

from exporter.recording.event_values import LEVEL_BY_SEVERITY, Event
from exporter.recording.identity import clean_text
from exporter.recording.notices import log_once
from exporter.recording.value_class import Value, value_class
from exporter.recording.worker import Counter, Marker, Worker

ANSWER_SECONDS = 5.0
"""Maximum time for which a logging call waits for a handler of a compatibility module."""
_CONTAINERS = (list, deque, SimpleQueue)
_CONTAINER_METHODS = frozenset({"append", "appendleft", "put", "put_nowait"})


@value_class
class Adapter(Value):
    """Delivery of events to a handler of a compatibility module.

    Attributes:
        convert: Returns the object for the handler from an event and the logged object.
        native_class: Class of logged objects that the handler receives unchanged; None without such a class.
        is_awaited: True if the logging call waits for the handler, as in the original module.
    """

    convert: Callable[[Event, object], object]
    native_class: type | None = None
    is_awaited: bool = False


class Handle(Worker):
    """Registered handler, with `unregister` and the counts of delivered and lost events.

    Attributes:
        native_class: Class of logged objects that the handler receives unchanged; None without such a class.
        is_direct: True if the handler is called on the logging thread.
        is_awaited: True if the logging call waits for the handler; see `await_handling`.
    """

    _overdue_marker: Marker | None  # marker of a wait that timed out; None if the handler is not behind

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
        self._types, self._level = types, LEVEL_BY_SEVERITY[severity]
        self._convert = None if adapter is None else adapter.convert
        super().__init__(self._deliver, name=f"events-{name}", bound=queue)

    def unregister(self) -> None:
        """Stop delivering to this handler; see `EventLog.unregister`."""
        self._end(self)

    def await_handling(self, timeout_seconds: float = ANSWER_SECONDS) -> None:
        """Wait until the handler has handled all events so far.

        After a timeout, calls return at once until the handler has handled the events of the call that timed out.
        """
        # Threads of the exporter do not wait, because two handlers that log could wait for each other.
        is_exporter_thread = threading.current_thread().name.startswith("exporter-")
        is_behind = self._overdue_marker is not None and not self._overdue_marker.wait(0)
        if is_exporter_thread or is_behind:
            return
        marker = self.mark()
        self._overdue_marker = None if marker is None or marker.wait(timeout_seconds) else marker
        if self._overdue_marker is not None:
            log_once(
                f"late {self.name}",
                f"the handler {self.name} has not returned within {timeout_seconds:g} s: logging calls no longer wait for"
                " this handler while it is behind",
            )

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
        return is_matching and LEVEL_BY_SEVERITY[severity] >= self._level

    def has_pattern(self, prefix: str) -> bool:
        """Return True if a pattern of the handler starts with the prefix."""
        return any(pattern.startswith(prefix) for pattern in self._types or ())

    def call_directly(self, item: object) -> None:
        """Call a direct handler on the calling thread."""
        self._call(item)
        self._direct_deliveries.bump()

    def put(self, item: Any, origin: object = None, *, is_bounded: bool = True) -> bool:
        """Queue an item for the handler, or call a direct handler. Return False if the item is not accepted. Never waits."""
        if self.is_direct:
            self.call_directly(item if self._convert is None else self._convert(item, origin))
            return True
        return self.is_registered and super().put((item, origin), is_bounded=is_bounded)

    def _deliver(self, item: tuple[Any, object]) -> None:
        """Call the handler with a queued pair of event and logged object, on the thread of the handler."""
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
    """Return the default name of a handler: the name of a function, or of the class of an object."""
    if is_container_method(handler):
        return f"{type(handler.__self__).__name__}.{handler.__name__}"  # type: ignore[attr-defined]  # a bound method
    name = getattr(handler, "__qualname__", None) or type(handler).__qualname__
    return clean_text(str(name).replace("<locals>.", ""))[:100] or "handler"
