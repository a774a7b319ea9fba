"""Kinds of events: counts, rules and handlers for each pair of type and severity.

Counting an event takes no lock. Creating a kind and changing the rules take the lock of the `EventLog`.
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

from exporter.recording.conversion import to_str
from exporter.recording.event_values import (
    LEVEL_BY_SEVERITY,
    MAX_EVENT_NAME_CHARACTERS,
    check_severity,
    check_type,
    find_severity,
)
from exporter.recording.handle import Handle
from exporter.recording.identity import clean_text
from exporter.recording.notices import log_once
from exporter.recording.signal_safety import is_from_signal_handler
from exporter.recording.value_class import Value, value_class
from exporter.recording.values import EventsReading
from exporter.recording.worker import Counter

MAX_TYPES = 100
"""Maximum number of types that are counted separately. Further types are counted as `other`."""
MAX_KINDS = 1000
"""Maximum number of kinds in memory. Further kinds are created for each event and counted as `other`."""
MAX_LABEL_CHARACTERS = 200
"""Maximum length of the labels `type` and `handler`. Longer texts are cut."""
OTHER = "other"
"""Label `type` of the types above the limit."""
DEFAULT_PER_SECOND = 10_000.0
"""Default limit of delivered events of a kind per second."""

KindKey = tuple[str, str]
"""Type and severity."""
CountKey = tuple[str, str]
"""Label values of a count: type and severity, type and reason, or handler and reason."""


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
        label: Value of the label `type`: the cleaned and cut type, or `other`.
        count: Function that counts an event.
        is_limited: True if a rule samples or limits the events. Such a rule also applies to direct and awaited handlers.
        handlers: Handlers that receive the events.
        counting_kind: Kind whose counters are used: this kind, or the kind `other` above the limit of kinds.
    """

    counter: Counter
    count: Callable[[], int]
    suppressed_counts: dict[str, Counter]  # by reason

    def __init__(self, type: str, severity: str, label: str, counting_kind: Kind | None = None) -> None:
        self.type = type
        self.severity = severity
        self.label = label
        self.handlers: tuple[Handle, ...] = ()
        self.counting_kind = counting_kind or self
        self.restart()
        if counting_kind is not None:
            self.counter, self.count = counting_kind.counter, counting_kind.count
            self.suppressed_counts = counting_kind.suppressed_counts

    def restart(self) -> None:
        """Count from zero."""
        self.counter = Counter()
        self.count = self.counter.bump
        self.last_time: float | datetime | None = None  # time of the latest event
        self.suppressed_counts = {reason: Counter() for reason in ("sampled", "rate_limit", "payload")}
        self._next_number = count().__next__

    @property
    def last_seconds(self) -> float | None:
        """Unix time of the latest event; None before the first, and outside the range of Unix time."""
        try:
            return self.last_time.timestamp() if isinstance(self.last_time, datetime) else self.last_time
        except (OverflowError, ValueError, OSError):
            return None

    def apply_rules(self, rules: Iterable[EventRule], *, is_recording: bool) -> None:
        """Apply the last rule that matches the type."""
        rule = EventRule()
        for candidate in rules:
            if fnmatchcase(self.type, candidate.match):
                rule = candidate
        self.enabled = (
            is_recording
            and rule.enabled
            and LEVEL_BY_SEVERITY[self.severity] >= LEVEL_BY_SEVERITY[rule.severity]
        )
        self._sample_ratio, self._per_second = rule.sample, rule.per_second
        self.is_limited = rule.sample < 1.0 or rule.per_second != DEFAULT_PER_SECOND
        self._permits_end = 0.0  # monotonic time at which new permits are issued

    def route(self, handlers: Iterable[Handle]) -> None:
        """Select the handlers that receive this kind."""
        self.handlers = tuple([handler for handler in handlers if handler.accepts(self.type, self.severity)])

    def admits(self) -> bool:
        """Return True if the next event is delivered, and count it as suppressed otherwise."""
        ratio = self._sample_ratio
        if ratio < 1.0:
            # An event is delivered if the whole part of number * ratio has grown: with a ratio of 0.25, events 0, 4, 8 and so on.
            # Random numbers are not used, because the job may have seeded the generator.
            number = self._next_number()
            if (number * ratio) // 1 == ((number - 1) * ratio) // 1:
                self.suppressed_counts["sampled"].bump()
                return False
        per_second = self._per_second  # read once, because `limit` may change the rule on another thread
        if per_second is None:
            return True
        now = monotonic()
        if now >= self._permits_end:
            # Two threads that issue new permits at the same time may deliver twice as many events in this interval.
            permits = max(int(per_second), 1)
            self._permit = iter(range(permits if per_second else 0)).__next__
            self._permits_end = now + permits / per_second if per_second else inf
        try:
            self._permit()
        except StopIteration:
            self.suppressed_counts["rate_limit"].bump()
            return False
        return True


class KindTable:
    """Kinds and rules of the events of a process; base of the `EventLog`."""

    handlers: tuple[Handle, ...]  # registered handlers, in order of registration
    latest_entries: deque[Any]  # latest events, or objects that `recent` converts to events

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        # Reentrant, because a signal handler may log while its thread creates a kind.
        self._lock = threading.RLock()
        self._wake = wake  # called after the first event of a kind and after a registration
        self._kinds: dict[KindKey, Kind] = {}  # not removed, because compatibility modules keep references
        self._rules: dict[str, EventRule] = {}
        self.is_recording = True  # False with `EXPORTER_DISABLED=1`
        self._begin_counts()

    def _begin_counts(self) -> None:
        """Count from zero."""
        for kind in list(self._kinds.values()):
            kind.restart()

    def kind(self, type: str, severity: str) -> Kind:
        """Return the kind of a type and a severity. Raises TypeError or ValueError for invalid arguments.

        Above `MAX_KINDS` kinds, returns a new kind for each call, whose events are counted as `other`.
        """
        try:
            return self._kinds[type, severity]
        except (KeyError, TypeError):
            key = check_type(type), check_severity(severity)
        with self._lock:
            kind = self._kinds.get(key)
            if kind is not None:
                return kind
            is_kept = len(self._kinds) < MAX_KINDS or key[0] == OTHER
            if is_kept:
                labels = {member.label for member in list(self._kinds.values())}
                label = clean_text(key[0])[:MAX_LABEL_CHARACTERS]
                kind = Kind(*key, label if label in labels or len(labels) < MAX_TYPES else OTHER)
            else:
                kind = Kind(*key, OTHER, self.kind(OTHER, key[1]))
            kind.apply_rules(list(self._rules.values()), is_recording=self.is_recording)
            kind.route(self.handlers)
            if is_kept:
                kind = self._kinds.setdefault(key, kind)
        if self._wake is not None:
            self._wake()
        return kind

    def enabled(self, type: str, severity: str = "info") -> bool:
        """Return True if an event of this type and severity would be recorded. Used to skip the computation of expensive data."""
        try:
            return self._kinds[type, severity].enabled
        except Exception as error:  # a new kind, or an unhashable type
            if is_from_signal_handler(error):
                raise
        try:
            return self.kind(
                to_str(type, MAX_EVENT_NAME_CHARACTERS), find_severity(severity) or "info"
            ).enabled
        except Exception as error:  # conversion runs code of the job
            if is_from_signal_handler(error):
                raise
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
        """Set the rule for the events whose types match a shell pattern. The latest matching rule applies.

        Events that are not delivered because of sampling or the limit are counted all the same. Raises TypeError or ValueError for
        an invalid argument.

        Args:
            match: Shell pattern. A call without other arguments removes the rule of the pattern.
            enabled: False to ignore the events.
            severity: Lowest severity to record.
            sample: Share of delivered events, from 0 to 1.
            per_second: Maximum number of delivered events of a kind per second; None for no limit.
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

    def _reading(self, delivered: dict[str, int], dropped: dict[CountKey, int]) -> EventsReading:
        """Return the counts of the kinds, and the given counts of the handlers."""
        counts: dict[CountKey, int] = {}
        last_times: dict[CountKey, float] = {}
        suppressed: dict[CountKey, int] = {}
        for kind in list(self._kinds.values()):
            key = kind.label, kind.severity
            if event_count := kind.counter.read():
                counts[key] = counts.get(key, 0) + event_count
                if (last_time := kind.last_seconds) is not None:
                    last_times[key] = max(last_times.get(key, last_time), last_time)
            for reason, counter in kind.suppressed_counts.items():
                if event_count := counter.read():
                    suppressed[kind.label, reason] = suppressed.get((kind.label, reason), 0) + event_count
        return EventsReading(counts, last_times, suppressed, delivered, dropped)

    def _refuse(self, type: str, part: str) -> None:
        """Count an invalid part of an event, which is recorded without this part, and log the first one of each type."""
        self.kind(type or OTHER, "info").suppressed_counts["payload"].bump()
        log_once(
            f"event {type[:MAX_EVENT_NAME_CHARACTERS]}",
            f"an event {type[:100]!r} is recorded without an invalid part: {part}",
        )
