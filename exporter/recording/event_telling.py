"""Telling: an event that was counted is made, kept among the latest, and given to those who want it.

Used in the training process, on the threads that log; without a lock. Most events are never made: what they would be
made of is kept, and thrown away when 256 others have come.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping

from exporter.recording.deliveries import Deliveries
from exporter.recording.event_kinds import Kind
from exporter.recording.event_values import Event, check_data
from exporter.recording.notices import tell_once

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from exporter.recording.delivery import Delivery
    from exporter.recording.event_values import Datum

    class LateEvent(Protocol):
        """An event of a face that was not made into an `Event` yet."""

        def raw(self) -> RawEvent:
            """Give what an `Event` is made of."""
            ...

        def logged(self, origin: object) -> object:
            """Give the object that was logged together with what it was then, for `adapt`."""
            ...


RECENT_EVENTS = 256
"""Latest events that are kept for `recent`."""
_IDS_AT_ONCE = 512

RawEvent = tuple[
    str, "str | None", str, "Mapping[str, Datum]", float, float, int, "str | None", tuple[str, ...]
]
"""Type, message, severity, data, timestamp, logged_at, monotonic_ns, span_id, parent_ids: an Event is made of them
when somebody looks, and is given its id then."""


class Telling:
    """Who is told of the events of one process, and of what.

    Attributes:
        deliveries: The handlers.
        identify: Gives the run and the rank of this process.
        latest: What `recent` makes events of; whoever counts an event adds it here.
    """

    def __init__(self) -> None:
        self.deliveries = Deliveries()
        self.identify: Callable[[], tuple[str, int | None]] = lambda: ("default", 0)
        self.latest: deque[RawEvent | LateEvent | Event] = deque(maxlen=RECENT_EVENTS)
        self.begin()

    def begin(self) -> None:
        """Set up what belongs to one process and identity alone."""
        self._ids: deque[str] = deque()
        self._who: tuple[str, int | None] | None = None
        self.latest.clear()

    def renew(self) -> None:
        """Ask anew who this process is."""
        self._who = None

    def prepare(self, kind: Kind) -> None:
        """Decide for a kind whom it is told to."""
        active = self.deliveries.active
        if kind.type is None:
            kind.routes = None if active else ()
        else:
            kind.routes = tuple([each for each in active if each.wants(kind.type, kind.severity)])
        kind.quiet = kind.enabled and kind.routes == ()
        kind.note = self.latest.append

    def recent(self) -> list[Event]:
        """Give the latest events, the oldest first; by one thread at a time."""
        kept = self.latest
        for position in range(len(kept)):
            entry = kept[position]
            if not isinstance(entry, Event):
                kept[position] = self._event(entry if isinstance(entry, tuple) else entry.raw())
        return [entry for entry in list(kept) if isinstance(entry, Event)]

    def tell(self, kind: Kind, raw: RawEvent, origin: object = None) -> None:
        """Hand on an event that was counted and that `kind.admits`; what faces use that count themselves."""
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
        payload: Callable[[], Mapping[str, Datum]] | None = None,
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
        routes = kind.routes
        for delivery in self._routes(kind, late) if routes is None else routes:
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
                event = self._event(raw if payload is None else _with_payload(kind, raw, payload))
            delivery.put(event, origin if isinstance(late, tuple) else late.logged(origin))
        self.latest.append(late if event is None else event)

    def _routes(self, kind: Kind, late: RawEvent | LateEvent) -> tuple[Delivery, ...]:
        if kind.routes is not None:
            return kind.routes
        type_ = (late if isinstance(late, tuple) else late.raw())[0]
        return tuple([each for each in self.deliveries.active if each.wants(type_, kind.severity)])

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


def _with_payload(kind: Kind, raw: RawEvent, payload: Callable[[], Mapping[str, Datum]]) -> RawEvent:
    try:
        more = check_data(payload())
    except Exception as error:  # noqa: BLE001  # the user's code, which must not fail for being watched
        kind.suppressed["payload"].bump()
        tell_once(f"payload {raw[0]}", f"the payload of the event {raw[0]!r} could not be made: {error!r}")
        return raw
    return (*raw[:3], {**more, **raw[3]}, *raw[4:])
