"""Kinds of events: one for each (type, severity), with its count, its rules and who wants to be told.

Used in the training process, on the threads that log. What happens for each event is a dictionary look-up and a
few calls into C, without a lock; making a kind and changing the rules takes the lock of whoever owns them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from math import isfinite
from time import monotonic

from exporter.recording.event_values import LEVELS
from exporter.recording.overrides import matches

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import datetime
    from typing import Any

    from exporter.recording.delivery import Delivery

DEFAULT_PER_SECOND = 10_000.0
"""Events of one kind that handlers are given each second unless a rule says otherwise: more is a flood."""

Rule = Mapping[str, object]
"""`match`, a shell pattern of types, and any of `enabled`, `severity`, `sample` and `per_second`."""


class Counter:
    """Counts from any number of threads without a lock, exactly.

    Attributes:
        bump: Count one more; gives the number of those before it. One call into C.
    """

    __slots__ = ("_looks", "_many", "bump")

    def __init__(self) -> None:
        self.bump: Callable[[], int] = count().__next__
        self._looks = 0
        self._many = 0

    def add(self, number: int) -> None:
        """Count so many more; by one thread at a time."""
        self._many += number

    def read(self) -> int:
        """Give the count; by one thread at a time."""
        # Looking takes a number too: there is no other way to ask it that all versions of Python have.
        number = self.bump() - self._looks
        self._looks += 1
        return number + self._many


class Occurrences:
    """What is published of the events of one label pair.

    Attributes:
        labels: Type and severity as label values.
        counter: How many.
        last: When the latest happened, Unix time or a datetime; None before the first.
    """

    __slots__ = ("counter", "labels", "last")

    def __init__(self, type: str, severity: str) -> None:
        self.labels = (type, severity)
        self.counter = Counter()
        self.last: float | datetime | None = None


class Kind:
    """All that is decided beforehand about the events of one type and severity.

    Attributes:
        type: As the code wrote it; None for what shares the kind of those too many to have their own.
        severity: Its name.
        occurrences: Where they are counted, perhaps with others.
        count: Count one; the bound method of it.
        enabled: Whether they are recorded at all.
        quiet: Whether they are recorded, and nobody is told.
        note: Keeps one as the latest: the bound method of `EventLog.latest`.
        limited: Whether a rule samples or limits them; the default limit alone does not hold for containers.
        routes: Who is told; None when that must be found out for each event.
        suppressed: Counters of what was kept from the handlers, by reason.
    """

    __slots__ = (
        "_ends",
        "_per_second",
        "_permit",
        "_sample",
        "count",
        "enabled",
        "limited",
        "note",
        "occurrences",
        "quiet",
        "routes",
        "severity",
        "suppressed",
        "type",
    )

    def __init__(self, type: str | None, severity: str, occurrences: Occurrences) -> None:
        self.type = type
        self.severity = severity
        self.enabled = self.quiet = True
        self.limited = False
        self.note: Callable[[Any], None] = deque[object](maxlen=0).append
        self.routes: tuple[Delivery, ...] | None = ()
        self.restart(occurrences)
        self._sample = 1.0
        self._per_second: float | None = DEFAULT_PER_SECOND
        self._permit: Callable[[], int] = iter(()).__next__
        self._ends = 0.0

    def restart(self, occurrences: Occurrences) -> None:
        """Count there from now on, and from zero what is suppressed."""
        self.occurrences = occurrences
        self.count = occurrences.counter.bump
        self.suppressed = {reason: Counter() for reason in ("sampled", "rate_limit", "payload")}

    def obey(self, rules: Sequence[Rule]) -> None:
        """Take the rules that match, the later one winning."""
        found = combined(self.type or "", rules)
        least = LEVELS[str(found.get("severity", "debug"))]
        self.enabled = bool(found.get("enabled", True)) and LEVELS[self.severity] >= least
        self._sample = float(found.get("sample", 1.0))  # type: ignore[arg-type]  # checked when the rule was made
        self.limited = self._sample < 1.0 or "per_second" in found
        rate = found.get("per_second", DEFAULT_PER_SECOND)
        self._per_second = None if rate is None else float(rate)  # type: ignore[arg-type]  # likewise
        self._ends = 0.0

    def admits(self, number: int) -> bool:
        """Whether the handlers are given this one; by its number, and by how many they were given this second.

        Sampling takes every n-th, beginning with the first, so that it needs no random numbers: the job's
        generators are the job's.
        """
        share = self._sample
        if share < 1.0 and (number * share) // 1 == ((number - 1) * share) // 1:
            self.suppressed["sampled"].bump()
            return False
        if self._per_second is None:
            return True
        now = monotonic()
        if now >= self._ends:
            # Two threads that do this at once give out twice as much in this one second, which is no harm.
            whole = max(int(self._per_second), 1)
            self._permit = iter(range(whole)).__next__
            self._ends = now + whole / self._per_second if self._per_second else float("inf")
            if not self._per_second:
                self._permit = iter(()).__next__
        try:
            self._permit()
        except StopIteration:
            self.suppressed["rate_limit"].bump()
            return False
        return True


def combined(type: str, rules: Sequence[Rule]) -> dict[str, object]:
    """Put together what all matching rules say of a type."""
    found: dict[str, object] = {}
    for rule in rules:
        if matches(type, str(rule["match"])):
            found.update(rule)
    return found


def check_rule(rule: Rule) -> Rule:
    """Take a rule for events.

    Raises:
        TypeError: A value is of the wrong type.
        ValueError: A value is out of range, or there is no such key.
    """
    for key, value in rule.items():
        if key not in _CHECKS:
            raise ValueError(f"a rule for events has no {key!r}; allowed: {', '.join(_CHECKS)}")
        _CHECKS[key](key, value)
    if "match" not in rule:
        raise ValueError("a rule for events needs 'match', a pattern of types such as 'checkpoint.*'")
    return dict(rule)


def _check_match(key: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{key} must be a pattern such as 'checkpoint.*', not {value!r}")


def _check_enabled(key: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{key} must be True or False, not {value!r}")


def _check_severity(key: str, value: object) -> None:
    if not isinstance(value, str) or value not in LEVELS:
        raise ValueError(f"{key} must be one of {', '.join(LEVELS)}, not {value!r}")


def _check_sample(key: str, value: object) -> None:
    _check_number(key, value)
    if not 0.0 <= value <= 1.0:  # type: ignore[operator]  # a number
        raise ValueError(f"{key} must be a share from 0 to 1, not {value!r}")


def _check_rate(key: str, value: object) -> None:
    if value is not None:
        _check_number(key, value)
        if value < 0:  # type: ignore[operator]  # a number
            raise ValueError(f"{key} must be None or at least 0, not {value!r}")


def _check_number(key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{key} must be a number, not {value!r}")
    if not isfinite(value):
        raise ValueError(f"{key} must be finite, not {value!r}")


_CHECKS: Mapping[str, Callable[[str, object], None]] = {
    "match": _check_match,
    "enabled": _check_enabled,
    "severity": _check_severity,
    "sample": _check_sample,
    "per_second": _check_rate,
}
