"""Kinds of events: one for each (type, severity), with its count, its rules and who wants to be told.

Used in the training process, on the threads that log. What happens for each event is a dictionary look-up and a
few calls into C, without a lock; making a kind and changing the rules takes the lock of the `EventLog`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from itertools import count
from math import isfinite
from queue import SimpleQueue
from time import monotonic
from typing import Any, Protocol

from exporter.recording.event_values import LEVELS, Event
from exporter.recording.identity import clean_text
from exporter.recording.worker import Counter, Worker

DEFAULT_PER_SECOND = 10_000.0
"""Events of one kind that handlers are given each second unless a rule says otherwise: more is a flood."""

Rule = Mapping[str, object]
"""`match`, a shell pattern of types, and any of `enabled`, `severity`, `sample` and `per_second`."""

Adapt = Callable[[Event, object], object]

_CONTAINERS = (list, deque, SimpleQueue)
_CONTAINER_METHODS = frozenset({"append", "appendleft", "put", "put_nowait"})


class EventHandler(Protocol):
    """An object that is given events.

    It may also have `flush()`, called when its queue has run empty and at the latest after every 256 events: until
    then its events count as neither delivered nor dropped.
    """

    def handle(self, event: Any) -> object:
        """Take one `Event`, or what `adapt` has made of it."""
        ...


class Delivery:
    """Takes the events of the types and severities that one handler wants to it.

    A container's own method (`list.append`, `deque.append`, `SimpleQueue.put`) can neither hang nor run anybody's
    code, so it is called at once, on the thread that logs.

    Args:
        handler: A callable that takes an event, or an object with `handle(event)`.
        name: Label value under which it is counted.
        types: Shell patterns of the types that it wants; None for all.
        severity: The least severity that it wants.
        queue: Events that may wait.
        adapt: Makes what the handler takes out of an event and the object that was logged; on the handler's thread.
        own: Instances of this class are handed on as they were logged where that is done at once.

    Attributes:
        name: As given.
        own: As given.
        direct: Whether the handler is called at once, on the thread that logs.
        worker: Calls it otherwise.
    """

    def __init__(
        self,
        handler: Any,
        *,
        name: str,
        types: tuple[str, ...] | None,
        severity: str,
        queue: int,
        adapt: Adapt | None = None,
        own: type | None = None,
    ) -> None:
        self.name = name
        self.own = own
        self._handle: Callable[[Any], object] = getattr(handler, "handle", None) or handler
        self._types = types
        self._level = LEVELS[severity]
        self._adapt = adapt
        self.direct = is_container_method(handler)
        self._taken = Counter()
        flush = getattr(handler, "flush", None) if hasattr(handler, "handle") else None
        self.worker = Worker(self._give, name=f"events-{name}", bound=queue, flush=flush)

    def after_fork(self) -> None:
        """Begin anew."""
        self._taken = Counter()
        self.worker.after_fork()

    @property
    def delivered(self) -> int:
        """Events that the handler took."""
        return self.worker.done + self._taken.read()

    def wants(self, type: str, severity: str) -> bool:
        """Whether it is to be given events of this type and severity."""
        if LEVELS[severity] < self._level:
            return False
        return self._types is None or any(fnmatchcase(type, pattern) for pattern in self._types)

    def take_at_once(self, item: object) -> None:
        """Call the handler here and now; only for those that are `direct`."""
        self._handle(item)
        self._taken.bump()

    def put(self, event: Any, origin: object = None) -> None:
        """Hand over one event, or what else its registrar puts in the place of one; never raises, never waits."""
        if self.direct:
            self.take_at_once(event if self._adapt is None else self._adapt(event, origin))
        else:
            self.worker.put((event, origin))

    def _give(self, item: tuple[Any, object]) -> None:
        self._handle(item[0] if self._adapt is None else self._adapt(*item))


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

    def __init__(
        self, type: str | None, severity: str, occurrences: Occurrences, note: Callable[[Any], None]
    ) -> None:
        self.type = type
        self.severity = severity
        self.enabled = self.quiet = True
        self.limited = False
        self.note = note
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
        self._number = count().__next__

    def obey(self, rules: Sequence[Rule]) -> None:
        """Take the rules that match, the later one winning."""
        found = combined(self.type or "", rules)
        self.enabled = is_enabled(found, self.severity)
        self._sample = float(found.get("sample", 1.0))  # type: ignore[arg-type]  # checked when the rule was made
        self.limited = self._sample < 1.0 or "per_second" in found
        rate = found.get("per_second", DEFAULT_PER_SECOND)
        self._per_second = None if rate is None else float(rate)  # type: ignore[arg-type]  # likewise
        self._ends = 0.0

    def admits(self, _number: int = 0) -> bool:
        """Whether the handlers are given the next one; by how many came before, and how many they were given this second.

        Sampling takes every n-th, beginning with the first, so that it needs no random numbers: the job's
        generators are the job's.
        """
        share = self._sample
        if share < 1.0:
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


def combined(type: str, rules: Sequence[Rule]) -> dict[str, object]:
    """Put together what all matching rules say of a type."""
    found: dict[str, object] = {}
    for rule in rules:
        if fnmatchcase(type, str(rule["match"])):
            found.update(rule)
    return found


def is_enabled(combined_rule: Rule, severity: str) -> bool:
    """Whether events of a severity are recorded under a rule."""
    least = LEVELS[str(combined_rule.get("severity", "debug"))]
    return bool(combined_rule.get("enabled", True)) and LEVELS[severity] >= least


def check_rule(rule: Rule) -> Rule:
    """Take a rule for events.

    Raises:
        TypeError: A value is of the wrong type.
        ValueError: A value is out of range, or there is no such key.
    """
    for key, value in rule.items():
        if key not in _CHECKS:
            raise ValueError(f"a rule for events has no {key!r}; allowed: {', '.join(_CHECKS)}")
        types, in_range, wanted = _CHECKS[key]
        if not isinstance(value, types) or (isinstance(value, bool) and key != "enabled"):
            raise TypeError(f"{key} must be {wanted}, not {value!r}")
        if not in_range(value):
            raise ValueError(f"{key} must be {wanted}, not {value!r}")
    if "match" not in rule:
        raise ValueError("a rule for events needs 'match', a pattern of types such as 'checkpoint.*'")
    return dict(rule)


_CHECKS: Mapping[str, tuple[tuple[type, ...], Callable[[Any], bool], str]] = {
    "match": ((str,), lambda _: True, "a pattern such as 'checkpoint.*'"),
    "enabled": ((bool,), lambda _: True, "True or False"),
    "severity": ((str,), LEVELS.__contains__, f"one of {', '.join(LEVELS)}"),
    "sample": ((int, float), lambda share: 0.0 <= share <= 1.0, "a share from 0 to 1"),
    "per_second": (
        (int, float, type(None)),
        lambda rate: rate is None or (isfinite(rate) and rate >= 0),
        "None or a finite number of at least 0",
    ),
}
"""Of each key of a rule: its types, whether a value is in range, and what is wanted."""


def is_container_method(handler: object) -> bool:
    """Whether calling it can only put something into a list, a deque or a SimpleQueue."""
    return (
        type(getattr(handler, "__self__", None)) in _CONTAINERS
        and type(handler) is type([].append)
        and getattr(handler, "__name__", "") in _CONTAINER_METHODS
    )


def name_of(handler: object) -> str:
    """Name a handler for people: a function by its name, an object by its class."""
    if is_container_method(handler):
        return f"{type(handler.__self__).__name__}.{handler.__name__}"  # type: ignore[attr-defined]  # a bound method
    name = getattr(handler, "__qualname__", None) or type(handler).__qualname__
    return clean_text(str(name).replace("<locals>.", ""))[:100] or "handler"
