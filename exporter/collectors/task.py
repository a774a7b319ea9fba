"""Task and call: when a collector is due, when its pass is late, when its block is stale.

Used in the sidecar by the scheduler, under its lock; no threads and no clock here. All times are those of the
scheduler's monotonic clock, in seconds.
"""

from __future__ import annotations

import math

from exporter.collectors.family import AnyCollector
from exporter.collectors.standing import Standing

EASE_SECONDS = 5.0
"""How far the passes of a collector that eases may be apart while nobody looks: as far as most others' are."""


class Task:
    """A collector with its schedule.

    Attributes:
        collector: What is called.
        standing: What is known about it, its interval and its deadline.
        due: When the next regular pass begins.
        soon: Whether to collect as soon as possible, whatever `due` says.
        published_at: When its present block was published; None while there is none.
        stale_at: When that block must go; infinity while there is none.
        removed: Whether its results are no longer wanted.
    """

    __slots__ = ("_eases", "collector", "due", "published_at", "removed", "soon", "stale_at", "standing")

    def __init__(self, collector: AnyCollector, standing: Standing, *, eases: bool) -> None:
        self.collector = collector
        self.standing = standing
        self._eases = eases
        self.due = 0.0
        self.soon = True
        self.published_at: float | None = None
        self.stale_at = math.inf
        self.removed = False

    def publish(self, now: float) -> None:
        """Note a new block, which stays for `max(3 intervals, interval + deadline)` as they are now."""
        interval, deadline = self.standing.interval_seconds, self.standing.deadline_seconds
        if self._eases:
            interval = max(interval, EASE_SECONDS)
        self.published_at = now
        self.stale_at = now + max(3 * interval, interval + deadline)

    def withdraw(self) -> None:
        """Note that there is no block any more."""
        self.published_at = None
        self.stale_at = math.inf

    def next_due(self, origin: float, now: float, *, unwatched_seconds: float = 0.0) -> float:
        """Find the next moment of the interval's grid, so that all collectors of one interval wake together.

        After a pass out of turn the next may come early, but not so early that a rate over it is noise. One that
        eases leaves out what would be replaced before anybody looks.
        """
        interval = self.standing.interval_seconds
        due = origin + (math.floor((now - origin) / interval) + 1) * interval
        if due - now < interval / 2:
            due += interval
        if self._eases:
            spare = now + min(unwatched_seconds, EASE_SECONDS) - due
            if spare >= interval:
                due += math.floor(spare / interval) * interval
        return due


class Call:
    """One call of one collector; it exists from being queued until the collector has returned.

    Attributes:
        task: Whose.
        queued_at: When it was decided on.
        deadline_at: When the verdict becomes 0; moved by a standstill of the process.
        expired: The deadline passed: the verdict is known, the result no longer wanted.
        delivering: It returned in time; the deadline does not cover the publishing.
    """

    __slots__ = ("deadline_at", "delivering", "expired", "queued_at", "task")

    def __init__(self, task: Task, queued_at: float) -> None:
        self.task = task
        self.queued_at = queued_at
        self.deadline_at = queued_at + task.standing.deadline_seconds
        self.expired = False
        self.delivering = False

    @property
    def expires_at(self) -> float:
        """When the verdict becomes 0; infinity once that cannot happen any more."""
        return math.inf if self.expired or self.delivering else self.deadline_at


def check_times(name: str, interval_seconds: float, deadline_seconds: float) -> None:
    """Refuse times that no schedule can be made of.

    Raises:
        ValueError: One is not positive and finite.
    """
    for what, seconds in (("interval", interval_seconds), ("deadline", deadline_seconds)):
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"{what} of collector {name} must be above 0 seconds, not {seconds!r}")
