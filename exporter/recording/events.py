"""Events: `exporter.log` counts them and hands them on; handlers are told on threads of their own.

Used in the training process, by any thread. An event is counted at once and exactly, without a lock; an `Event` is built
only when a handler wants it, after sampling and the rate limit. What is counted goes into the feed with the Stats. After
a fork the child counts from zero and tells its handlers of its own events only.

`exporter.log` and `exporter.events.enabled` never raise and never wait: what they are given is converted (see
`event_values`), and what cannot be is left out, counted under the reason `payload` and said once. `register`,
`unregister`, `limit` and `count_types` set the recording up and raise for wrong arguments.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from time import monotonic, monotonic_ns, time
from typing import Any, Protocol

from exporter.recording.event_kinds import (
    Adapt,
    Delivery,
    EventHandler,
    Kind,
    name_of,
)
from exporter.recording.event_table import LONGEST_LABEL, OTHER, KindTable, Pair
from exporter.recording.event_values import (
    LONGEST_TEXT,
    LONGEST_TYPE,
    Datum,
    Event,
    Severity,
    check_parents,
    check_severity,
    check_timestamp,
    convert_data,
    knows_severity,
    severity_of,
)
from exporter.recording.identity import clean_text
from exporter.recording.values import NO_EVENTS, EventsReading
from exporter.recording.worker import end_all, shown

__all__ = [
    "EVENTS",
    "Event",
    "EventLog",
    "Handle",
    "Severity",
    "count_types",
    "enabled",
    "limit",
    "log",
    "recent",
    "register",
    "unregister",
]

RECENT_EVENTS = 256
"""Latest events that are kept for `recent`."""
MOST_NAMES = 100
"""Names of handlers that are counted apart; the rest is `other`."""
MOST_QUEUED = 1_000_000
END_SECONDS = 2.0
"""The longest that an unregistration, or the exit of the process, waits for a handler to take what is queued."""
_UNNAMED = "unnamed"
_class_of = type
"""Not isinstance, which asks an object of the job's for its `__class__`."""
_IDS_AT_ONCE = 512

RawEvent = tuple[
    str, "str | None", str, Mapping[str, Datum], float, float, int, "str | None", tuple[str, ...]
]
"""Type, message, severity, data, timestamp, logged_at, monotonic_ns, span_id, parent_ids: an Event is made of them
when somebody looks, and is given its id then."""


class LateEvent(Protocol):
    """An event of a face that was not made into an `Event` yet."""

    def raw(self) -> RawEvent:
        """Give what an `Event` is made of."""
        ...

    def logged(self, origin: object) -> object:
        """Give the object that was logged together with what it was then, for `adapt`."""
        ...


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


class Handle:
    """What `register` gives: the way back, and what has become of the events.

    Attributes:
        name: Under which the handler is counted.
        delivery: What hands events to it.
    """

    __slots__ = ("_log", "delivery", "name")

    def __init__(self, log: EventLog, delivery: Delivery) -> None:
        self._log = log
        self.delivery = delivery
        self.name = delivery.name

    @property
    def registered(self) -> bool:
        """Whether it is still told."""
        return self.delivery in self._log.active

    def unregister(self) -> None:
        """Tell it no more; see `EventLog.unregister`."""
        self._log.unregister(self)

    def put(self, item: object) -> None:
        """Hand it something else than an event, for faces; nothing once it is unregistered."""
        if self.registered:
            self.delivery.put(item)

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until it has taken what waits now; says whether it has within the time."""
        return self.delivery.worker.drain(timeout_seconds)

    def __repr__(self) -> str:
        return f"<Handle {self.name!r}: {'registered' if self.registered else 'unregistered'}>"


class EventLog(KindTable):
    """The events of one process.

    Attributes:
        active: The handlers that are told, in order of registration.
        identify: Gives the run and the rank of this process.
        current_span: Gives the id of the innermost named span that is open in the calling thread or task.
        latest: What `recent` makes events of; whoever counts an event adds it here.
    """

    def __init__(self, *, clock: Callable[[], float] = time) -> None:
        super().__init__()
        self._clock = clock
        self._companions: tuple[Companion, ...] = ()
        self.identify: Callable[[], tuple[str, int | None]] = lambda: ("", None)
        self.current_span: Callable[[], str | None] = lambda: None
        self.active: tuple[Delivery, ...] = ()
        self.latest: deque[RawEvent | LateEvent | Event] = deque(maxlen=RECENT_EVENTS)
        self._begin()

    def _begin(self) -> None:
        """Count from zero: set up what belongs to one process and identity alone."""
        self._lock = threading.RLock()
        self._published = NO_EVENTS
        self._ids: deque[str] = deque()
        self._who: tuple[str, int | None] | None = None
        self.latest.clear()
        self._begin_counts()
        self._begin_deliveries()

    def _begin_deliveries(self) -> None:
        self._names: set[str] = set()
        self._leaving: list[Delivery] = []  # no longer told, but perhaps still at it
        self._delivered: dict[str, int] = {}
        self._dropped: dict[Pair, int] = {}
        for delivery in self.active:
            self._add_up(delivery, self._delivered, self._dropped, sign=-1)

    @property
    def recording(self) -> bool:
        """Whether anything is recorded; False with `EXPORTER_DISABLED=1`."""
        return self._recording

    @recording.setter
    def recording(self, recording: bool) -> None:
        with self._lock:
            self._recording = recording
            self._obey()

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
        payload: Callable[[], Mapping[str, object]] | None = None,
        **data: object,
    ) -> None:
        """Say that something has happened. Never waits and never raises.

        Args:
            type: What happened, in few different words: `checkpoint.saved`. It becomes a label value.
            message: For people.
            severity: A name of `Severity`; words of other libraries (`warn`, `fatal`) and levels of `logging` will do.
            timestamp: When it happened, Unix time in seconds or a datetime; None for now.
            span_id: The span that it belongs to; None for the innermost that is open here, of those that are
                objects: `exporter.span`, applications, loops and saves, not the short blocks of an iteration.
            parent_ids: The ids of the events that led to it.
            payload: Gives further data. Called only when a handler is told of this event; what it raises is
                counted, and the event then goes without them.
            data: What programs look at: str, float, int or bool. Numbers of other libraries become plain ones; None is
                left out; lists, paths and anything else become short text.
        """
        try:
            self._log(type, message, severity, timestamp, span_id, parent_ids, payload, data)
        except Exception as error:  # noqa: BLE001  # an object of the job's that fails wherever it is touched
            self._refuse(type if _class_of(type) is str else _UNNAMED, shown(error))

    def _log(
        self,
        type: str,
        message: str | None,
        severity: str,
        timestamp: float | None,
        span_id: str | None,
        parent_ids: Iterable[str],
        payload: Callable[[], Mapping[str, object]] | None,
        data: Mapping[str, object],
    ) -> None:
        try:
            kind = self._kinds[type, severity]
        except (KeyError, TypeError):
            if not isinstance(type, str) or not type:
                type = str(getattr(type, "value", type) or _UNNAMED)  # noqa: A001  # the parameter, made text
            if not knows_severity(severity):
                self._refuse(type, f"the severity {shown(severity)}")
            kind = self.kind(type, severity_of(severity))
        if not kind.enabled:
            return
        plain = convert_data(data, lambda name: self._refuse(type, f"the datum {name!r}")) if data else data
        if message is not None:
            message = str(message)[:LONGEST_TEXT]
        now = self._clock()
        happened = now
        parents: tuple[str, ...] = ()
        if timestamp is not None:
            try:
                happened = check_timestamp(timestamp)
            except (TypeError, ValueError) as error:
                self._refuse(type, str(error))
        span_id = self.current_span() if span_id is None else str(span_id)[:LONGEST_TYPE]
        if parent_ids:
            try:
                parents = check_parents(parent_ids)
            except TypeError as error:
                self._refuse(type, str(error))
        number = kind.count()
        kind.occurrences.last = happened
        raw: RawEvent = (type, message, kind.severity, plain, happened, now, monotonic_ns(), span_id, parents)  # type: ignore[assignment]  # data converted
        if kind.routes == ():
            self.latest.append(raw)
        else:
            self.hand_on(kind, number, raw, payload=payload)

    def recent(self) -> list[Event]:
        """Give the latest events, the oldest first; at most `RECENT_EVENTS`."""
        with self._lock:
            kept = self.latest
            for position in range(len(kept)):
                entry = kept[position]
                if not isinstance(entry, Event):
                    kept[position] = self._event(entry if isinstance(entry, tuple) else entry.raw())
            return [entry for entry in list(kept) if isinstance(entry, Event)]

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
        a_class = isinstance(handler, type) and hasattr(handler, "handle")  # where an object of it is meant
        takes = callable(handler) or callable(getattr(handler, "handle", None))
        if a_class or not takes:
            raise TypeError(
                f"a handler must be a callable that takes an event, or an object with handle(event), not {handler!r}"
            )
        if not isinstance(queue, int) or isinstance(queue, bool):
            raise TypeError(f"queue must be a whole number of events, not {queue!r}")
        if not 1 <= queue <= MOST_QUEUED:
            raise ValueError(f"queue must be 1 to {MOST_QUEUED} events, not {queue}")
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name must be str or None, not {name!r}")
        patterns = None if types is None else (types,) if isinstance(types, str) else tuple(types)
        for pattern in patterns or ():
            if not isinstance(pattern, str):
                raise TypeError(f"types must be patterns such as 'checkpoint.*', not {pattern!r}")
        delivery = Delivery(
            handler,
            name=clean_text(name)[:LONGEST_LABEL] if name else name_of(handler),
            types=patterns,
            severity="debug" if severity is None else check_severity(severity),
            queue=queue,
            adapt=adapt,
            own=own,
        )
        if self._recording:
            with self._lock:
                self.active = (*self.active, delivery)
                self._route()
            if not delivery.direct:
                delivery.worker.start()
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
            if delivery not in self.active:
                return
            self.active = tuple([each for each in self.active if each is not delivery])
            self._leaving.append(delivery)
            self._route()
        end_all([delivery.worker], seconds=timeout_seconds, reason="unregistered")

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until every handler has taken what was logged before.

        Returns:
            Whether all of them have within the time.
        """
        deadline = monotonic() + timeout_seconds
        arrived = [delivery.worker.drain(deadline - monotonic()) for delivery in self.active]
        return all(arrived)

    def close(self, timeout_seconds: float = END_SECONDS) -> None:
        """End all deliveries: what an exiting process does, giving its handlers a bounded time."""
        for companion in self._companions:
            companion.close()
        with self._lock:
            ended, self.active = self.active, ()
            self._leaving += ended
            self._route()
        end_all([delivery.worker for delivery in ended], seconds=timeout_seconds, reason="exit")

    # Rules -----------------------------------------------------------------------------------------------

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
        return self._recording and bool(self._kinds or self.active)

    def reading(self) -> EventsReading:
        """Tell all; the same object as long as nothing has changed. By one thread at a time."""
        with self._lock:
            for delivery in [each for each in self._leaving if each.worker.over]:
                self._leaving.remove(delivery)
                self._add_up(delivery, self._delivered, self._dropped)
            delivered, dropped = dict(self._delivered), dict(self._dropped)
            for delivery in (*self._leaving, *self.active):
                self._add_up(delivery, delivered, dropped)
            counts, last, suppressed = self._counts()
        reading = EventsReading(counts, last, suppressed, delivered, dropped)
        if reading != self._published:
            self._published = reading
        return self._published

    def reset(self) -> None:
        """Count from zero: what was recorded so far belongs to another identity."""
        with self._lock:
            self._begin()

    def renew(self) -> None:
        """Ask anew who this process is."""
        self._who = None

    def after_fork(self) -> None:
        """In a forked child: forget what the parent recorded and what waits for its handlers."""
        for delivery in self.active:
            delivery.after_fork()
        self._begin()
        for companion in self._companions:
            companion.after_fork()

    # What faces call, which have checked their events -----------------------------------------------------

    def record(
        self,
        kind: Kind,
        type: str,
        message: str | None,
        data: Mapping[str, Datum],
        happened: float | None,
        origin: object,
    ) -> None:
        """Count an event and hand it on."""
        if not kind.enabled:
            return
        now = self._clock()
        number = kind.count()
        kind.occurrences.last = when = now if happened is None else happened
        raw = (type, message, kind.severity, data, when, now, monotonic_ns(), None, ())
        self.hand_on(kind, number, raw, origin)

    def tell(self, kind: Kind, raw: RawEvent, origin: object = None) -> None:
        """Hand on an event that was counted and that `kind.admits`."""
        event = self._event(raw)
        self.latest.append(event)
        for delivery in self._routes(kind, raw):
            delivery.put(event, origin)

    def hand_on(
        self,
        kind: Kind,
        number: int,
        late: RawEvent | LateEvent,
        origin: object = None,
        payload: Callable[[], Mapping[str, object]] | None = None,
    ) -> None:
        """Hand on an event that was counted.

        Args:
            kind: Of the event.
            number: What `kind.count` gave.
            late: What the event is made of, if anybody wants it.
            origin: The object that was logged, for handlers of a face.
            payload: Gives further data.
        """
        event: Event | None = None
        admitted: bool | None = None
        for delivery in self._routes(kind, late):
            if kind.limited or not delivery.direct:
                if admitted is None:
                    admitted = kind.admits(number)
                if not admitted:
                    continue
            if delivery.direct and delivery.own is not None and isinstance(origin, delivery.own):
                delivery.take_at_once(origin)
                continue
            if event is None:
                raw = late if isinstance(late, tuple) else late.raw()
                event = self._event(raw if payload is None else self._with_payload(raw, payload))
            delivery.put(event, origin if isinstance(late, tuple) else late.logged(origin))
        self.latest.append(late if event is None else event)

    # Inside ----------------------------------------------------------------------------------------------

    def _route(self, kinds: Iterable[Kind] | None = None) -> None:
        """Decide for kinds whom they are told to."""
        for kind in self._every() if kinds is None else kinds:
            if kind.type is None:
                kind.routes = None if self.active else ()
            else:
                wants = [each for each in self.active if each.wants(kind.type, kind.severity)]
                kind.routes = tuple(wants)
            kind.quiet = kind.enabled and kind.routes == ()

    def _routes(self, kind: Kind, late: RawEvent | LateEvent) -> tuple[Delivery, ...]:
        if kind.routes is not None:
            return kind.routes
        type_ = (late if isinstance(late, tuple) else late.raw())[0]
        return tuple([each for each in self.active if each.wants(type_, kind.severity)])

    def _with_payload(self, raw: RawEvent, payload: Callable[[], Mapping[str, object]]) -> RawEvent:
        try:
            more = convert_data(payload(), lambda name: self._refuse(raw[0], f"the datum {name!r}"))
        except Exception as error:  # noqa: BLE001  # the user's code, which must not fail for being watched
            self._refuse(raw[0], f"its payload, {shown(error)}")
            return raw
        return (*raw[:3], {**more, **raw[3]}, *raw[4:])

    def _event(self, raw: RawEvent) -> Event:
        who = self._who
        if who is None:
            who = self._who = self.identify()
        try:
            identity = self._ids.popleft()
        except IndexError:
            digits = os.urandom(8 * _IDS_AT_ONCE).hex()
            self._ids.extend([digits[start : start + 16] for start in range(16, len(digits), 16)])
            identity = digits[:16]
        return Event(*raw[:7], identity, *raw[7:], who[1], who[0])

    def _add_up(
        self, delivery: Delivery, delivered: dict[str, int], dropped: dict[Pair, int], *, sign: int = 1
    ) -> None:
        name = delivery.name
        if name not in self._names:
            name = OTHER if len(self._names) >= MOST_NAMES else name
            self._names.add(name)
        delivered[name] = delivered.get(name, 0) + sign * delivery.delivered
        for reason, lost in delivery.worker.lost().items():
            dropped[name, reason] = dropped.get((name, reason), 0) + sign * lost


EVENTS = EventLog()
"""The events of this process."""

log = EVENTS.log
enabled = EVENTS.enabled
register = EVENTS.register
unregister = EVENTS.unregister
limit = EVENTS.limit
count_types = EVENTS.count_types
recent = EVENTS.recent
