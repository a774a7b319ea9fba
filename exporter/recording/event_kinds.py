"""The kinds of events of a process, one for each (type, severity): its count, its rules and who is told.

Used in the job. What happens for each event takes no lock; making a kind and changing the rules take the `EventLog`'s.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from itertools import count
from math import inf
from time import monotonic
from typing import Any

from exporter.recording.conversion import to_message
from exporter.recording.event_values import LEVELS, LONGEST_TYPE, check_severity, check_type, find_severity
from exporter.recording.handle import Handle
from exporter.recording.identity import clean_text
from exporter.recording.notices import log_once
from exporter.recording.worker import Counter

MOST_TYPES = 100
"""Types that are counted apart; the rest is `other`."""
MOST_KINDS = 1000
"""Kinds that are kept; beyond it one is made for each event, and counted with the type `other`."""
LONGEST_LABEL = 200
OTHER = "other"
DEFAULT_PER_SECOND = 10_000.0
"""Events of one kind that handlers are given each second unless a rule says otherwise: more is a flood."""

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of the events whose types match a shell pattern; see `KindTable.limit`."""

    match: str = "*"
    enabled: bool = True
    severity: str = "debug"
    sample: float = 1.0
    per_second: float | None = DEFAULT_PER_SECOND


class Kind:
    """What is decided about the events of one type and severity, and what is published of them.

    Attributes:
        count: Counts one more.
        limited: Whether a rule samples or limits them, so that direct handlers are asked for, too.
        routes: The handlers that want them.
        counted: The kind with which they are counted, for most itself.
    """

    counter: Counter
    count: Callable[[], int]
    suppressed: dict[str, Counter]  # how many were kept from the handlers, by reason

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
        self.last: float | datetime | None = None  # when the latest happened, Unix time
        self.suppressed = {reason: Counter() for reason in ("sampled", "rate_limit", "payload")}
        self._number = count().__next__

    @property
    def last_seconds(self) -> float | None:
        """When the latest happened, Unix time."""
        try:
            return self.last.timestamp() if isinstance(self.last, datetime) else self.last
        except (OverflowError, ValueError, OSError):
            return None  # a year that Unix time does not reach here

    def obey(self, rules: Iterable[Rule], *, recording: bool) -> None:
        """Take the last rule that matches."""
        rule = Rule()
        for each in rules:
            rule = each if fnmatchcase(self.type, each.match) else rule
        self.enabled = recording and rule.enabled and LEVELS[self.severity] >= LEVELS[rule.severity]
        self._sample, self._per_second = rule.sample, rule.per_second
        self.limited = rule.sample < 1.0 or rule.per_second != DEFAULT_PER_SECOND
        self._ends = 0.0

    def route(self, handlers: Iterable[Handle]) -> None:
        """Choose those that want them."""
        self.routes = tuple([each for each in handlers if each.wants(self.type, self.severity)])

    def admits(self) -> bool:
        """Whether the handlers are given the next one."""
        share = self._sample
        if share < 1.0:  # every n-th, beginning with the first: the job's random generators are the job's
            number = self._number()
            if (number * share) // 1 == ((number - 1) * share) // 1:
                self.suppressed["sampled"].bump()
                return False
        if self._per_second is None:
            return True
        now = monotonic()
        if now >= self._ends:
            # Two threads that do this at once give out twice as much in this one second, which is no harm.
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
    """All kinds of a process, and the rules for them; a part of the `EventLog`."""

    active: tuple[Handle, ...]  # the handlers that are told, in order of registration
    latest: deque[Any]  # what `recent` makes events of; whoever counts an event adds it here

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        self._lock = threading.RLock()  # a signal handler may log while its thread makes a kind
        self._wake = wake  # called on the first event or handler
        self._kinds: dict[Pair, Kind] = {}  # faces keep kinds, so none is ever thrown away
        self._rules: dict[str, Rule] = {}
        self.recording = True  # False with `EXPORTER_DISABLED=1`
        self._begin_counts()

    def _begin_counts(self) -> None:
        """Count from zero."""
        for kind in list(self._kinds.values()):
            kind.restart()

    def kind(self, type: str, severity: str) -> Kind:
        """Find, without a lock, or make what is decided about a type and a severity, which are checked as for faces."""
        try:
            return self._kinds[type, severity]
        except (KeyError, TypeError):
            pair = check_type(type), check_severity(severity)
        with self._lock:
            kind = self._kinds.get(pair)
            if kind is not None:
                return kind
            kept = len(self._kinds) < MOST_KINDS or pair[0] == OTHER
            if kept:
                labels = {each.label for each in list(self._kinds.values())}
                label = clean_text(pair[0])[:LONGEST_LABEL]
                kind = Kind(*pair, label if label in labels or len(labels) < MOST_TYPES else OTHER)
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
        """Whether such an event would be recorded; cheap enough to ask before making its data."""
        try:
            return self._kinds[type, severity].enabled
        except Exception:  # noqa: BLE001, S110  # a new kind, or a `__hash__` of the job's own
            pass
        try:
            return self.kind(to_message(type, LONGEST_TYPE), find_severity(severity) or "info").enabled
        except Exception:  # noqa: BLE001  # whatever the job's own object is
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
        """Say what becomes of the events whose types match a shell pattern; of several that match, the latest call holds.

        Sampled and limited events still count. A value that cannot be is a TypeError or ValueError.

        Args:
            match: The pattern; without a rule it is forgotten.
            enabled: Whether they are recorded at all.
            severity: The least that is recorded.
            sample: The share that handlers are told, 0 to 1.
            per_second: How many of a kind they are told each second; None for any number.
        """
        if not isinstance(match, str):
            raise TypeError(f"match must be a pattern such as 'checkpoint.*', not {match!r}")
        if not 0.0 <= sample <= 1.0:
            raise ValueError(f"sample must be a share from 0 to 1, not {sample!r}")
        if per_second is not None and not 0.0 <= per_second < inf:
            raise ValueError(f"per_second must be None or a finite number of at least 0, not {per_second!r}")
        rule = Rule(match, enabled, check_severity(severity), sample, per_second)
        with self._lock:
            self._rules.pop(match, None)
            if rule != Rule(match):
                self._rules[match] = rule
            for kind in list(self._kinds.values()):
                kind.obey(list(self._rules.values()), recording=self.recording)

    def _counts(self) -> tuple[dict[Pair, int], dict[Pair, float], dict[Pair, int]]:
        """Tell how many there were, when the latest happened, and how many were kept from the handlers."""
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
        """Count something that an event goes without, and say so once for each type."""
        self.kind(type or OTHER, "info").suppressed["payload"].bump()
        log_once(
            f"event {type[:LONGEST_TYPE]}",
            f"an event {type[:100]!r} is recorded without what cannot be: {what}",
        )
