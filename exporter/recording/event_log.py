"""Events: `log` counts and hands them on; handlers are told on threads of their own.

Used in the training process, by any thread. An event is counted at once and exactly, without a lock; an `Event`
is built only when a handler wants it, after sampling and the rate limit. What is counted goes into the feed with
the Stats. Handlers run on their deliveries' threads, never here, with the one exception of containers' own
methods. After a fork the child counts from zero and tells its handlers of its own events only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from time import monotonic_ns, time

from exporter.recording.deliveries import make_delivery
from exporter.recording.delivery import END_SECONDS, Delivery, end_all
from exporter.recording.event_handle import Handle
from exporter.recording.event_kinds import Kind, Rule
from exporter.recording.event_table import MOST_TYPES, KindTable
from exporter.recording.event_telling import Telling
from exporter.recording.event_values import check_data, check_parents, check_text, check_timestamp, check_type
from exporter.recording.late import CURRENT_SPAN
from exporter.recording.values import NO_EVENTS, NOTHING, EventsReading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    from exporter.recording.delivery import Adapt, EventHandler
    from exporter.recording.event_values import Datum, Event

    class Companion(Protocol):
        """What a face lets happen at the times that only the recording knows."""

        def tick(self) -> None:
            """A few times a second, on the recording thread; must be short, and run no user code."""
            ...

        def close(self) -> None:
            """The process ends; handlers are still told."""
            ...

        def after_fork(self) -> None:
            """This is the child: what the parent has recorded is not its own."""
            ...


MOST_COUNTED_APART = 1000


class EventLog:
    """The events of one process.

    Attributes:
        latest: What `recent` makes events of; whoever counts an event adds it here.
        hand_on: Hands on an event that was counted: see `Telling`.
        tell: Hands on one that was counted and admitted: see `Telling`.
    """

    def __init__(self, *, clock: Callable[[], float] = time) -> None:
        self._clock = clock
        self._wake: Callable[[], None] = lambda: None
        self._companions: tuple[Companion, ...] = ()
        self._telling = Telling()
        self._deliveries = self._telling.deliveries
        self.latest = self._telling.latest
        self.hand_on = self._telling.hand_on
        self.tell = self._telling.tell
        self._begin()
        self._table = KindTable(self._telling.prepare)
        self._kinds = self._table.kinds

    def _begin(self) -> None:
        """Set up what belongs to one process and identity alone."""
        self._lock = threading.RLock()  # a signal handler may log while its thread makes a kind
        self._published = NO_EVENTS

    def identify_by(self, identify: Callable[[], tuple[str, int | None]]) -> None:
        """Say what gives the run and the rank of this process."""
        self._telling.identify = identify

    @property
    def recording(self) -> bool:
        """Whether anything is recorded; False with `EXPORTER_DISABLED=1`."""
        return self._table.recording

    @recording.setter
    def recording(self, recording: bool) -> None:
        with self._lock:
            self._table.recording = recording

    # What code that logs calls ---------------------------------------------------------------------------

    def log(
        self,
        type: str,
        message: str | None = None,
        *,
        severity: str = "info",
        timestamp: float | None = None,
        span_id: str | None = None,
        parent_ids: Iterable[str] = (),
        payload: Callable[[], Mapping[str, Datum]] | None = None,
        **data: Datum,
    ) -> None:
        """Say that something has happened. Never waits; raises for wrong arguments only.

        Args:
            type: What happened, in few different words: `checkpoint.saved`. It becomes a label value.
            message: For people.
            severity: A name of `Severity`.
            timestamp: When it happened, Unix time in seconds or a datetime; None for now.
            span_id: The span that it belongs to; None for the innermost that is open here, of those that are
                objects: `exporter.span`, applications, loops and saves, not the short blocks of an iteration.
            parent_ids: The ids of the events that led to it.
            payload: Gives further data. Called only when a handler is told of this event; what it raises is
                counted, and the event then goes without them.
            data: What programs look at: str, float, int or bool.

        Raises:
            TypeError: An argument or a datum is of the wrong type.
            ValueError: An unknown severity, an empty type, a whole number of more than 64 bits.
        """
        try:
            kind = self._kinds[type, severity]
        except (KeyError, TypeError):
            kind = self.kind(type, severity)
        plain = check_data(data) if data else NOTHING
        if message is not None:
            message = check_text("message", message)
        now = self._clock()
        happened = now if timestamp is None else check_timestamp(timestamp)
        if span_id is not None:
            span_id = check_text("span_id", span_id)
        elif CURRENT_SPAN.find is not None:
            span_id = CURRENT_SPAN.find()
        parents = check_parents(parent_ids) if parent_ids else ()
        if payload is not None and not callable(payload):
            raise TypeError(f"payload must be callable, not {payload!r}")
        if not kind.enabled:
            return
        number = kind.count()
        kind.occurrences.last = happened
        raw = (type, message, kind.severity, plain, happened, now, monotonic_ns(), span_id, parents)
        if kind.routes == ():
            self.latest.append(raw)
        else:
            self.hand_on(kind, number, raw, payload=payload)

    def enabled(self, type: str, severity: str = "info") -> bool:
        """Whether such an event would be recorded; cheap enough to ask before making its data."""
        return self._table.open or self._table.allows(type, severity)

    def recent(self) -> list[Event]:
        """Give the latest events, the oldest first; at most `RECENT_EVENTS`."""
        with self._lock:
            return self._telling.recent()

    # Handlers --------------------------------------------------------------------------------------------

    def register(
        self,
        handler: Callable[[Any], object] | EventHandler,
        *,
        types: Iterable[str] | str | None = None,
        severity: str | None = None,
        queue: int = 1000,
        name: str | None = None,
        adapt: Adapt | None = None,
        own: type | None = None,
    ) -> Handle:
        """Have a handler told of events, on a thread of its own, in the order in which they were logged.

        The same handler again is told again, by another thread. What it raises is counted; while it is busy,
        `queue` events wait and the rest is counted as dropped.

        Args:
            handler: A callable that takes an `Event`, or an object with `handle(event)`. The bound `append` or
                `put` of a list, deque or SimpleQueue is called at once, on the thread that logs.
            types: Shell patterns of the types that it wants, one or several; None for all.
            severity: The least severity that it wants; None for all.
            queue: Events that may wait for it, 1 to 1,000,000.
            name: The label value under which it is counted; None for its own name.
            adapt: For faces: makes what it takes out of an `Event` and the object that was logged.
            own: For faces: the class of the objects that it takes as they were logged.

        Raises:
            TypeError: The handler can take no events, or another argument is of the wrong type.
            ValueError: An argument is out of range.
        """
        delivery = make_delivery(handler, types, severity, queue, name, adapt, own)
        if self.recording:
            with self._lock:
                self._deliveries.add(delivery)
                self._rewire()
            delivery.begin()
            self._wake()
        return Handle(self, delivery)

    def unregister(self, handle: Handle, *, timeout_seconds: float = END_SECONDS) -> None:
        """Tell a handler no more; again is harmless.

        Waits until it has taken what was logged before, but not for longer than the time, and not at all when
        the handler itself calls this; what it has not taken by then is dropped and counted.

        Raises:
            TypeError: That is no handle.
        """
        if not isinstance(handle, Handle):
            raise TypeError(f"unregister takes what register gave, not {handle!r}")
        delivery = handle.delivery
        with self._lock:
            if not self._deliveries.remove(delivery):
                return
            self._rewire()
        end_all([delivery], seconds=timeout_seconds, reason="unregistered")
        with self._lock:
            self._deliveries.retire()

    def has(self, delivery: Delivery) -> bool:
        """Whether it is told of events."""
        return delivery in self._deliveries.active

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until every handler has taken what was logged before.

        Returns:
            Whether all of them have within the time.
        """
        return self._deliveries.flush(timeout_seconds)

    def close(self, timeout_seconds: float = END_SECONDS) -> None:
        """End all deliveries: what an exiting process does, giving its handlers a bounded time."""
        for companion in self._companions:
            companion.close()
        with self._lock:
            wait = self._deliveries.end()
            self._rewire()
        wait(timeout_seconds)

    # Rules -----------------------------------------------------------------------------------------------

    def limit(self, match: str = "*", **rule: object) -> None:
        """Say what becomes of the events whose types match a shell pattern; the later call wins.

        What is given replaces what was said of the same pattern before; nothing given forgets it.

        Args:
            match: The pattern.
            rule: Any of `enabled` (bool), `severity` (the least that is recorded), `sample` (the share that
                handlers are told, 0 to 1) and `per_second` (how many of a kind they are told each second; None for
                any number). Sampled and limited events still count.

        Raises:
            TypeError: A value is of the wrong type.
            ValueError: A value is out of range, or there is no such rule.
        """
        with self._lock:
            self._table.limit(match, rule)

    def override(self, rules: Iterable[Rule]) -> list[str]:
        """Put the configuration's rules in force; the code's own come after them.

        Returns:
            What is wrong with the rules that were left out.
        """
        with self._lock:
            return self._table.override(rules)

    def count_types(self, allowed: Iterable[str] | None = None, *, most: int = MOST_TYPES) -> None:
        """Say which types are counted apart; the rest is `other`. Counts so far stay where they are.

        Args:
            allowed: These types only; None for the first that come.
            most: So many of them.

        Raises:
            TypeError: A type is no text.
            ValueError: `most` is not from 0 to 1000.
        """
        types = None if allowed is None else frozenset(map(check_type, allowed))
        if not 0 <= most <= MOST_COUNTED_APART:
            raise ValueError(f"most must be 0 to {MOST_COUNTED_APART}, not {most}")
        with self._lock:
            self._table.count_types(types, most)

    # What the process's root and the recording thread call -----------------------------------------------

    def on_first(self, start: Callable[[], None]) -> None:
        """Say what is to be called when there is something to record; it must be cheap and never raise."""
        self._wake = start

    def attach(self, companion: Companion) -> None:
        """Let a face know of the recording's own times."""
        self._companions = (*self._companions, companion)

    def tick(self) -> None:
        """Let the faces do what is due."""
        for companion in self._companions:
            companion.tick()

    def in_use(self) -> bool:
        """Whether anything was logged or registered."""
        return self.recording and bool(self._kinds or self._deliveries.active)

    def reading(self) -> EventsReading:
        """Tell all; the same object as long as nothing has changed. By one thread at a time."""
        with self._lock:
            counts, last, suppressed = self._table.counts()
            delivered, dropped = self._deliveries.counts()
        reading = EventsReading(counts, last, suppressed, delivered, dropped)
        if reading != self._published:
            self._published = reading
        return self._published

    def reset(self) -> None:
        """Count from zero: what was recorded so far belongs to another identity."""
        with self._lock:
            self._deliveries.begin()
            self._restart()

    def renew(self) -> None:
        """Ask anew who this process is."""
        self._telling.renew()

    def after_fork(self) -> None:
        """In a forked child: forget what the parent recorded and what waits for its handlers."""
        self._deliveries.after_fork()
        self._restart()
        for companion in self._companions:
            companion.after_fork()

    def kind(self, type: str, severity: str) -> Kind:
        """Find or make what is decided about a type and a severity; one that is known is found without a lock.

        Raises:
            TypeError: The type is no text.
            ValueError: The type is empty, or there is no such severity.
        """
        try:
            return self._kinds[type, severity]
        except (KeyError, TypeError):
            pass
        with self._lock:
            known = len(self._kinds)
            kind = self._table.obtain(type, severity)
        if self.recording and len(self._kinds) != known:
            self._wake()
        return kind

    def record(
        self,
        kind: Kind,
        type: str,
        message: str | None,
        data: Mapping[str, Datum],
        happened: float | None,
        origin: object,
    ) -> None:
        """Count an event and hand it on; what the faces use, which have checked it."""
        if not kind.enabled:
            return
        now = self._clock()
        number = kind.count()
        kind.occurrences.last = when = now if happened is None else happened
        raw = (type, message, kind.severity, data, when, now, monotonic_ns(), None, ())
        self.hand_on(kind, number, raw, origin)

    # Inside ----------------------------------------------------------------------------------------------

    def _rewire(self) -> None:
        for kind in self._table.every():
            self._telling.prepare(kind)

    def _restart(self) -> None:
        self._begin()
        self._telling.begin()
        self._table.begin()
        self._rewire()
