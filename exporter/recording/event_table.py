"""The table of kinds: which events there are, where each is counted, and what the rules say of it.

Used in the training process. Changed under the lock of the `EventLog` that owns it; the threads that log only
look kinds up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from exporter.recording.event_kinds import Kind, Occurrences, Rule, check_rule, combined
from exporter.recording.event_values import LEVELS, check_severity, check_type
from exporter.recording.identity import clean_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import datetime

MOST_TYPES = 100
"""Types that are counted apart; the rest is `other`."""
MOST_KINDS = 1000
"""(type, severity) pairs with a memory of their own; beyond it they share one for each severity."""
LONGEST_LABEL = 200
OTHER = "other"

Pair = tuple[str, str]


class KindTable:
    """All kinds of a process.

    Args:
        prepare: Called with a kind that is new, or that other rules are in force for.

    Attributes:
        kinds: By type and severity. Faces keep kinds, so none is ever thrown away.
        open: Whether everything is recorded, whatever it is.
    """

    def __init__(self, prepare: Callable[[Kind], None]) -> None:
        self.kinds: dict[Pair, Kind] = {}
        self.open = True
        self._prepare = prepare
        self._crowd: dict[str, Kind] = {}
        self._rules: dict[str, Rule] = {}
        self._outer_rules: tuple[Rule, ...] = ()
        self._recording = True
        self._allowed: frozenset[str] | None = None
        self._most_types = MOST_TYPES
        self.begin()

    def begin(self) -> None:
        """Count from zero."""
        self._occurrences: dict[Pair, Occurrences] = {}
        self._labels: set[str] = set()
        self._suppressed: dict[Pair, int] = {}
        for kind in self.every():
            kind.restart(self._counted_as(kind))

    @property
    def recording(self) -> bool:
        """Whether anything is recorded at all."""
        return self._recording

    @recording.setter
    def recording(self, recording: bool) -> None:
        self._recording = recording
        self._obey()

    def every(self) -> list[Kind]:
        """List all kinds."""
        return [*self.kinds.values(), *self._crowd.values()]

    def obtain(self, type: str, severity: str) -> Kind:
        """Find a kind, or make it.

        Raises:
            TypeError: The type is no text.
            ValueError: The type is empty, or there is no such severity.
        """
        own = check_type(type), check_severity(severity)
        kind = self.kinds.get(own)
        if kind is None and len(self.kinds) < MOST_KINDS:
            kind = self.kinds[own] = Kind(*own, self._occurrences_of(*own))
            self._settle(kind)
        elif kind is None:
            kind = self._crowd.get(own[1])
            if kind is None:
                kind = self._crowd[own[1]] = Kind(None, own[1], self._occurrences_of(OTHER, own[1]))
                self._settle(kind)
        return kind

    def allows(self, type: str, severity: str) -> bool:
        """Whether events of this type and severity would be recorded, whether or not there is a kind for them."""
        kind = self.kinds.get((type, severity))
        if kind is not None or not self._recording:
            return kind is not None and kind.enabled
        found = combined(type, self._in_force())
        least = LEVELS[str(found.get("severity", "debug"))]
        return bool(found.get("enabled", True)) and LEVELS[check_severity(severity)] >= least

    def limit(self, match: str, rule: Mapping[str, object]) -> None:
        """Take a rule of the code in the place of the one for the same pattern; an empty one forgets it.

        Raises:
            TypeError: A value is of the wrong type.
            ValueError: A value is out of range, or there is no such rule.
        """
        checked = check_rule({"match": match, **rule})
        self._rules.pop(match, None)
        if rule:
            self._rules[match] = checked
        self._obey()

    def override(self, rules: Iterable[Rule]) -> list[str]:
        """Take the configuration's rules in the place of those before; says what is wrong with those left out."""
        good: list[Rule] = []
        wrong: list[str] = []
        for number, rule in enumerate(rules, 1):
            try:
                good.append(check_rule(rule))
            except (TypeError, ValueError) as error:  # noqa: PERF203  # each rule stands for itself
                wrong.append(f"events rule {number}: {error}")
        self._outer_rules = tuple(good)
        self._obey()
        return wrong

    def count_types(self, allowed: frozenset[str] | None, most: int) -> None:
        """Count these types apart from now on, or so many of those that come first."""
        self._allowed, self._most_types = allowed, most
        self._labels.clear()
        for kind in self.every():
            _add_suppressed(kind, self._suppressed)
            kind.restart(self._counted_as(kind))

    def counts(self) -> tuple[dict[Pair, int], dict[Pair, float], dict[Pair, int]]:
        """Tell how many there were, when the latest happened, and how many were kept from the handlers."""
        counts = {
            each.labels: number for each in self._occurrences.values() if (number := each.counter.read())
        }
        last = {
            pair: when
            for pair, each in self._occurrences.items()
            if pair in counts and (when := _when(each.last)) is not None
        }
        suppressed = dict(self._suppressed)
        for kind in self.every():
            _add_suppressed(kind, suppressed)
        return counts, last, suppressed

    def _in_force(self) -> list[Rule]:
        return [*self._outer_rules, *self._rules.values()]

    def _obey(self) -> None:
        rules = self._in_force()
        self.open = self._recording and not any("enabled" in rule or "severity" in rule for rule in rules)
        for kind in self.every():
            self._settle(kind)

    def _settle(self, kind: Kind) -> None:
        kind.obey(self._in_force())
        kind.enabled = kind.enabled and self._recording
        self._prepare(kind)

    def _counted_as(self, kind: Kind) -> Occurrences:
        return self._occurrences_of(OTHER if kind.type is None else kind.type, kind.severity)

    def _occurrences_of(self, type: str, severity: str) -> Occurrences:
        label = clean_text(type)[:LONGEST_LABEL]
        if label not in self._labels:
            room = len(self._labels) < self._most_types
            if room and (self._allowed is None or type in self._allowed):
                self._labels.add(label)
            else:
                label = OTHER
        pair = label, severity
        if pair not in self._occurrences:
            self._occurrences[pair] = Occurrences(*pair)
        return self._occurrences[pair]


def _add_suppressed(kind: Kind, into: dict[Pair, int]) -> None:
    for reason, counter in kind.suppressed.items():
        number = counter.read()
        if number:
            pair = kind.occurrences.labels[0], reason
            into[pair] = into.get(pair, 0) + number


def _when(last: float | datetime | None) -> float | None:
    if last is None or isinstance(last, float):
        return last
    try:
        return last.timestamp()
    except (OverflowError, ValueError, OSError):
        return None  # a year that Unix time does not reach here
