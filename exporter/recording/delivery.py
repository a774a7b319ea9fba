"""Delivery: one handler of events, with a bounded queue and a daemon thread of its own.

Used in the training process. Threads that log put events into the queue and go on; the handler, which is the
user's code, runs on the delivery's thread. One that raises, hangs or is slow costs its own events, which are
counted by reason, and nothing else. After a fork the child's delivery begins anew: its queue is empty, and its
thread starts at the first event.

A container's own method (`list.append`, `deque.append`, `SimpleQueue.put`) can neither hang nor run anybody's
code, so it is called at once, on the thread that logs, and needs no thread.
"""

from __future__ import annotations

import threading
from _queue import SimpleQueue  # `queue` would load `heapq` and more beside it
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic

from exporter.errors import EventsLostError
from exporter.recording.event_kinds import Counter
from exporter.recording.event_values import LEVELS, Event
from exporter.recording.identity import clean_text
from exporter.recording.notices import tell_once
from exporter.recording.overrides import matches

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    class EventHandler(Protocol):
        """An object that is given events.

        It may also have `flush()`, called when its queue has run empty and at the latest after every
        `FLUSHED_TOGETHER` events: until then its events count as neither delivered nor dropped.
        """

        def handle(self, event: Any) -> object:
            """Take one `Event`, or what `adapt` has made of it."""
            ...

    Adapt = Callable[[Event, object], object]

FLUSHED_TOGETHER = 256
END_SECONDS = 2.0
"""The longest that an unregistration, or the exit of the process, waits for a handler to take what is queued."""

_CONTAINERS = (list, deque, SimpleQueue)
_CONTAINER_METHODS = frozenset({"append", "appendleft", "put", "put_nowait"})


class _Marker:
    """What is put into a queue to learn when all before it was taken; `end` asks the thread to stop there."""

    __slots__ = ("end", "passed")

    def __init__(self, *, end: bool) -> None:
        self.end = end
        self.passed = threading.Event()


class Delivery:
    """Takes the events of the types and severities that one handler wants to it.

    Args:
        handler: A callable that takes an event, or an object with `handle(event)`.
        name: Label value under which it is counted.
        types: Shell patterns of the types that it wants; None for all.
        severity: The least severity that it wants.
        queue: Events that may wait.
        adapt: Makes what the handler takes out of an event and the object that was logged; on the handler's thread.
        own: Instances of this class are handed on as they were logged where that is done at once.

    Attributes:
        name: As given.
        own: As given.
        direct: Whether the handler is called at once, on the thread that logs.
    """

    def __init__(
        self,
        handler: Callable[[Any], object] | EventHandler,
        *,
        name: str,
        types: tuple[str, ...] | None,
        severity: str,
        queue: int,
        adapt: Adapt | None = None,
        own: type | None = None,
    ) -> None:
        self.name = name
        self.own = own
        self._handle: Callable[[Any], object] = getattr(handler, "handle", None) or handler  # type: ignore[assignment]  # one of both
        self._flush: Callable[[], object] | None = (
            getattr(handler, "flush", None) if hasattr(handler, "handle") else None
        )
        self._types = types
        self._level = LEVELS[severity]
        self._bound = queue
        self._adapt = adapt
        self.direct = is_container_method(handler)
        self.after_fork()

    def after_fork(self) -> None:
        """Begin anew: what waits belongs to the parent, and so does the thread."""
        self._queue: SimpleQueue[tuple[Any, object] | _Marker] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._full = Counter()
        self._taken = Counter()  # by direct delivery
        self._done = 0
        self._unflushed = 0
        self._losses: dict[str, int] = {}
        self._ended = False
        self._abandoned = False

    @property
    def delivered(self) -> int:
        """Events that the handler took; by the thread that publishes."""
        return self._done + self._taken.read()

    @property
    def over(self) -> bool:
        """Whether it takes no more, so that its counts are final; once it has been ended."""
        return self._thread is None or self._ended or self._abandoned

    def lost(self) -> dict[str, int]:
        """Events that it missed, by reason; by the thread that publishes."""
        losses = dict(self._losses)
        full = self._full.read()
        return losses | {"queue_full": full} if full else losses

    def wants(self, type: str, severity: str) -> bool:
        """Whether it is to be given events of this type and severity."""
        if LEVELS[severity] < self._level:
            return False
        return self._types is None or any(matches(type, pattern) for pattern in self._types)

    def begin(self) -> None:
        """Start its thread: an interpreter that ends starts no more since CPython 3.12, and exit handlers log, too."""
        if not self.direct:
            self._start()

    def take_at_once(self, item: object) -> None:
        """Call the handler here and now; only for those that are `direct`."""
        self._handle(item)
        self._taken.bump()

    def put(self, event: Any, origin: object = None) -> None:
        """Hand over one event, or what else its registrar puts in the place of one; never raises, never waits."""
        if self.direct:
            self.take_at_once(event if self._adapt is None else self._adapt(event, origin))
            return
        if self._queue.qsize() >= self._bound:
            self._full.bump()
            return
        self._queue.put((event, origin))
        if self._thread is None:
            self._start()

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until everything that waits now was taken.

        Returns:
            Whether that was so within the time; False at once on the handler's own thread.
        """
        marker = self._mark(end=False)
        return marker is None or (
            threading.current_thread() is not self._thread and marker.passed.wait(max(timeout_seconds, 0.0))
        )

    def finish(self) -> Callable[[float, str], None]:
        """Ask the thread to end after what waits now.

        Returns:
            Waits for that so many seconds, and counts what was not taken by then under the given reason.
        """
        marker = self._mark(end=True)

        def wait(timeout_seconds: float, reason: str) -> None:
            if marker is None or threading.current_thread() is self._thread:
                return
            if not marker.passed.wait(max(timeout_seconds, 0.0)):
                self._abandoned = True  # the thread takes no more, whenever its handler returns
                # Without the marker, with the one that it hangs in and those before it that are not written yet.
                self._lose(reason, max(self._queue.qsize() - 1, 0) + 1 + self._unflushed)

        return wait

    def _mark(self, *, end: bool) -> _Marker | None:
        if self._thread is None or self._ended:
            return None
        marker = _Marker(end=end)
        self._queue.put(marker)
        return marker

    def _start(self) -> None:
        # Whoever holds the lock is starting the thread; a signal handler that interrupts it must not wait for it.
        if not self._starting.acquire(blocking=False):
            return
        try:
            if self._thread is not None or self._ended:
                return
            thread = threading.Thread(target=self._run, name=f"exporter-events-{self.name}", daemon=True)
            thread.start()
            self._thread = thread
        except RuntimeError:  # no more threads, none that are daemons, or the interpreter is ending
            while not self._queue.empty():
                self._queue.get_nowait()
                self._lose("no_thread", 1)
        finally:
            self._starting.release()

    def _run(self) -> None:
        queue = self._queue
        while True:
            item = queue.get()
            if self._abandoned:
                return
            if isinstance(item, _Marker):
                self._write_out()
                self._ended = self._ended or item.end
                item.passed.set()
                if item.end:
                    return
                continue
            self._take(*item)
            if self._unflushed and (queue.empty() or self._unflushed >= FLUSHED_TOGETHER):
                self._write_out()

    def _take(self, event: Any, origin: object) -> None:
        try:
            self._handle(event if self._adapt is None else self._adapt(event, origin))
        except BaseException as error:  # noqa: BLE001  # the user's code: SystemExit would end the thread, too
            self._fail(error, 1)
        else:
            if self._abandoned:
                return  # it was counted as lost when nobody could wait any longer
            if self._flush is None:
                self._done += 1
            else:
                self._unflushed += 1

    def _write_out(self) -> None:
        if self._flush is None or not self._unflushed:
            return
        waiting, self._unflushed = self._unflushed, 0
        try:
            self._flush()
        except BaseException as error:  # noqa: BLE001  # likewise
            self._fail(error, waiting)
        else:
            self._done += waiting

    def _fail(self, error: BaseException, events: int) -> None:
        reason = "error"
        if isinstance(error, EventsLostError):
            reason, lost = error.reason, min(error.lost, events)
            self._done += events - lost
            events = lost
        self._lose(reason, events)
        tell_once(
            f"handler {self.name} {reason}", f"the event handler {self.name} lost {events} events: {error!r}"
        )

    def _lose(self, reason: str, events: int) -> None:
        # A new dict each time: the recording thread reads it while this one writes.
        self._losses = self._losses | {reason: self._losses.get(reason, 0) + events}


def is_container_method(handler: object) -> bool:
    """Whether calling it can only put something into a list, a deque or a SimpleQueue."""
    return (
        type(getattr(handler, "__self__", None)) in _CONTAINERS
        and type(handler) is type([].append)
        and getattr(handler, "__name__", "") in _CONTAINER_METHODS
    )


def name_of(handler: object) -> str:
    """Name a handler for people: a function by its name, an object by its class."""
    if is_container_method(handler):
        return f"{type(handler.__self__).__name__}.{handler.__name__}"  # type: ignore[attr-defined]  # a bound method
    name = getattr(handler, "__qualname__", None) or type(handler).__qualname__
    return clean_text(str(name).replace("<locals>.", ""))[:100] or "handler"


def end_all(deliveries: Iterable[Delivery], *, seconds: float, reason: str) -> None:
    """End several of them; they share the time."""
    waits = [delivery.finish() for delivery in deliveries]
    deadline = monotonic() + seconds
    for wait in waits:
        wait(deadline - monotonic(), reason)
