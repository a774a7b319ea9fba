"""The kinds of events of a process: where each is counted, and what the rules say of it.

Used in the training process. Changed under the lock; the threads that log only look kinds up.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime
from typing import Any

from exporter.recording.event_kinds import Kind, Occurrences, Rule, check_rule, combined, is_enabled
from exporter.recording.event_values import LONGEST_TYPE, check_severity, check_type, severity_of
from exporter.recording.identity import clean_text
from exporter.recording.notices import tell_once

MOST_TYPES = 100
"""Types that are counted apart; the rest is `other`."""
MOST_KINDS = 1000
"""(type, severity) pairs with a memory of their own; beyond it they share one for each severity."""
MOST_COUNTED_APART = 1000
LONGEST_LABEL = 200
OTHER = "other"

Pair = tuple[str, str]


class KindTable:
    """All kinds of a process; what is told to whom is decided by the `EventLog`, which this is a part of.

    Attributes:
        latest: What `recent` makes events of; whoever counts an event adds it here.
    """

    latest: deque[Any]

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may log while its thread makes a kind
        self._wake: Callable[[], None] = lambda: None
        self._kinds: dict[Pair, Kind] = {}  # faces keep kinds, so none is ever thrown away
        self._crowd: dict[str, Kind] = {}
        self._verdicts: dict[tuple[object, object], bool] = {}
        self._rules: dict[str, Rule] = {}
        self._outer_rules: tuple[Rule, ...] = ()
        self._recording = True
        self._allowed: frozenset[str] | None = None
        self._most_types = MOST_TYPES
        self._begin_counts()

    def _begin_counts(self) -> None:
        """Count from zero."""
        self._occurrences: dict[Pair, Occurrences] = {}
        self._labels: set[str] = set()
        self._suppressed: dict[Pair, int] = {}
        for kind in self._every():
            kind.restart(self._counted_as(kind))

    def _route(self, kinds: Iterable[Kind] | None = None) -> None:
        """Decide for kinds whom they are told to."""
        raise NotImplementedError

    def kind(self, type: str, severity: str) -> Kind:
        """Find or make what is decided about a type and a severity; one that is known is found without a lock.

        Raises:
            TypeError: The type is no text.
            ValueError: The type is empty, or there is no such severity.
        """
        try:
            return self._kinds[type, severity]
        except (KeyError, TypeError):
            pair = check_type(type), check_severity(severity)
        with self._lock:
            kind, known = self._kinds.get(pair), len(self._kinds)
            if kind is None and known < MOST_KINDS:
                kind = self._kinds[pair] = self._made(*pair)
            elif kind is None:
                kind = self._crowd.get(pair[1]) or self._made(None, pair[1])
                self._crowd[pair[1]] = kind
        if self._recording and len(self._kinds) != known:
            self._wake()
        return kind

    def enabled(self, type: str, severity: str = "info") -> bool:
        """Whether such an event would be recorded; cheap enough to ask before making its data."""
        try:
            return self._verdicts[type, severity]
        except (KeyError, TypeError):
            return self._verdict(type, severity)

    def limit(self, match: str = "*", **rule: object) -> None:
        """Say what becomes of the events whose types match a shell pattern; the later call wins.

        What is given replaces what was said of the same pattern before; nothing given forgets it.

        Args:
            match: The pattern.
            rule: Any of `enabled` (bool), `severity` (the least that is recorded), `sample` (the share that
                handlers are told, 0 to 1) and `per_second` (how many of a kind they are told each second; None for
                any number). Sampled and limited events still count.

        Raises:
            TypeError: A value is of the wrong type.
            ValueError: A value is out of range, or there is no such rule.
        """
        checked = check_rule({"match": match, **rule})
        with self._lock:
            self._rules.pop(match, None)
            if rule:
                self._rules[match] = checked
            self._obey()

    def override(self, rules: Iterable[Rule]) -> list[str]:
        """Put the configuration's rules in force; the code's own come after them.

        Returns:
            What is wrong with the rules that were left out.
        """
        good: list[Rule] = []
        wrong: list[str] = []
        for number, rule in enumerate(rules, 1):
            try:
                good.append(check_rule(rule))
            except (TypeError, ValueError) as error:  # noqa: PERF203  # each rule stands for itself
                wrong.append(f"events rule {number}: {error}")
        with self._lock:
            self._outer_rules = tuple(good)
            self._obey()
        return wrong

    def count_types(self, allowed: Iterable[str] | None = None, *, most: int = MOST_TYPES) -> None:
        """Say which types are counted apart; the rest is `other`. Counts so far stay where they are.

        Args:
            allowed: These types only; None for the first that come.
            most: So many of them.

        Raises:
            TypeError: A type is no text.
            ValueError: `most` is not from 0 to 1000.
        """
        types = None if allowed is None else frozenset(map(check_type, allowed))
        if not 0 <= most <= MOST_COUNTED_APART:
            raise ValueError(f"most must be 0 to {MOST_COUNTED_APART}, not {most}")
        with self._lock:
            self._allowed, self._most_types = types, most
            self._labels.clear()
            for kind in self._every():
                _add_suppressed(kind, self._suppressed)
                kind.restart(self._counted_as(kind))

    def _counts(self) -> tuple[dict[Pair, int], dict[Pair, float], dict[Pair, int]]:
        """Tell how many there were, when the latest happened, and how many were kept from the handlers."""
        counts = {pair: number for pair, each in self._occurrences.items() if (number := each.counter.read())}
        last = {
            pair: when for pair in counts if (when := _unix_time(self._occurrences[pair].last)) is not None
        }
        suppressed = dict(self._suppressed)
        for kind in self._every():
            _add_suppressed(kind, suppressed)
        return counts, last, suppressed

    def _every(self) -> list[Kind]:
        return [*self._kinds.values(), *self._crowd.values()]

    def _made(self, type: str | None, severity: str) -> Kind:
        occurrences = self._occurrences_of(OTHER if type is None else type, severity)
        kind = Kind(type, severity, occurrences, self.latest.append)
        self._settle(kind)
        return kind

    def _obey(self) -> None:
        self._verdicts = {}
        for kind in self._every():
            self._settle(kind)

    def _settle(self, kind: Kind) -> None:
        kind.obey([*self._outer_rules, *self._rules.values()])
        kind.enabled = kind.enabled and self._recording
        self._route([kind])

    def _verdict(self, type: str, severity: str) -> bool:
        with suppress(Exception):  # whatever the job's own object is
            rule = combined(str(type), [*self._outer_rules, *self._rules.values()])
            verdict = self._recording and is_enabled(rule, severity_of(severity))
            if len(self._verdicts) < MOST_KINDS:
                self._verdicts[type, severity] = verdict
            return verdict
        return self._recording

    def _refuse(self, type: str, what: str) -> None:
        """Count something that an event goes without, and say so once for each type."""
        with self._lock:
            pair = self._label_of(type), "payload"
            self._suppressed[pair] = self._suppressed.get(pair, 0) + 1
        tell_once(
            f"event {type[:LONGEST_TYPE]}",
            f"an event {type[:100]!r} is recorded without what cannot be: {what}",
        )

    def _counted_as(self, kind: Kind) -> Occurrences:
        return self._occurrences_of(OTHER if kind.type is None else kind.type, kind.severity)

    def _occurrences_of(self, type: str, severity: str) -> Occurrences:
        pair = self._label_of(type), severity
        if pair not in self._occurrences:
            self._occurrences[pair] = Occurrences(*pair)
        return self._occurrences[pair]

    def _label_of(self, type: str) -> str:
        label = clean_text(type)[:LONGEST_LABEL]
        if label not in self._labels:
            room = len(self._labels) < self._most_types
            if not room or (self._allowed is not None and type not in self._allowed):
                return OTHER
            self._labels.add(label)
        return label


def _add_suppressed(kind: Kind, into: dict[Pair, int]) -> None:
    for reason, counter in kind.suppressed.items():
        number = counter.read()
        if number:
            pair = kind.occurrences.labels[0], reason
            into[pair] = into.get(pair, 0) + number


def _unix_time(last: float | datetime | None) -> float | None:
    if last is None or isinstance(last, float):
        return last
    try:
        return last.timestamp()
    except (OverflowError, ValueError, OSError):
        return None  # a year that Unix time does not reach here
