"""Kinds of events: counts, rules and handlers for each pair of type and severity.

Counting an event takes no lock; creating a kind and changing the rules take the lock of the `EventLog`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from datetime import datetime
from fnmatch import fnmatchcase
from itertools import count
from math import inf
from time import monotonic
from typing import Any

from exporter.recording.conversion import to_message
from exporter.recording.event_values import (
    LEVELS,
    MAX_TYPE_CHARACTERS,
    check_severity,
    check_type,
    find_severity,
)
from exporter.recording.handle import Handle
from exporter.recording.identity import clean_text
from exporter.recording.notices import log_once
from exporter.recording.value_class import Value, value_class
from exporter.recording.values import EventsReading
from exporter.recording.worker import Counter

MAX_TYPES = 100
"""Limit of separately counted types; further types are counted as `other`."""
MAX_KINDS = 1000
"""Limit of kinds in memory; further kinds are created per event and counted as `other`."""
MAX_LABEL_CHARACTERS = 200
OTHER = "other"
DEFAULT_PER_SECOND = 10_000.0
"""Default limit of delivered events of a kind per second."""

Pair = tuple[str, str]


@value_class
class EventRule(Value):
    """Rule for the events whose types match a shell pattern; see `KindTable.limit`."""

    match: str = "*"
    enabled: bool = True
    severity: str = "debug"
    sample: float = 1.0
    per_second: float | None = DEFAULT_PER_SECOND


class Kind:
    """Counts, rules and handlers of the events of a type and severity.

    Attributes:
        count: Function that counts an event.
        is_limited: True if a rule samples or limits the events, also for direct and awaited handlers.
        handlers: The handlers that receive the events.
        counting_kind: The kind whose counters are used: this kind, or the kind `other` above the limit of kinds.
    """

    counter: Counter
    count: Callable[[], int]
    suppressed_events: dict[str, Counter]  # undelivered events by reason

    def __init__(self, type: str, severity: str, label: str, counting_kind: Kind | None = None) -> None:
        self.type = type
        self.severity = severity
        self.label = label
        self.handlers: tuple[Handle, ...] = ()
        self.counting_kind = counting_kind or self
        self.restart()
        if counting_kind is not None:
            self.counter, self.count, self.suppressed_events = (
                counting_kind.counter,
                counting_kind.count,
                counting_kind.suppressed_events,
            )

    def restart(self) -> None:
        """Count from zero."""
        self.counter = Counter()
        self.count = self.counter.bump
        self.last: float | datetime | None = None  # time of the latest event
        self.suppressed_events = {reason: Counter() for reason in ("sampled", "rate_limit", "payload")}
        self._number = count().__next__

    @property
    def last_seconds(self) -> float | None:
        """Unix time of the latest event."""
        try:
            return self.last.timestamp() if isinstance(self.last, datetime) else self.last
        except (OverflowError, ValueError, OSError):
            return None  # a year outside the range of Unix time

    def apply_rules(self, rules: Iterable[EventRule], *, is_recording: bool) -> None:
        """Apply the last rule that matches."""
        rule = EventRule()
        for candidate in rules:
            rule = candidate if fnmatchcase(self.type, candidate.match) else rule
        self.enabled = is_recording and rule.enabled and LEVELS[self.severity] >= LEVELS[rule.severity]
        self._sample, self._per_second = rule.sample, rule.per_second
        self.is_limited = rule.sample < 1.0 or rule.per_second != DEFAULT_PER_SECOND
        self._ends = 0.0

    def route(self, handlers: Iterable[Handle]) -> None:
        """Select the handlers that receive this kind."""
        self.handlers = tuple([handler for handler in handlers if handler.accepts(self.type, self.severity)])

    def admits(self) -> bool:
        """Return True if the next event is delivered."""
        share = self._sample
        if share < 1.0:  # every n-th event from the first, without use of the job's random generators
            number = self._number()
            if (number * share) // 1 == ((number - 1) * share) // 1:
                self.suppressed_events["sampled"].bump()
                return False
        if self._per_second is None:
            return True
        now = monotonic()
        if now >= self._ends:
            # Two threads that reset the limit concurrently deliver at most twice as many events in this second.
            permits = max(int(self._per_second), 1)
            self._permit = iter(range(permits if self._per_second else 0)).__next__
            self._ends = now + permits / self._per_second if self._per_second else float("inf")
        try:
            self._permit()
        except StopIteration:
            self.suppressed_events["rate_limit"].bump()
            return False
        return True


class KindTable:
    """All kinds of a process, and their rules; base of the `EventLog`."""

    active: tuple[Handle, ...]  # registered handlers, in order of registration
    latest: deque[Any]  # latest events, or the objects that `recent` converts to events

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        # reentrant, because a signal handler may log while its thread creates a kind
        self._lock = threading.RLock()
        self._wake = wake  # called on the first event or handler
        self._kinds: dict[Pair, Kind] = {}  # never removed: compatibility modules keep references
        self._rules: dict[str, EventRule] = {}
        self.is_recording = True  # False with `EXPORTER_DISABLED=1`
        self._begin_counts()

    def _begin_counts(self) -> None:
        """Count from zero."""
        for kind in list(self._kinds.values()):
            kind.restart()

    def kind(self, type: str, severity: str) -> Kind:
        """Return the kind of a type and a severity. Raises TypeError or ValueError for invalid arguments."""
        try:
            return self._kinds[type, severity]
        except (KeyError, TypeError):
            pair = check_type(type), check_severity(severity)
        with self._lock:
            kind = self._kinds.get(pair)
            if kind is not None:
                return kind
            is_kept = len(self._kinds) < MAX_KINDS or pair[0] == OTHER
            if is_kept:
                labels = {member.label for member in list(self._kinds.values())}
                label = clean_text(pair[0])[:MAX_LABEL_CHARACTERS]
                kind = Kind(*pair, label if label in labels or len(labels) < MAX_TYPES else OTHER)
            else:
                kind = Kind(*pair, OTHER, self.kind(OTHER, pair[1]))
            kind.apply_rules(list(self._rules.values()), is_recording=self.is_recording)
            kind.route(self.active)
            if is_kept:
                kind = self._kinds.setdefault(pair, kind)
        if self._wake is not None:
            self._wake()
        return kind

    def enabled(self, type: str, severity: str = "info") -> bool:
        """Return True if an event of this type and severity would be recorded, to skip expensive data otherwise."""
        try:
            return self._kinds[type, severity].enabled
        except Exception:  # noqa: BLE001, S110  # a new kind, or an unhashable type
            pass
        try:
            return self.kind(to_message(type, MAX_TYPE_CHARACTERS), find_severity(severity) or "info").enabled
        except Exception:  # noqa: BLE001  # conversion runs code of the job
            return self.is_recording

    def limit(
        self,
        match: str = "*",
        *,
        enabled: bool = True,
        severity: str = "debug",
        sample: float = 1.0,
        per_second: float | None = DEFAULT_PER_SECOND,
    ) -> None:
        """Set the rule for the events whose types match a shell pattern; the latest matching call applies.

        Sampled and limited events still count. Raises TypeError or ValueError for an invalid argument.

        Args:
            match: The pattern; a call with only a pattern removes the rule of the pattern.
            enabled: False to ignore the events.
            severity: The lowest severity to record.
            sample: The share of delivered events, 0 to 1.
            per_second: The limit of delivered events of a kind per second; None for no limit.
        """
        if not isinstance(match, str):
            raise TypeError(f"match must be a pattern such as 'checkpoint.*', not {match!r}")
        if not 0.0 <= sample <= 1.0:
            raise ValueError(f"sample must be a share from 0 to 1, not {sample!r}")
        if per_second is not None and not 0.0 <= per_second < inf:
            raise ValueError(f"per_second must be None or a finite number of at least 0, not {per_second!r}")
        rule = EventRule(match, enabled, check_severity(severity), sample, per_second)
        with self._lock:
            self._rules.pop(match, None)
            if rule != EventRule(match):
                self._rules[match] = rule
            for kind in list(self._kinds.values()):
                kind.apply_rules(list(self._rules.values()), is_recording=self.is_recording)

    def _counts(self) -> EventsReading:
        """Return the counts of the kinds, without those of the handlers."""
        counts: dict[Pair, int] = {}
        last_times: dict[Pair, float] = {}
        suppressed: dict[Pair, int] = {}
        for kind in list(self._kinds.values()):
            pair = kind.label, kind.severity
            if number := kind.counter.read():
                counts[pair] = counts.get(pair, 0) + number
                if (last_time := kind.last_seconds) is not None:
                    last_times[pair] = max(last_times.get(pair, last_time), last_time)
            for reason, counter in kind.suppressed_events.items():
                if number := counter.read():
                    suppressed[kind.label, reason] = suppressed.get((kind.label, reason), 0) + number
        return EventsReading(counts=counts, last=last_times, suppressed=suppressed)

    def _refuse(self, type: str, part: str) -> None:
        """Count an omitted part of an event, and log it once per type."""
        self.kind(type or OTHER, "info").suppressed_events["payload"].bump()
        log_once(
            f"event {type[:MAX_TYPE_CHARACTERS]}",
            f"an event {type[:100]!r} is recorded without an invalid part: {part}",
        )
