"""Handle: what a registered handler of events is known by.

Used in the training process, by any thread.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from exporter.recording.delivery import Delivery
    from exporter.recording.event_log import EventLog


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
        return self._log.has(self.delivery)

    def unregister(self) -> None:
        """Tell it no more; see `EventLog.unregister`."""
        self._log.unregister(self)

    def put(self, item: object) -> None:
        """Hand it something else than an event, for faces; nothing once it is unregistered."""
        if self.registered:
            self.delivery.put(item)

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until it has taken what waits now; says whether it has within the time."""
        return self.delivery.drain(timeout_seconds)

    def __repr__(self) -> str:
        return f"<Handle {self.name!r}: {'registered' if self.registered else 'unregistered'}>"
