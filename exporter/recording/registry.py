"""Registry: the state of every Stat of a process, made once, switched on and off by pattern.

Used in the training process, by any thread. Making a Stat takes a lock; nothing that happens per sample does.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Sequence
from time import time

from exporter.errors import DefinitionError
from exporter.recording.naming import families_of
from exporter.recording.notices import tell_once
from exporter.recording.overrides import Rule, apply_rules, check_rules
from exporter.recording.reserved import RESERVED, RESERVED_PREFIXES
from exporter.recording.state import BUFFER_SAMPLES, StatState
from exporter.recording.values import Aggregation, StatDefinition

MOST_STATS = 10_000
"""Beyond it a new Stat is made, but not kept: a label that runs away must not fill the job's memory."""

Identity = tuple[str, tuple[tuple[str, str], ...]]


class Registry:
    """The Stats of one process.

    Attributes:
        refused: Stats that were made beyond `MOST_STATS` and are not recorded.
        origins: Where each Stat was first made, `file:line`.
        recording: Whether anything is recorded; False with `EXPORTER_DISABLED=1`.
        discard: Lets go of objects whose end may run the job's code.
    """

    def __init__(self, *, clock: Callable[[], float] = time) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._states: dict[Identity, StatState] = {}
        self._order: tuple[StatState, ...] = ()
        self._owners: dict[str, str] = {}
        self._firsts: dict[str, StatDefinition] = {}
        self._rules: list[Rule] = []
        self._switched: list[Rule] = []
        self._wake: Callable[[], None] = lambda: None
        self.origins: dict[Identity, str] = {}
        self.refused = 0
        self.recording = True
        self.discard: Callable[[list[object]], object] = list.clear

    def on_first(self, start: Callable[[], None]) -> None:
        """Say what is to be called whenever a Stat was made; it must be cheap and never raise."""
        self._wake = start

    def obtain(self, definition: StatDefinition, *, own: bool = False) -> StatState:
        """Give the state of a definition, made now or earlier.

        Args:
            definition: Checked.
            own: Whether it is one of the exporter's own families, whose names are refused to everybody else.

        Raises:
            DefinitionError: The same name and labels have another definition, or the names of its families
                are taken.
        """
        identity = (definition.name, definition.labels)
        # Without the lock: a signal handler or a finalizer may ask for a Stat while this thread is making one.
        known = self._states.get(identity)
        if known is None:
            if len(self._states) >= MOST_STATS or not self.recording:
                if self.recording:
                    self.refused += 1
                    tell_once(
                        "stats",
                        f"only {MOST_STATS} Stats are recorded in a process: {definition.name!r} and those made after it are not",
                    )
                return StatState(definition, wall=self._clock(), samples=0)
            known = self._make(identity, definition, own=own)
            self._wake()
        if known.definition != definition:
            self._differs(identity, known.definition, definition)
        return known

    def _make(self, identity: Identity, definition: StatDefinition, *, own: bool) -> StatState:
        with self._lock:
            self._claim_names(definition, own=own)
            state = StatState(
                definition, wall=self._clock(), samples=BUFFER_SAMPLES, own=own, discard=self._discard
            )
            self._apply(state)
            # Another thread, or a handler that interrupted this one, may have been first.
            kept = self._states.setdefault(identity, state)
            if kept is state:
                self.origins[identity] = _origin()
            while len(self._order) != len(self._states):  # a handler may make another between two steps
                self._order = tuple(self._states.values())
            return kept

    def states(self) -> tuple[StatState, ...]:
        """Every state, in order of construction; a snapshot that later Stats do not change."""
        return self._order

    def switch(self, pattern: str, *, enabled: bool) -> None:
        """Switch the Stats whose names match a shell pattern on or off, those still to be made included.

        What was counted stays counted; samples added while a Stat is off are dropped.
        """
        with self._lock:
            self._switched = [rule for rule in self._switched if rule["match"] != pattern]
            self._switched.append({"match": pattern, "enabled": enabled})
            for state in self.states():
                self._apply(state)

    def override(self, rules: Sequence[Rule]) -> list[str]:
        """Put the configuration's rules in force; the code's own switches come after them.

        Returns:
            What is wrong with the rules that were left out.
        """
        good, wrong = check_rules(rules)
        with self._lock:
            if good != self._rules:
                self._rules = good
                for state in self.states():
                    self._apply(state)
        return wrong

    def after_fork(self) -> None:
        """In a forked child: forget what the parent recorded, keep the Stats."""
        self._lock = threading.RLock()
        now = self._clock()
        for state in self.states():
            state.reset(wall=now)

    def _discard(self, objects: list[object]) -> None:
        self.discard(objects)

    def _apply(self, state: StatState) -> None:
        definition, enabled = apply_rules(state.definition, [*self._rules, *self._switched])
        if definition != state.effective or enabled is not state.enabled:
            state.override(definition, enabled=enabled)

    def _claim_names(self, definition: StatDefinition, *, own: bool) -> None:
        first = self._firsts.get(definition.name)
        if first is not None:
            if _shape(first) != _shape(definition):
                self._differs((first.name, first.labels), first, definition)
            return
        # All that it could publish, since an override may ask for other aggregations later.
        names = families_of(definition.replace(aggregations=frozenset(Aggregation))).names()
        for name in sorted(names):
            owner = self._owners.get(name)
            reserved = not own and (name in RESERVED or name.startswith(RESERVED_PREFIXES))
            if reserved or (owner is not None and owner != definition.name):
                whose = "reserved for the exporter" if reserved else f"already a family of the Stat {owner!r}"
                raise DefinitionError(
                    f"the Stat {definition.name!r} would publish {name!r}, which is {whose}; choose another name",
                    field="name",
                    found=definition.name,
                    allowed="a name whose families are free",
                )
        self._owners.update(dict.fromkeys(names, definition.name))
        self._firsts[definition.name] = definition

    def _differs(self, identity: Identity, first: StatDefinition, second: StatDefinition) -> None:
        fields = [
            name
            for name in (field.name for field in dataclasses.fields(first))
            if getattr(first, name) != getattr(second, name) and name != "labels"
        ]
        differences = ", ".join(
            f"{name} {getattr(first, name)!r} and now {getattr(second, name)!r}" for name in fields
        )
        raise DefinitionError(
            f"the Stat {first.name!r} was first made at {self.origins.get(identity, 'an unknown place')} "
            f"with another definition: {differences}",
            field=fields[0] if fields else "name",
            found=getattr(second, fields[0]) if fields else second.name,
            allowed="the same definition, or another name or labels",
        )


def _shape(definition: StatDefinition) -> tuple[object, ...]:
    """What the Stats of one name must share, since they share their main family."""
    return (
        definition.kind,
        definition.unit,
        definition.buckets,
        Aggregation.HISTOGRAM in definition.aggregations,
    )


def _origin() -> str:
    frame = sys._getframe(1)  # noqa: SLF001  # the only way to a caller's line that costs nothing
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("exporter"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
