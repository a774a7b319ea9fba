"""Schedule, problems and counters of a collector."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from exporter.collectors.status import CollectorStatus, CollectorTotals
from exporter.families import AnyCollector

_log = logging.getLogger("exporter.collectors")

PassProblems = Sequence[tuple[str, str]]
"""Pairs (reason, message), one for each failed part of a pass."""


@dataclass(slots=True, eq=False)
class CollectorTask:
    """Schedule and counters of a collector name, which remain after the collector is removed.

    Guarded by the scheduler's lock.
    """

    name: str
    lane: str = ""  # name of the lane; "" before the first schedule
    collector: AnyCollector | None = None  # None if no collector of this name is scheduled
    interval_seconds: float = 0.0
    deadline_seconds: float = 0.0
    totals: CollectorTotals = field(default_factory=CollectorTotals)
    delivery: threading.Lock = field(default_factory=threading.Lock)  # held while publishing and withdrawing
    runner: threading.Thread | None = None  # thread of the running or last pass
    due: float = -math.inf  # monotonic time of the next pass; -inf for now
    running_since: float | None = None  # monotonic start of the running pass
    is_expired: bool = False  # the running or last pass has exceeded the deadline
    published_at: float | None = None  # monotonic time of the last published block; None without a block
    published_by: AnyCollector | None = None  # collector of that block
    problems: PassProblems | None = None  # of the last pass; None before the end of the first
    duration_seconds: float | None = None  # of the last pass that has returned
    unsupported: tuple[str, ...] = ()  # missing sources of this machine, as of the last published pass
    logged_sources: set[str] = field(default_factory=set)  # unsupported sources that were logged

    def schedule(self, collector: AnyCollector, *, lane: str, interval: float, deadline: float) -> None:
        """Assign a collector to this name, due now. The counters continue. A previous pass that hangs is a problem of the collector."""
        self.collector, self.lane = collector, lane
        self.interval_seconds, self.deadline_seconds = interval, deadline
        self.due, self.duration_seconds, self.unsupported = -math.inf, None, ()
        self.logged_sources.clear()
        is_hanging = self.is_expired and self.running_since is not None
        self.problems = [("timeout", "a previous pass has not returned")] if is_hanging else None

    def next_due(self, grid_origin: float, now: float) -> float:
        """Return the next time on the grid of the interval, at least half an interval later.

        Collectors with the same interval share the grid and wake the process together.
        """
        interval = self.interval_seconds
        next_time = grid_origin + (math.floor((now - grid_origin) / interval) + 1) * interval
        return next_time + interval if next_time - now < interval / 2 else next_time

    def is_late(self, now: float) -> bool:
        """Return True if the running pass has exceeded the deadline."""
        return self.running_since is not None and now - self.running_since >= self.deadline_seconds

    def is_stale(self, now: float) -> bool:
        """Return True if a block is published that has exceeded its maximum age or belongs to a removed collector."""
        if self.published_at is None:
            return False
        max_age_seconds = max(3 * self.interval_seconds, self.interval_seconds + self.deadline_seconds)
        return now - self.published_at >= max_age_seconds or self.published_by is not self.collector

    def record_unsupported(self, unsupported: Sequence[str]) -> None:
        """Record the missing sources of a published pass, and log each source once."""
        self.unsupported = tuple(unsupported)
        for missing in dict.fromkeys(unsupported):
            if missing not in self.logged_sources:
                self.logged_sources.add(missing)
                _log.info("collector %s: %s", self.name, missing)

    def record_problems(self, problems: PassProblems) -> None:
        """Record the problems of a pass (none after a success), and log a line if the reasons have changed."""
        previous_problems, self.problems = self.problems, tuple(problems)
        reasons = {reason for reason, _ in problems}
        for reason in reasons:
            self.totals.errors[reason] = self.totals.errors.get(reason, 0) + 1
        if not problems:
            self.totals.last_success = time.time()
            if previous_problems:
                _log.info("collector %s works again", self.name)
        elif previous_problems is None or {reason for reason, _ in previous_problems} != reasons:
            _log.warning("collector %s fails: %s", self.name, message_of(problems))

    def status(self, now: float) -> CollectorStatus:
        """Return the status at a monotonic time."""
        problems, duration_seconds = self.problems or (), self.duration_seconds
        if self.running_since is not None and self.is_late(now):
            duration_seconds = now - self.running_since
        return CollectorStatus(
            name=self.name,
            success=None if self.problems is None else not problems,
            reason=",".join(sorted({reason for reason, _ in problems})),
            message=message_of(problems),
            age_seconds=None if self.published_at is None else now - self.published_at,
            last_success=self.totals.last_success,
            duration_seconds=duration_seconds,
            interval_seconds=self.interval_seconds,
            deadline_seconds=self.deadline_seconds,
            is_running=self.running_since is not None,
            unsupported=self.unsupported,
        )


def message_of(problems: PassProblems) -> str:
    """Return the problems as one line of text."""
    return "; ".join(f"{message} ({reason})" for reason, message in problems)
