"""Worker: one daemon thread with a bounded queue, for code that is not ours; and the handle of a handler, which is one.

What it calls may raise, hang or be slow, which costs its own items, counted by reason. A forked child's begins anew.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import count
from queue import SimpleQueue
from time import monotonic, time
from typing import Any

from exporter.recording.conversion import Datum, safe_repr
from exporter.recording.event_values import LEVELS, Event
from exporter.recording.identity import clean_text
from exporter.recording.notices import tell_once


class Counter:
    """Counts from any number of threads without a lock, exactly.

    Attributes:
        bump: Count one more; gives the number of those before it. One call into C.
    """

    def __init__(self) -> None:
        self._count = count()
        self._many = 0
        self.bump: Callable[[], int] = self._count.__next__

    def add(self, number: int) -> None:
        """Count so many more; by one thread at a time."""
        self._many += number

    def read(self) -> int:
        """Give the count."""
        return int(repr(self._count)[6:-1]) + self._many  # the only way to look without taking a number


class Marker:
    """What is put into a queue to learn when all before it was taken; `end` asks the thread to stop there.

    No `threading.Event`: a signal handler that interrupts its `wait` leaves it locked against `set`.
    """

    def __init__(self, *, end: bool) -> None:
        self.end = end
        self._waits = threading.Lock()
        self._waits.acquire()
        self.set = self._waits.release

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until all before it was taken; False where that takes longer."""
        taken = self._waits.acquire(timeout=max(timeout_seconds, 0.0))
        if taken:
            self._waits.release()
        return taken


class Worker:
    """Gives items to a function, on a thread of its own.

    Attributes:
        done: Items that were taken.
        busy_since: Unix time at which the item under way was begun; None while it waits for one.
    """

    def __init__(self, handle: Callable[[Any], object], *, name: str, bound: int) -> None:
        self._handle, self._name, self._bound = handle, name, bound
        self.after_fork()

    def after_fork(self) -> None:
        """Begin anew: what waits belongs to the parent, and so does the thread."""
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._full = Counter()
        self._losses: dict[str, int] = {}
        self._ended = self._abandoned = False
        self.done = 0
        self.busy_since: float | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing waits."""
        return self._queue.empty()

    @property
    def over(self) -> bool:
        """Whether it takes no more, so that its counts are final; once it has been ended."""
        return self._thread is None or self._ended or self._abandoned

    def lost(self) -> dict[str, int]:
        """Items that it missed, by reason; by the thread that publishes."""
        full = self._full.read()
        return self._losses | {"queue_full": full} if full else dict(self._losses)

    def put(self, item: object, *, bounded: bool = True) -> bool:
        """Hand over one item if there is room for it, which it tells; never raises, never waits."""
        if bounded and self._queue.qsize() >= self._bound:
            self._full.bump()
            return False
        self._queue.put(item)
        if self._thread is None:
            self.start()
        return True

    def start(self) -> None:
        """Start the thread: an interpreter that ends starts no more since CPython 3.12, and exit handlers log, too."""
        # Whoever holds the lock is starting the thread; a signal handler that interrupts it must not wait for it.
        if not self._starting.acquire(blocking=False):
            return
        try:
            if self._thread is not None or self._ended:
                return
            thread = threading.Thread(target=self._run, name=f"exporter-{self._name}", daemon=True)
            thread.start()
            self._thread = thread
        except RuntimeError as error:  # no more threads, none that are daemons, or the interpreter is ending
            tell_once(f"worker {self._name} thread", f"{self._name} loses what it is to do: {error}")
            while not self._queue.empty():
                self._queue.get_nowait()
                self._lose("no_thread", 1)
        finally:
            self._starting.release()

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until everything that waits now was taken; False if that takes longer, and on the worker's own thread."""
        marker = self.mark()
        return marker is None or (
            threading.current_thread() is not self._thread and marker.wait(timeout_seconds)
        )

    def finish(self) -> Callable[[float, str], None]:
        """Ask the thread to end after what waits now; gives what waits for that and counts what was not taken by then."""
        marker = self.mark(end=True)

        def wait(timeout_seconds: float, reason: str) -> None:
            if marker is None or threading.current_thread() is self._thread:
                return
            if not marker.wait(timeout_seconds):
                self._abandoned = True  # the thread takes no more, whenever its function returns
                # Without the marker, with the one that it hangs in.
                self._lose(reason, max(self._queue.qsize() - 1, 0) + 1)

        return wait

    def mark(self, *, end: bool = False) -> Marker | None:
        """Put a marker after what waits now, set when all of that was taken; None where nothing waits."""
        if self._thread is None or self._ended:
            return None
        marker = Marker(end=end)
        self._queue.put(marker)
        return marker

    def _run(self) -> None:
        queue = self._queue
        while True:
            item = queue.get()
            if self._abandoned:
                return
            if not isinstance(item, Marker):
                self._take(item)
                continue
            self._ended = self._ended or item.end
            item.set()
            if item.end:
                return

    def _take(self, item: object) -> None:
        self.busy_since = time()
        try:
            self._handle(item)
            if not self._abandoned:  # else it was counted as lost when nobody could wait any longer
                self.done += 1
        except BaseException as error:  # noqa: BLE001  # the user's code: SystemExit would end the thread, too
            self._lose("error", 1)
            tell_once(f"worker {self._name}", f"{self._name} has failed: {safe_repr(error)}")
        finally:
            self.busy_since = None

    def _lose(self, reason: str, items: int) -> None:
        # A new dict each time: the recording thread reads it while this one writes.
        self._losses = self._losses | {reason: self._losses.get(reason, 0) + items}


def end_all(workers: Iterable[Worker], *, seconds: float, reason: str) -> None:
    """End several of them; they share the time."""
    waits = [worker.finish() for worker in workers]
    deadline = monotonic() + seconds
    for wait in waits:
        wait(deadline - monotonic(), reason)


# Handlers ------------------------------------------------------------------------------------------------------

Adapt = Callable[[Event, object], object]
RawEvent = tuple[
    str, "str | None", str, Mapping[str, Datum], float, float, int, "str | None", tuple[str, ...]
]
"""Type, message, severity, data, timestamp, logged_at, monotonic_ns, span_id, parent_ids: an Event is made of them
when somebody looks, and is given its id then."""

ANSWER_SECONDS = 5.0
"""The longest that whoever logs waits for a handler that answers."""
_CONTAINERS = (list, deque, SimpleQueue)
_CONTAINER_METHODS = frozenset({"append", "appendleft", "put", "put_nowait"})


class Handle(Worker):
    """A registered handler: the way to unregister it, and what has become of its events.

    Attributes:
        own: The class of the objects that it takes as they were logged.
        direct: Whether it is called at once, on the thread that logs.
        answers: Whether a face waits for it; see `answer`.
    """

    _late: Marker | None  # passed once it has taken what it was late with

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

    def answer(self, timeout_seconds: float = ANSWER_SECONDS) -> None:
        """Wait until the handler has taken all events logged so far; a handler that is late is not awaited again."""
        # Threads of ours never wait: two handlers could wait for each other, so what one logs is told after it.
        is_ours = threading.current_thread().name.startswith("exporter-")
        if is_ours or not (self._late is None or self._late.wait(0)):
            return
        marker = self.mark()
        self._late = None if marker is None or marker.wait(timeout_seconds) else marker
        if self._late is not None:
            told = f"has not answered within {timeout_seconds:g} s: it is told without waiting for it"
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
