"""Deliveries: every handler of events that is registered, and what has become of those that were.

Used in the training process. Changed under the lock of the `EventLog` that owns it; the threads that log read the
tuple of those that are registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic

from exporter.recording.delivery import Delivery, end_all, name_of
from exporter.recording.event_values import check_severity
from exporter.recording.identity import clean_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from exporter.recording.delivery import Adapt, EventHandler

MOST_NAMES = 100
"""Names of handlers that are counted apart; the rest is `other`."""
MOST_QUEUED = 1_000_000
_LONGEST_NAME = 200
_OTHER = "other"


class Deliveries:
    """The handlers of a process.

    Attributes:
        active: Those that are told, in order of registration.
    """

    def __init__(self) -> None:
        self.active: tuple[Delivery, ...] = ()
        self.begin()

    def begin(self) -> None:
        """Count from zero; what those that are registered have counted is taken off."""
        self._names: set[str] = set()
        self._leaving: list[Delivery] = []  # no longer told, but perhaps still at it
        self._delivered: dict[str, int] = {}
        self._dropped: dict[tuple[str, str], int] = {}
        for delivery in self.active:
            self._add(delivery, self._delivered, self._dropped, sign=-1)

    def after_fork(self) -> None:
        """In a forked child: what waits, and the threads, are the parent's."""
        for delivery in self.active:
            delivery.after_fork()
        self.begin()

    def add(self, delivery: Delivery) -> None:
        """Tell one more."""
        self.active = (*self.active, delivery)

    def remove(self, delivery: Delivery) -> bool:
        """Tell one no more; says whether it was told. It has to be ended."""
        if delivery not in self.active:
            return False
        self.active = tuple([each for each in self.active if each is not delivery])
        self._leaving.append(delivery)
        return True

    def retire(self) -> None:
        """Keep the counts of those that have ended, and not the handlers."""
        for delivery in [each for each in self._leaving if each.over]:
            self._leaving.remove(delivery)
            self._add(delivery, self._delivered, self._dropped)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until all have taken what waits now; says whether they have within the time."""
        deadline = monotonic() + timeout_seconds
        arrived = [delivery.drain(deadline - monotonic()) for delivery in self.active]
        return all(arrived)

    def end(self) -> Callable[[float], None]:
        """Tell nobody any more; gives what waits for so many seconds until they have taken what waits."""
        ended, self.active = self.active, ()
        self._leaving += ended
        return lambda seconds: end_all(ended, seconds=seconds, reason="exit")

    def counts(self) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
        """Tell how many events each took, and how many it missed, by name."""
        self.retire()
        delivered, dropped = dict(self._delivered), dict(self._dropped)
        for delivery in (*self._leaving, *self.active):
            self._add(delivery, delivered, dropped)
        return delivered, dropped

    def _add(
        self,
        delivery: Delivery,
        delivered: dict[str, int],
        dropped: dict[tuple[str, str], int],
        *,
        sign: int = 1,
    ) -> None:
        name = delivery.name
        if name not in self._names:
            name = _OTHER if len(self._names) >= MOST_NAMES else name
            self._names.add(name)
        delivered[name] = delivered.get(name, 0) + sign * delivery.delivered
        for reason, lost in delivery.lost().items():
            dropped[name, reason] = dropped.get((name, reason), 0) + sign * lost


def make_delivery(
    handler: Callable[[Any], object] | EventHandler,
    types: Iterable[str] | str | None,
    severity: str | None,
    queue: int,
    name: str | None,
    adapt: Adapt | None,
    own: type | None,
) -> Delivery:
    """Check what `EventLog.register` is given.

    Raises:
        TypeError: The handler can take no events, or another argument is of the wrong type.
        ValueError: An argument is out of range.
    """
    a_class = isinstance(handler, type) and hasattr(handler, "handle")  # where an object of it is meant
    takes = callable(handler) or callable(getattr(handler, "handle", None))
    if handler is None or a_class or not takes:
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
    return Delivery(
        handler,
        name=clean_text(name)[:_LONGEST_NAME] if name else name_of(handler),
        types=patterns,
        severity="debug" if severity is None else check_severity(severity),
        queue=queue,
        adapt=adapt,
        own=own,
    )
