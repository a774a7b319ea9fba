"""Event log of a process: counts events without a lock, and delivers them to handlers on worker threads.

Runs on any thread of the job. `log` and `enabled` never raise and never wait for a handler. `register` and `limit` raise for invalid
arguments.
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

from exporter.recording.conversion import safe_repr, to_str
from exporter.recording.event_kinds import MAX_LABEL_CHARACTERS, CountKey, Kind, KindTable
from exporter.recording.event_values import (
    MAX_EVENT_NAME_CHARACTERS,
    UNNAMED_TYPE,
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
from exporter.recording.signal_safety import is_from_signal_handler
from exporter.recording.values import EventsReading, ProcessIdentity
from exporter.recording.worker import end_all

MAX_RECENT_EVENTS = 256
"""Maximum number of events that `recent` returns."""
MAX_QUEUED_EVENTS = 1_000_000
"""Maximum number of events that wait for a handler, as an argument of `register`."""
END_SECONDS = 2.0
"""Maximum time for which `unregister` and `close` wait for queued events."""
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, partial)
"""Classes of payloads that are called. A callable object of another class, such as a model, is passed to the handlers."""
CheckedT = TypeVar("CheckedT")
_class_of = type
"""The built-in `type`, which a parameter `type` hides."""


class EventLog(KindTable):
    """Events of a process, and their handlers.

    Args:
        identify: Returns the identity of the process for the events; None for the identity from the environment.
        current_span: Returns the id of the calling thread's innermost open span; None if spans are not recorded.
        wake: Called after the first event of a kind and after a registration.
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
        self.handlers: tuple[Handle, ...] = ()
        self.latest_entries: deque[Any] = deque(maxlen=MAX_RECENT_EVENTS)
        self._deadline = inf  # monotonic time after which no thread waits for a handler; set at exit
        super().__init__(wake)

    def _begin_counts(self) -> None:
        """Count from zero, discard the latest events, and forget the identity."""
        self._identity: ProcessIdentity | None = None
        self.latest_entries.clear()
        self._unregistered: list[Handle] = []  # unregistered handlers whose threads may still run
        # Counts of handlers that were removed. A reset subtracts the previous counts of the registered handlers.
        self._delivered_counts: dict[str, int] = {}
        self._dropped_counts: dict[CountKey, int] = {}
        for handle in self.handlers:
            self._add_counts(handle, self._delivered_counts, self._dropped_counts, sign=-1)
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
        """Log an event. Never raises, and never waits for a handler.

        Arguments are converted. An argument that cannot be converted is omitted, counted under the reason `payload` and logged
        once per type.

        Args:
            type: Type of the event, such as `checkpoint.saved`. It becomes a label value: use few types.
            message: Text for humans.
            severity: Name of a `Severity`, an alias of other libraries (`warn`, `fatal`), or a level of `logging`.
            timestamp: Unix time in seconds, or a datetime; None for now.
            span_id: Id of the event's span; None for the innermost open span of the thread.
            parent_ids: Ids of the events that caused the event.
            payload: Function that returns further data, which is called only if a handler receives the event; or an object, such
                as the model, which handlers of this process receive as `Event.payload` and which is not written to files.
            data: Values of type str, float, int or bool. Numbers of other libraries become plain numbers; lists, paths
                and other objects become short texts; None is omitted.
        """
        try:
            try:
                kind = self._kinds[type, severity]
            except (KeyError, TypeError):
                if not isinstance(type, str) or not type:
                    type = to_str(type, MAX_EVENT_NAME_CHARACTERS) or UNNAMED_TYPE  # noqa: A001  # replaces the parameter
                known_severity = find_severity(severity)
                if known_severity is None:
                    self._refuse(type, f"the severity {safe_repr(severity)}")
                kind = self.kind(type, known_severity or "info")
                type = kind.type  # noqa: A001  # replaces the parameter; cut to the maximum length
            if not kind.enabled:
                return
            plain_data = convert_data(data, lambda name: self._refuse(type, f"the value {name!r}"))
            now = time()
            event_time = now if timestamp is None else self._checked(type, check_timestamp, timestamp, now)
            parents: tuple[str, ...] = ()
            if parent_ids != ():
                parents = self._checked(type, check_parents, parent_ids, parents)
            raw = RawEvent(
                type,
                None if message is None else to_str(message),
                kind.severity,
                plain_data,
                event_time,
                now,
                monotonic_ns(),
                self.span_id() if span_id is None else to_str(span_id, MAX_EVENT_NAME_CHARACTERS),
                parents,
            )
            self.record(kind, raw, event_time, payload=payload)
        except Exception as error:  # an argument may raise at any access
            if is_from_signal_handler(error):
                raise
            self._refuse(type if _class_of(type) is str else UNNAMED_TYPE, safe_repr(error))

    def _checked(
        self, type: str, check: Callable[[Any], CheckedT], value: object, default: CheckedT
    ) -> CheckedT:
        """Return the checked value, or the default for a value that *check* refuses or that raises when it is read."""
        try:
            return check(value)
        except (TypeError, ValueError) as error:
            if is_from_signal_handler(error):
                raise
            self._refuse(type, str(error))
        except Exception as error:  # an iterator or a property of the job
            if is_from_signal_handler(error):
                raise
            self._refuse(type, safe_repr(error))
        return default

    def recent(self) -> list[Event]:
        """Return the latest events, at most `MAX_RECENT_EVENTS`, oldest first."""
        events = []
        with self._lock:
            latest, shift = self.latest_entries, 0
            for index, entry in enumerate(list(latest)):
                if isinstance(entry, Event):
                    events.append(entry)
                    continue
                event = self._event(entry if isinstance(entry, RawEvent) else entry.raw())
                events.append(event)
                # Stored, so that the event keeps its id. Other threads append meanwhile, which shifts the entries of a full deque.
                while shift <= index and latest[index - shift] is not entry:
                    shift += 1
                if shift <= index:
                    latest[index - shift] = event
        return events

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
        """Deliver later events to a handler in order, on a thread of the handler.

        A handler that is registered twice receives each event twice. Exceptions of the handler are counted, and so are events that
        are dropped because *queue* events are waiting. Raises TypeError or ValueError for an invalid argument.

        Args:
            handler: Callable that takes an `Event`, or an object with `handle(event)`. A bound `append` or `put` of a list,
                deque or SimpleQueue is called on the logging thread.
            types: Shell pattern or patterns of the types to deliver; None for all.
            severity: Lowest severity to deliver; None for all.
            queue: Maximum number of events that wait for the handler, 1 to 1,000,000.
            name: Label value of the handler's counts; None for the name of the function or class.
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
        """Register a handler of a compatibility module, which receives the objects that *adapter* creates from events."""
        # A class with `handle`: the caller probably forgot to create an instance.
        is_class = isinstance(handler, type) and hasattr(handler, "handle")
        if is_class or not (callable(handler) or callable(getattr(handler, "handle", None))):
            raise TypeError(
                f"a handler must be a callable that takes an event, or an object with handle(event), not {handler!r}"
            )
        if not 1 <= queue <= MAX_QUEUED_EVENTS:
            raise ValueError(f"queue must be 1 to {MAX_QUEUED_EVENTS} events, not {queue}")
        if isinstance(types, str):
            types = (types,)
        patterns = None if types is None else tuple(types)
        if not all(isinstance(text, str) for text in (name or "", *(patterns or ()))):
            raise TypeError(
                f"name must be a str, and types patterns such as 'checkpoint.*', not {name!r} and {patterns!r}"
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
        if self.is_recording:
            with self._lock:
                self._deliver_to((*self.handlers, handle))
            if not handle.is_direct:
                handle.start()
        if self._wake is not None:
            self._wake()
        return handle

    def unregister(self, handle: Handle, *, timeout_seconds: float = END_SECONDS) -> None:
        """Stop delivering to a handler, wait for its queued events, and count the undelivered events as dropped."""
        if not isinstance(handle, Handle):
            raise TypeError(f"unregister takes a Handle returned by register, not {handle!r}")
        with self._lock:
            if handle not in self.handlers:
                return
            self._unregistered.append(handle)
            self._deliver_to(tuple([registered for registered in self.handlers if registered is not handle]))
        end_all([handle], seconds=timeout_seconds, reason="unregistered")

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until all queued events are delivered. Return False after the timeout."""
        deadline = monotonic() + timeout_seconds
        results = [handle.drain(deadline - monotonic()) for handle in self.handlers]
        return all(results)

    def close(self, timeout_seconds: float = END_SECONDS) -> None:
        """End all deliveries within a timeout, at the exit of the process."""
        with self._lock:
            handles = self.handlers
            self._unregistered += handles
            self._deliver_to(())
        end_all(handles, seconds=timeout_seconds, reason="exit")

    def limit_waits(self, deadline: float) -> None:
        """Set the monotonic time after which no thread waits for a handler, at the exit of the process."""
        self._deadline = deadline

    # Called by the recorder -------------------------------------------------------------------------------

    def in_use(self) -> bool:
        """Return True if an event was logged, or if a handler is registered."""
        return self.is_recording and bool(self._kinds or self.handlers)

    def reading(self) -> EventsReading:
        """Return the counts of the events and of the handlers. Must not be called concurrently."""
        with self._lock:
            for handle in [handle for handle in self._unregistered if handle.has_final_counts]:
                self._unregistered.remove(handle)
                self._add_counts(handle, self._delivered_counts, self._dropped_counts)
            delivered, dropped = dict(self._delivered_counts), dict(self._dropped_counts)
            for handle in (*self._unregistered, *self.handlers):
                self._add_counts(handle, delivered, dropped)
            return self._reading(delivered, dropped)

    def reset(self) -> None:
        """Restart all counts at zero, for a new identity."""
        with self._lock:
            self._begin_counts()

    def forget_identity(self) -> None:
        """Let the next event determine the identity of the process again."""
        self._identity = None

    def after_fork(self) -> None:
        """Reset the counts and the queues in a forked child."""
        self._lock = threading.RLock()
        for handle in self.handlers:
            handle.after_fork()
        self._deadline = inf
        self._begin_counts()

    # Called by compatibility modules, which validate their events -----------------------------------------------

    def record(
        self,
        kind: Kind,
        source: Any,
        event_time: float | datetime,
        origin: object = None,
        payload: object = None,
    ) -> None:
        """Count and deliver an event of an enabled kind.

        Args:
            kind: Kind of the event.
            source: The event as a `RawEvent`, or an object whose `raw()` returns it.
            event_time: Time of the event.
            origin: Logged object of a compatibility module.
            payload: See `log`.
        """
        kind.count()
        kind.counting_kind.last_time = event_time
        event: Event | None = None
        is_admitted: bool | None = None
        for handle in kind.handlers:
            if kind.is_limited or not (handle.is_direct or handle.is_awaited):
                if is_admitted is None:
                    is_admitted = kind.admits()
                if not is_admitted:
                    continue
            if (
                handle.is_direct
                and handle.native_class is not None
                and isinstance(origin, handle.native_class)
            ):
                handle.call_directly(origin)
                continue
            if event is None:
                raw: RawEvent = source if isinstance(source, RawEvent) else source.raw()
                if raw.span_id is None:  # some compatibility modules set no span
                    raw.span_id = self.span_id()
                if payload is None:
                    event = self._event(raw)
                elif isinstance(payload, _FUNCTIONS):
                    self._add_payload(raw, payload)
                    event = self._event(raw)
                else:
                    event = self._event(raw).with_payload(payload)
            handle.put(event, origin)
        if event is not None and payload is not None:
            event = event.replace()  # `recent` must not keep the payload alive
        self.latest_entries.append(source if event is None else event)

    def await_handlers(self, kind: Kind) -> None:
        """Wait until the awaited handlers of a kind have handled all events so far, at most `ANSWER_SECONDS` for each handler."""
        for handle in kind.handlers:
            if handle.is_awaited:
                handle.await_handling(min(ANSWER_SECONDS, max(self._deadline - monotonic(), 0.0)))

    # Implementation ----------------------------------------------------------------------------------------------

    def _deliver_to(self, handles: tuple[Handle, ...]) -> None:
        """Replace the registered handlers, and select the handlers of each kind. The caller holds the lock."""
        for handle in (*self.handlers, *handles):
            handle.is_registered = handle in handles
        self.handlers = handles
        for kind in list(self._kinds.values()):
            kind.route(handles)

    def _add_payload(self, raw: RawEvent, payload: Callable[[], Any]) -> None:
        """Add the data that *payload* returns to an event. Arguments of `log` take precedence. Never raises."""
        try:
            payload_data = convert_data(payload(), lambda name: self._refuse(raw.type, f"the value {name!r}"))
        except Exception as error:  # the function belongs to the job
            if is_from_signal_handler(error):
                raise
            self._refuse(raw.type, f"its payload, {safe_repr(error)}")
            return
        raw.data = {**payload_data, **raw.data}

    def span_id(self) -> str | None:
        """Return the id of the calling thread's innermost open span, or None."""
        return None if self._current_span is None else self._current_span()

    def _event(self, raw: RawEvent) -> Event:
        """Convert a logged event, with a new id and the identity of the process."""
        identity = self._identity
        if identity is None:
            identity = self._identity = self._identify()
        return raw.to_event(os.urandom(8).hex(), identity)

    def _add_counts(
        self, handle: Handle, delivered: dict[str, int], dropped: dict[CountKey, int], *, sign: int = 1
    ) -> None:
        """Add the counts of a handler, multiplied by *sign*, to counts by handler, and by handler and reason."""
        name = handle.name
        delivered[name] = delivered.get(name, 0) + sign * handle.delivered
        for reason, count in handle.lost_items().items():
            dropped[name, reason] = dropped.get((name, reason), 0) + sign * count
