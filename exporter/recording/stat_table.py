"""Table of a process's Stats: construction, name conflicts, and rules that change or disable Stats.

All methods may be called on any thread. The first construction of a Stat takes a lock.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from time import time

from exporter.errors import DefinitionError
from exporter.recording.definition import StatRule, apply_rules, check_rules
from exporter.recording.handle import Handle
from exporter.recording.notices import log_once
from exporter.recording.reserved import RESERVED, RESERVED_PREFIXES
from exporter.recording.stat_state import StatState
from exporter.recording.values import Aggregation, StatDefinition, families_of
from exporter.recording.worker import Worker

MAX_STATS = 10_000
"""Maximum number of recorded Stats. Further Stats are not recorded, so that an unbounded label does not fill the memory."""

Identity = tuple[str, tuple[tuple[str, str], ...]]
"""Name and labels of a Stat."""


class StatTable:
    """States of a process's Stats, by name and labels.

    Attributes:
        refused_stats: Number of constructions refused because of `MAX_STATS`. A repeated construction counts again.
        is_recording: False if nothing is recorded in this process.
        batch_handlers: Handlers of the samples of the job's Stats, in batches.
    """

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        self._lock = threading.RLock()
        self._states: dict[Identity, StatState] = {}
        self._order: list[StatState] = []  # in order of construction
        self._owners: dict[str, str] = {}  # name of the Stat by family or sample name
        self._first_states: dict[str, StatState] = {}  # first state by name of the Stat
        self._configured_rules: list[StatRule] = []  # of the sidecar's configuration
        self._code_rules: list[StatRule] = []  # of `set_enabled`
        # selections of Stats, with the handlers of their windows
        self._window_handlers: tuple[tuple[Callable[[StatState], bool], Handle], ...] = ()
        self._wake = wake  # called when a Stat is constructed
        self.refused_stats = 0
        self.is_recording = True
        self.batch_handlers: list[Handle] = []
        self._disposal = Worker(list.clear, name="disposal", bound=1 << 20)

    def get_or_create(self, definition: StatDefinition, *, is_exporter_family: bool = False) -> StatState:
        """Return the state of a Stat, created on first use. Raises DefinitionError for a conflicting definition or name."""
        identity = (definition.name, definition.labels)
        # Looked up without the lock, because a signal handler or a finalizer may run while this thread constructs a Stat.
        state = self._states.get(identity)
        if state is None:
            is_full = self.is_recording and len(self._states) >= MAX_STATS
            if is_full:
                self.refused_stats += 1
                log_once(
                    "stats",
                    f"{definition.name!r} and later Stats are ignored: a process records at most {MAX_STATS} Stats",
                )
            if self._wake is not None:
                self._wake()
            if is_full or not self.is_recording:
                return StatState(definition, wall=time(), max_samples=0)
            state = self._create(identity, definition, is_exporter_family=is_exporter_family)
        if state.definition != definition:
            _raise_conflict(state, definition)
        return state

    def _create(
        self, identity: Identity, definition: StatDefinition, *, is_exporter_family: bool
    ) -> StatState:
        """Construct and register the state of a Stat, unless another thread has done so meanwhile."""
        with self._lock:
            state = StatState(
                definition,
                wall=time(),
                is_exporter_family=is_exporter_family,
                batch_handlers=self.batch_handlers,
                dispose=self._disposal.put,
            )
            state.origin = _origin()
            self._claim_names(state)
            self._apply(state)
            # Another thread, or a signal handler on this thread, may have constructed the same Stat.
            registered_state = self._states.setdefault(identity, state)
            if registered_state is state:
                self._order.append(state)
            return registered_state

    def __len__(self) -> int:
        return len(self._order)

    def states(self) -> tuple[StatState, ...]:
        """Return the states of all recorded Stats, in order of construction."""
        return tuple(self._order)

    def set_enabled(self, pattern: str, *, enabled: bool) -> None:
        """Enable or disable the Stats whose names match a shell pattern, including Stats constructed later.

        Counts are kept. Samples added to a disabled Stat are dropped.
        """
        with self._lock:
            other_rules = [rule for rule in self._code_rules if rule["match"] != pattern]
            self._code_rules = [*other_rules, {"match": pattern, "enabled": enabled}]
            for state in self._order:
                self._apply(state)

    def replace_configured_rules(self, rules: Sequence[StatRule]) -> list[str]:
        """Replace the Stat rules of the configuration. Return a sentence for each invalid rule.

        The rules of `set_enabled` apply later, and so take precedence.
        """
        valid_rules, problems = check_rules(rules)
        with self._lock:
            if valid_rules != self._configured_rules:
                self._configured_rules = valid_rules
                for state in self._order:
                    self._apply(state)
        return problems

    def get(self, name: str, labels: Mapping[str, str] | None = None) -> StatState | None:
        """Return the state of a Stat by its identity, or None."""
        return self._states.get((name, tuple(sorted((labels or {}).items()))))

    def add_window_handler(self, handle: Handle, is_selected: Callable[[StatState], bool]) -> None:
        """Deliver closed windows with samples to a handler, for the Stats for which *is_selected* returns True."""
        with self._lock:
            self._window_handlers = (
                *[entry for entry in self._window_handlers if entry[1].is_registered],
                (is_selected, handle),
            )
            for state in self._order:
                self._apply(state)

    def after_fork(self) -> None:
        """Discard the parent's values in a forked child, which keeps the Stats."""
        self._lock = threading.RLock()
        self._disposal.after_fork()
        for state in self._order:
            state.after_fork(wall=time())

    def _apply(self, state: StatState) -> None:
        """Apply the Stat rules and the window handlers to a Stat. The caller holds the lock."""
        state.window_handlers = tuple(
            [handle for is_selected, handle in self._window_handlers if is_selected(state)]
        )
        definition, enabled = apply_rules(state.definition, [*self._configured_rules, *self._code_rules])
        if definition != state.effective or enabled is not state.enabled:
            state.override(definition, enabled=enabled)

    def _claim_names(self, state: StatState) -> None:
        """Reserve the families of a new Stat. The caller holds the lock.

        Raises:
            DefinitionError: A family is reserved for the exporter or belongs to another Stat. Or a Stat of the same name with other labels
                differs in the kind, the unit, the buckets, or in the use of a histogram.
        """
        definition = state.definition
        first_state = self._first_states.get(definition.name)
        if first_state is not None:
            if _shape(first_state.definition) != _shape(definition):
                _raise_conflict(first_state, definition)
            return
        # All families that the Stat could publish, because a Stat rule may add aggregations later.
        names = families_of(definition.replace(aggregations=frozenset(Aggregation))).names()
        for name in sorted(names):
            owner = self._owners.get(name, definition.name)
            is_reserved = not state.is_exporter_family and (
                name in RESERVED or name.startswith(RESERVED_PREFIXES)
            )
            if is_reserved or owner != definition.name:
                claim = (
                    "reserved for the exporter" if is_reserved else f"already a family of the Stat {owner!r}"
                )
                message = f"the Stat {definition.name!r} would publish {name!r}, which is {claim}; choose another name"
                allowed = "a name whose families are free"
                raise DefinitionError(message, field="name", found=definition.name, allowed=allowed)
        self._owners.update(dict.fromkeys(names, definition.name))
        self._first_states[definition.name] = state


def _shape(definition: StatDefinition) -> tuple[object, ...]:
    """Return the part of a definition that is the same for all Stats of a name, because they share a main family."""
    has_histogram = Aggregation.HISTOGRAM in definition.aggregations
    return definition.kind, definition.unit, definition.buckets, has_histogram


def _raise_conflict(existing: StatState, definition: StatDefinition) -> None:
    """Raise the DefinitionError for a definition that differs from the one of an existing Stat of the same name."""
    old = existing.definition
    names = [field.name for field in dataclasses.fields(old) if field.name != "labels"]
    changed_fields = [name for name in names if getattr(old, name) != getattr(definition, name)]
    changes = [
        f"{name} {getattr(old, name)!r} and now {getattr(definition, name)!r}" for name in changed_fields
    ]
    raise DefinitionError(
        f"the Stat {old.name!r} was first constructed at {existing.origin} with a different definition: {', '.join(changes)}",
        field=changed_fields[0],
        found=getattr(definition, changed_fields[0]),
        allowed="the same definition, or another name or labels",
    )


def _origin() -> str:
    """Return the source line outside the exporter that constructs a Stat, as `file:line`."""
    frame = sys._getframe(1)  # noqa: SLF001  # the cheapest access to the caller's line
    while frame.f_back is not None and _is_own_module(frame.f_globals.get("__name__")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_own_module(name: object) -> bool:
    return isinstance(name, str) and name.partition(".")[0] in {"exporter", "exporter_auto"}
