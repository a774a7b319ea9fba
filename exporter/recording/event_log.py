"""The event log of one process: counts events without a lock and delivers them to handlers on threads of their own.

Runs on any thread of the job. `log` and `enabled` never raise and never wait; `register` and `limit` check their arguments.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from math import inf
from time import monotonic, monotonic_ns, time
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypeVar

from exporter.recording.conversion import safe_repr, to_message
from exporter.recording.event_kinds import MAX_LABEL_CHARACTERS, Kind, KindTable, Pair
from exporter.recording.event_values import (
    MAX_TYPE_CHARACTERS,
    Event,
    RawEvent,
    check_parents,
    check_severity,
    check_timestamp,
    convert_data,
    find_severity,
)
from exporter.recording.handle import ANSWER_SECONDS, Adapter, Handle, name_of
from exporter.recording.identity import Process, clean_text
from exporter.recording.values import EventsReading, ProcessIdentity
from exporter.recording.worker import end_all

RECENT_EVENTS = 256
"""Number of events that `recent` returns."""
MAX_QUEUED_EVENTS = 1_000_000
END_SECONDS = 2.0
"""Longest wait of an unregistration for the queued events of a handler."""
_UNNAMED = "unnamed"
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, partial)
"""Classes of a payload that is called; an object that is merely callable, as a model is, is passed on."""
Found = TypeVar("Found")
_class_of = type
"""`isinstance` would call the object's own `__class__`."""


class EventLog(KindTable):
    """Events of a process.

    Args:
        identify: Returns the identity that events carry; None for one from the environment.
        current_span: Returns the id of the calling thread's innermost span; None if there are no spans.
        wake: Called when there is something to record.
    """

    def __init__(
        self,
        *,
        identify: Callable[[], ProcessIdentity] | None = None,
        current_span: Callable[[], str | None] | None = None,
        wake: Callable[[], None] | None = None,
    ) -> None:
        self._identify = identify or Process().identity
        self._current_span = current_span
        self.active: tuple[Handle, ...] = ()
        self.latest: deque[Any] = deque(maxlen=RECENT_EVENTS)
        self._deadline = inf  # after which no thread waits for a handler; finite once the process exits
        super().__init__(wake)

    def _begin_counts(self) -> None:
        self._who: ProcessIdentity | None = None
        self.latest.clear()
        self._leaving: list[Handle] = []  # unregistered, perhaps still running
        self._delivered: dict[str, int] = {}
        self._dropped: dict[Pair, int] = {}
        for each in self.active:
            self._add_up(each, self._delivered, self._dropped, sign=-1)
        super()._begin_counts()

    # Logging ---------------------------------------------------------------------------

    def log(
        self,
        type: str,
        message: str | None = None,
        *,
        severity: str = "info",
        timestamp: float | None = None,
        span_id: str | None = None,
        parent_ids: Iterable[str] = (),
        payload: object = None,
        **data: object,
    ) -> None:
        """Log an event. Never waits and never raises.

        Arguments are converted; an argument that cannot be converted is omitted, counted under the reason `payload` and
        logged once.

        Args:
            type: The type of the event, `checkpoint.saved`; a label value, of which there should be few.
            message: A text for people.
            severity: A name of `Severity`, a word of another library (`warn`, `fatal`) or a level of `logging`.
            timestamp: Unix time in seconds or a datetime; None for now.
            span_id: The span of the event; None for the thread's innermost open span.
            parent_ids: The ids of the events that caused the event.
            payload: A function that returns further data, called only if a handler gets this event; or an object, such as
                the model, which handlers of this process find in `Event.payload` and which is never written anywhere.
            data: Values for programs: str, float, int or bool. Numbers of other libraries become plain numbers, lists, paths
                and other objects short text; None is omitted.
        """
        try:
            try:
                kind = self._kinds[type, severity]
            except (KeyError, TypeError):
                if not isinstance(type, str) or not type:
                    type = to_message(type, MAX_TYPE_CHARACTERS) or _UNNAMED  # noqa: A001  # the parameter, made text
                known = find_severity(severity)
                if known is None:
                    self._refuse(type, f"the severity {safe_repr(severity)}")
                kind = self.kind(type, known or "info")
            if not kind.enabled:
                return
            plain = convert_data(data, lambda name: self._refuse(type, f"the value {name!r}"))
            now = time()
            happened = now if timestamp is None else self._checked(type, check_timestamp, timestamp, now)
            parents: tuple[str, ...] = ()
            if parent_ids != ():
                parents = self._checked(type, check_parents, parent_ids, parents)
            raw = RawEvent(
                type,
                None if message is None else to_message(message),
                kind.severity,
                plain,
                happened,
                now,
                monotonic_ns(),
                self.span_id() if span_id is None else to_message(span_id, MAX_TYPE_CHARACTERS),
                parents,
            )
            self.record(kind, raw, happened, payload=payload)
        except Exception as error:  # noqa: BLE001  # an object of the job that raises wherever it is touched
            self._refuse(type if _class_of(type) is str else _UNNAMED, safe_repr(error))

    def _checked(self, type: str, check: Callable[[Any], Found], value: object, default: Found) -> Found:
        try:
            return check(value)
        except (TypeError, ValueError) as error:
            self._refuse(type, str(error))
            return default

    def recent(self) -> list[Event]:
        """Return the latest events, at most `RECENT_EVENTS`, the oldest first."""
        with self._lock:
            kept = self.latest
            for position in range(len(kept)):
                entry = kept[position]
                if not isinstance(entry, Event):
                    kept[position] = self._event(entry if isinstance(entry, RawEvent) else entry.raw())
            return [entry for entry in list(kept) if isinstance(entry, Event)]

    # Handlers --------------------------------------------------------------------------------------------

    def register(
        self,
        handler: Any,
        *,
        types: Iterable[str] | str | None = None,
        severity: str | None = None,
        queue: int = 1000,
        name: str | None = None,
    ) -> Handle:
        """Deliver events to a handler, on a thread of its own, in the order in which they were logged.

        A handler that is registered twice gets each event twice. Exceptions of the handler and events that find *queue*
        events waiting are counted. Raises TypeError or ValueError for an invalid argument.

        Args:
            handler: A callable that takes an `Event`, or an object with `handle(event)`. The bound `append` or
                `put` of a list, deque or SimpleQueue is called at once, on the thread that logs.
            types: Shell patterns of the types to deliver, one or several; None for all.
            severity: The lowest severity to deliver; None for all.
            queue: Events that may wait for the handler, 1 to 1,000,000.
            name: The label value of the handler's counts; None for the handler's own name.
        """
        return self.register_adapted(handler, None, types=types, severity=severity, queue=queue, name=name)

    def register_adapted(
        self,
        handler: Any,
        adapter: Adapter | None,
        *,
        types: Iterable[str] | str | None = None,
        severity: str | None = None,
        queue: int = 1000,
        name: str | None = None,
    ) -> Handle:
        """Register a handler of a compatibility module, which takes the objects that *adapter* makes of events."""
        is_class = isinstance(handler, type) and hasattr(handler, "handle")  # probably an instance was meant
        if is_class or not (callable(handler) or callable(getattr(handler, "handle", None))):
            raise TypeError(
                f"a handler must be a callable that takes an event, or an object with handle(event), not {handler!r}"
            )
        if not 1 <= queue <= MAX_QUEUED_EVENTS:
            raise ValueError(f"queue must be 1 to {MAX_QUEUED_EVENTS} events, not {queue}")
        patterns = None if types is None else (types,) if isinstance(types, str) else tuple(types)
        if not all(isinstance(text, str) for text in (name or "", *(patterns or ()))):
            raise TypeError(
                f"name must be str, and types patterns: 'checkpoint.*', not {name!r}, {patterns!r}"
            )
        handle = Handle(
            handler,
            end=self.unregister,
            name=clean_text(name)[:MAX_LABEL_CHARACTERS] if name else name_of(handler),
            types=patterns,
            severity="debug" if severity is None else check_severity(severity),
            queue=queue,
            adapter=adapter,
        )
        if self.recording:
            with self._lock:
                self._deliver_to((*self.active, handle))
            if not handle.direct:
                handle.start()
        if self._wake is not None:
            self._wake()
        return handle

    def unregister(self, handle: Handle, *, timeout_seconds: float = END_SECONDS) -> None:
        """Stop delivering to a handler; wait for its queued events, and count the events that are left then."""
        if not isinstance(handle, Handle):
            raise TypeError(f"unregister takes what register gave, not {handle!r}")
        with self._lock:
            if handle not in self.active:
                return
            self._leaving.append(handle)
            self._deliver_to(tuple([each for each in self.active if each is not handle]))
        end_all([handle], seconds=timeout_seconds, reason="unregistered")

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until all queued events are delivered; returns False after the time."""
        deadline = monotonic() + timeout_seconds
        arrived = [each.drain(deadline - monotonic()) for each in self.active]
        return all(arrived)

    def close(self, timeout_seconds: float = END_SECONDS) -> None:
        """End all deliveries within a time: the exit of the process."""
        with self._lock:
            ended = self.active
            self._leaving += ended
            self._deliver_to(())
        end_all(ended, seconds=timeout_seconds, reason="exit")

    def limit_waits(self, deadline: float) -> None:
        """Let no thread wait for a handler beyond a time on the monotonic clock: the process exits."""
        self._deadline = deadline

    # Called by the recorder -------------------------------------------------------------------------------

    def in_use(self) -> bool:
        """Return True once an event was logged or a handler registered."""
        return self.recording and bool(self._kinds or self.active)

    def reading(self) -> EventsReading:
        """Return all counts; called by one thread at a time."""
        with self._lock:
            for each in [each for each in self._leaving if each.over]:
                self._leaving.remove(each)
                self._add_up(each, self._delivered, self._dropped)
            delivered, dropped = dict(self._delivered), dict(self._dropped)
            for each in (*self._leaving, *self.active):
                self._add_up(each, delivered, dropped)
            return EventsReading(*self._counts(), delivered, dropped)

    def reset(self) -> None:
        """Count from zero under another identity."""
        with self._lock:
            self._begin_counts()

    def renew(self) -> None:
        """Look up the identity again."""
        self._who = None

    def after_fork(self) -> None:
        """In a forked child: forget the parent's counts and queued events."""
        self._lock = threading.RLock()
        for each in self.active:
            each.after_fork()
        self._deadline = inf
        self._begin_counts()

    # Compatibility modules, which have checked their events -----------------------------------------------------

    def record(
        self,
        kind: Kind,
        late: Any,
        happened: float | datetime,
        origin: object = None,
        payload: object = None,
    ) -> None:
        """Count an event of an enabled kind and deliver it: made of `late` (or `late.raw()`), or the logged object `origin`."""
        kind.count()
        kind.counted.last = happened
        event: Event | None = None
        admitted: bool | None = None
        for each in kind.routes:
            if kind.limited or not (each.direct or each.awaited):
                if admitted is None:
                    admitted = kind.admits()
                if not admitted:
                    continue
            if each.direct and each.own is not None and isinstance(origin, each.own):
                each.take_at_once(origin)
                continue
            if event is None:
                raw: RawEvent = late if isinstance(late, RawEvent) else late.raw()
                if raw.span_id is None:  # a compatibility module knows no spans
                    raw.span_id = self.span_id()
                if payload is None:
                    event = self._event(raw)
                elif isinstance(payload, _FUNCTIONS):
                    self._add_payload(raw, payload)
                    event = self._event(raw)
                else:
                    event = self._event(raw).with_payload(payload)
            each.put(event, origin)
        if event is not None and payload is not None:
            event = event.replace()  # `recent` keeps no object of the job alive
        self.latest.append(late if event is None else event)

    def answer(self, kind: Kind) -> None:
        """Wait for the awaited handlers of a kind, each for a bounded time, to handle all events so far."""
        for each in kind.routes:
            if each.awaited:
                each.answer(min(ANSWER_SECONDS, max(self._deadline - monotonic(), 0.0)))

    # Inside ----------------------------------------------------------------------------------------------

    def _deliver_to(self, handles: tuple[Handle, ...]) -> None:
        for each in (*self.active, *handles):
            each.registered = each in handles
        self.active = handles
        for kind in list(self._kinds.values()):
            kind.route(handles)

    def _add_payload(self, raw: RawEvent, payload: Callable[[], Any]) -> None:
        try:
            more = convert_data(payload(), lambda name: self._refuse(raw.type, f"the value {name!r}"))
        except Exception as error:  # noqa: BLE001  # the user's code
            self._refuse(raw.type, f"its payload, {safe_repr(error)}")
            return
        raw.data = {**more, **raw.data}

    def span_id(self) -> str | None:
        """Return the id of the calling thread's innermost open span, or None."""
        return None if self._current_span is None else self._current_span()

    def _event(self, raw: RawEvent) -> Event:
        who = self._who
        if who is None:
            who = self._who = self._identify()
        return raw.event(os.urandom(8).hex(), who)

    def _add_up(
        self, handle: Handle, delivered: dict[str, int], dropped: dict[Pair, int], *, sign: int = 1
    ) -> None:
        name = handle.name
        delivered[name] = delivered.get(name, 0) + sign * handle.delivered
        for reason, lost in handle.lost().items():
            dropped[name, reason] = dropped.get((name, reason), 0) + sign * lost
