"""The table of a process's Stats: construction, name conflicts, overrides and switches.

Runs on any thread; constructing a Stat locks.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from time import time

from exporter.errors import DefinitionError
from exporter.recording.definition import Rule, apply_rules, check_rules
from exporter.recording.handle import Handle
from exporter.recording.notices import log_once
from exporter.recording.reserved import RESERVED, RESERVED_PREFIXES
from exporter.recording.state import StatState
from exporter.recording.values import Aggregation, StatDefinition, families_of
from exporter.recording.worker import Worker

MAX_STATS = 10_000
"""Stats beyond this number are constructed but not recorded: an unbounded label must not fill the job's memory."""

Identity = tuple[str, tuple[tuple[str, str], ...]]


class StatTable:
    """States of a process's Stats, by name and labels.

    Attributes:
        refused: Stats that were constructed beyond `MAX_STATS` and are not recorded.
        recording: False if nothing is recorded in this process.
        taps: Handlers that are given every Stat of the job with each batch of its samples.
    """

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        self._lock = threading.RLock()
        self._states: dict[Identity, StatState] = {}
        self._order: list[StatState] = []
        self._owners: dict[str, str] = {}  # family or sample name, and the Stat that publishes it
        self._firsts: dict[str, StatState] = {}  # of each name
        self._rules: list[Rule] = []
        self._switched: list[Rule] = []
        self._listeners: tuple[tuple[Callable[[StatState], bool], Handle], ...] = ()
        self._wake = wake  # called when a Stat was constructed
        self.refused = 0
        self.recording = True
        self.taps: list[Handle] = []
        self._disposal = Worker(list.clear, name="disposal", bound=1 << 20)

    def obtain(self, definition: StatDefinition, *, own: bool = False) -> StatState:
        """Return the state of a Stat, constructed now or earlier; raises DefinitionError for a conflict of definition or name."""
        identity = (definition.name, definition.labels)
        # Without the lock: a signal handler or a finalizer may need a Stat while this thread constructs another.
        known = self._states.get(identity)
        if known is None:
            is_full = self.recording and len(self._states) >= MAX_STATS
            if is_full:
                self.refused += 1
                rest = f"{definition.name!r} and all later Stats are ignored"
                log_once("stats", f"only {MAX_STATS} Stats are recorded in a process: {rest}")
            if self._wake is not None:
                self._wake()
            if is_full or not self.recording:
                return StatState(definition, wall=time(), samples=0)
            known = self._make(identity, definition, own=own)
        if known.definition != definition:
            _differs(known, definition)
        return known

    def _make(self, identity: Identity, definition: StatDefinition, *, own: bool) -> StatState:
        with self._lock:
            state = StatState(definition, wall=time(), own=own, taps=self.taps, dispose=self._disposal.put)
            state.origin = _origin()
            self._claim_names(state)
            self._apply(state)
            # Another thread, or a signal handler on this thread, may have been first.
            kept = self._states.setdefault(identity, state)
            if kept is state:
                self._order.append(state)
            return kept

    def __len__(self) -> int:
        return len(self._order)

    def states(self) -> tuple[StatState, ...]:
        """Return the state of every Stat, in order of construction; a snapshot."""
        return tuple(self._order)

    def switch(self, pattern: str, *, enabled: bool) -> None:
        """Enable or disable the Stats whose names match a shell pattern, including Stats constructed later.

        What was counted stays counted; samples added while a Stat is off are dropped.
        """
        with self._lock:
            others = [rule for rule in self._switched if rule["match"] != pattern]
            self._switched = [*others, {"match": pattern, "enabled": enabled}]
            for state in self._order:
                self._apply(state)

    def override(self, rules: Sequence[Rule]) -> list[str]:
        """Apply the configuration's rules, before the code's own switches; returns the problems of invalid rules."""
        good, wrong = check_rules(rules)
        with self._lock:
            if good != self._rules:
                self._rules = good
                for state in self._order:
                    self._apply(state)
        return wrong

    def get(self, name: str, labels: Mapping[str, str] | None = None) -> StatState | None:
        """Return the state of a Stat by its identity, or None."""
        return self._states.get((name, tuple(sorted((labels or {}).items()))))

    def listen(self, handle: Handle, wants: Callable[[StatState], bool]) -> None:
        """Deliver each window that closes with a sample in it to a handler, for the Stats that *wants* selects."""
        with self._lock:
            self._listeners = (*[each for each in self._listeners if each[1].registered], (wants, handle))
            for state in self._order:
                self._apply(state)

    def after_fork(self) -> None:
        """In a forked child: forget what the parent recorded, keep the Stats."""
        self._lock = threading.RLock()
        self._disposal.after_fork()
        for state in self._order:
            state.after_fork(wall=time())

    def _apply(self, state: StatState) -> None:
        state.listeners = tuple([handle for wants, handle in self._listeners if wants(state)])
        definition, enabled = apply_rules(state.definition, [*self._rules, *self._switched])
        if definition != state.effective or enabled is not state.enabled:
            state.override(definition, enabled=enabled)

    def _claim_names(self, state: StatState) -> None:
        definition = state.definition
        first = self._firsts.get(definition.name)
        if first is not None:
            if _shape(first.definition) != _shape(definition):
                _differs(first, definition)
            return
        # All that it could publish, since an override may ask for other aggregations later.
        names = families_of(definition.replace(aggregations=frozenset(Aggregation))).names()
        for name in sorted(names):
            owner = self._owners.get(name, definition.name)
            reserved = not state.own and (name in RESERVED or name.startswith(RESERVED_PREFIXES))
            if reserved or owner != definition.name:
                whose = "reserved for the exporter" if reserved else f"already a family of the Stat {owner!r}"
                message = f"the Stat {definition.name!r} would publish {name!r}, which is {whose}; choose another name"
                allowed = "a name whose families are free"
                raise DefinitionError(message, field="name", found=definition.name, allowed=allowed)
        self._owners.update(dict.fromkeys(names, definition.name))
        self._firsts[definition.name] = state


def _shape(definition: StatDefinition) -> tuple[object, ...]:
    """Return the part of a definition that all Stats of a name share, because they share the main family."""
    histogram = Aggregation.HISTOGRAM in definition.aggregations
    return definition.kind, definition.unit, definition.buckets, histogram


def _differs(known: StatState, second: StatDefinition) -> None:
    first = known.definition
    names = [each.name for each in dataclasses.fields(first) if each.name != "labels"]
    found = [name for name in names if getattr(first, name) != getattr(second, name)]
    changes = [f"{name} {getattr(first, name)!r} and now {getattr(second, name)!r}" for name in found]
    raise DefinitionError(
        f"the Stat {first.name!r} was first made at {known.origin} with another definition: {', '.join(changes)}",
        field=found[0],
        found=getattr(second, found[0]),
        allowed="the same definition, or another name or labels",
    )


def _origin() -> str:
    frame = sys._getframe(1)  # noqa: SLF001  # the only way to a caller's line that costs nothing
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("exporter"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
