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
from exporter.recording.worker import Counter

MAX_TYPES = 100
"""Types with counts of their own; further types are counted as `other`."""
MAX_KINDS = 1000
"""Kinds in memory; further kinds are created for each event and counted as `other`."""
MAX_LABEL_CHARACTERS = 200
OTHER = "other"
DEFAULT_PER_SECOND = 10_000.0
"""Default limit of delivered events of a kind per second."""

Pair = tuple[str, str]


@value_class
class EventRule(Value):
    """EventRule for the events whose types match a shell pattern; see `KindTable.limit`."""

    match: str = "*"
    enabled: bool = True
    severity: str = "debug"
    sample: float = 1.0
    per_second: float | None = DEFAULT_PER_SECOND


class Kind:
    """Counts, rules and handlers of the events of a type and severity.

    Attributes:
        count: Counts one more.
        limited: Whether a rule samples or limits them, so that direct handlers are asked for, too.
        routes: The handlers that want them.
        counted: The kind with which they are counted, for most itself.
    """

    counter: Counter
    count: Callable[[], int]
    suppressed: dict[str, Counter]  # undelivered events by reason

    def __init__(self, type: str, severity: str, label: str, counted: Kind | None = None) -> None:
        self.type = type
        self.severity = severity
        self.label = label
        self.routes: tuple[Handle, ...] = ()
        self.counted = counted or self
        self.restart()
        if counted is not None:
            self.counter, self.count, self.suppressed = counted.counter, counted.count, counted.suppressed

    def restart(self) -> None:
        """Count from zero."""
        self.counter = Counter()
        self.count = self.counter.bump
        self.last: float | datetime | None = None  # time of the latest event
        self.suppressed = {reason: Counter() for reason in ("sampled", "rate_limit", "payload")}
        self._number = count().__next__

    @property
    def last_seconds(self) -> float | None:
        """Unix time of the latest event."""
        try:
            return self.last.timestamp() if isinstance(self.last, datetime) else self.last
        except (OverflowError, ValueError, OSError):
            return None  # a year outside the range of Unix time

    def obey(self, rules: Iterable[EventRule], *, recording: bool) -> None:
        """Apply the last rule that matches."""
        rule = EventRule()
        for each in rules:
            rule = each if fnmatchcase(self.type, each.match) else rule
        self.enabled = recording and rule.enabled and LEVELS[self.severity] >= LEVELS[rule.severity]
        self._sample, self._per_second = rule.sample, rule.per_second
        self.limited = rule.sample < 1.0 or rule.per_second != DEFAULT_PER_SECOND
        self._ends = 0.0

    def route(self, handlers: Iterable[Handle]) -> None:
        """Select the handlers that want this kind."""
        self.routes = tuple([each for each in handlers if each.wants(self.type, self.severity)])

    def admits(self) -> bool:
        """Return True if the next event is delivered."""
        share = self._sample
        if share < 1.0:  # every n-th event, the first included, without the job's random generators
            number = self._number()
            if (number * share) // 1 == ((number - 1) * share) // 1:
                self.suppressed["sampled"].bump()
                return False
        if self._per_second is None:
            return True
        now = monotonic()
        if now >= self._ends:
            # Two threads that reset the limit at once deliver twice as many events in this second, which is harmless.
            whole = max(int(self._per_second), 1)
            self._permit = iter(range(whole if self._per_second else 0)).__next__
            self._ends = now + whole / self._per_second if self._per_second else float("inf")
        try:
            self._permit()
        except StopIteration:
            self.suppressed["rate_limit"].bump()
            return False
        return True


class KindTable:
    """All kinds of a process, and their rules; base of the `EventLog`."""

    active: tuple[Handle, ...]  # registered handlers, in order of registration
    latest: deque[Any]  # latest events, or the objects that `recent` converts to events

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        self._lock = threading.RLock()  # a signal handler may log while its thread creates a kind
        self._wake = wake  # called on the first event or handler
        self._kinds: dict[Pair, Kind] = {}  # never removed: compatibility modules keep references
        self._rules: dict[str, EventRule] = {}
        self.recording = True  # False with `EXPORTER_DISABLED=1`
        self._begin_counts()

    def _begin_counts(self) -> None:
        """Count from zero."""
        for kind in list(self._kinds.values()):
            kind.restart()

    def kind(self, type: str, severity: str) -> Kind:
        """Return the kind of a type and a severity; raises TypeError or ValueError for invalid ones."""
        try:
            return self._kinds[type, severity]
        except (KeyError, TypeError):
            pair = check_type(type), check_severity(severity)
        with self._lock:
            kind = self._kinds.get(pair)
            if kind is not None:
                return kind
            kept = len(self._kinds) < MAX_KINDS or pair[0] == OTHER
            if kept:
                labels = {each.label for each in list(self._kinds.values())}
                label = clean_text(pair[0])[:MAX_LABEL_CHARACTERS]
                kind = Kind(*pair, label if label in labels or len(labels) < MAX_TYPES else OTHER)
            else:
                kind = Kind(*pair, OTHER, self.kind(OTHER, pair[1]))
            kind.obey(list(self._rules.values()), recording=self.recording)
            kind.route(self.active)
            if kept:
                kind = self._kinds.setdefault(pair, kind)
        if self._wake is not None:
            self._wake()
        return kind

    def enabled(self, type: str, severity: str = "info") -> bool:
        """Return True if such an event would be recorded; cheap enough to call before computing the data."""
        try:
            return self._kinds[type, severity].enabled
        except Exception:  # noqa: BLE001, S110  # a new kind, or a `__hash__` of the job's own
            pass
        try:
            return self.kind(to_message(type, MAX_TYPE_CHARACTERS), find_severity(severity) or "info").enabled
        except Exception:  # noqa: BLE001  # code of the object's class
            return self.recording

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
            match: The pattern; a call without a rule removes the pattern's rule.
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
                kind.obey(list(self._rules.values()), recording=self.recording)

    def _counts(self) -> tuple[dict[Pair, int], dict[Pair, float], dict[Pair, int]]:
        """Return the counts, the times of the latest events, and the counts of undelivered events."""
        counts: dict[Pair, int] = {}
        last: dict[Pair, float] = {}
        suppressed: dict[Pair, int] = {}
        for each in list(self._kinds.values()):
            pair = each.label, each.severity
            if number := each.counter.read():
                counts[pair] = counts.get(pair, 0) + number
                if (when := each.last_seconds) is not None:
                    last[pair] = max(last.get(pair, when), when)
            for reason, counter in each.suppressed.items():
                if number := counter.read():
                    suppressed[each.label, reason] = suppressed.get((each.label, reason), 0) + number
        return counts, last, suppressed

    def _refuse(self, type: str, what: str) -> None:
        """Count a dropped part of an event, and log it once for each type."""
        self.kind(type or OTHER, "info").suppressed["payload"].bump()
        log_once(
            f"event {type[:MAX_TYPE_CHARACTERS]}",
            f"an event {type[:100]!r} is recorded without an invalid part: {what}",
        )
