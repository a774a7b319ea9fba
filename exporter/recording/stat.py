"""Stat: what training code records numbers with, and the registry of all that a process has.

Used by any thread. `Stat.add` is the buffer's own bound `append`; the recording thread does the rest. Making a Stat locks.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from time import time
from typing import TYPE_CHECKING

from exporter.errors import DefinitionError
from exporter.recording.definition import Rule, apply_rules, check_definition, check_rules, require
from exporter.recording.events import EVENTS
from exporter.recording.notices import tell_once
from exporter.recording.reserved import RESERVED, RESERVED_PREFIXES
from exporter.recording.state import StatState
from exporter.recording.tensors import TensorReader
from exporter.recording.timing import Timer
from exporter.recording.values import Aggregation, StatDefinition, WindowReading, families_of
from exporter.recording.worker import Handle, name_of

if TYPE_CHECKING:
    from typing_extensions import Self

MOST_STATS = 10_000
"""Beyond it a new Stat is made, but not kept: a label that runs away must not fill the job's memory."""
WAITING_WINDOWS = 10_000
"""Closed windows that may wait for a handler."""

Identity = tuple[str, tuple[tuple[str, str], ...]]


class Registry:
    """The Stats of one process, to be listed, looked up and switched."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._states: dict[Identity, StatState] = {}
        self._order: list[StatState] = []
        self._owners: dict[str, str] = {}  # family or sample name, and the Stat that publishes it
        self._firsts: dict[str, StatState] = {}  # of each name
        self._rules: list[Rule] = []
        self._switched: list[Rule] = []
        self._listeners: tuple[tuple[Callable[[StatState], bool], Handle], ...] = ()
        self.wake: Callable[[], None] = lambda: None  # called when a Stat was made
        self.refused = 0  # Stats that were made beyond `MOST_STATS` and are not recorded
        self.recording = True  # False with `EXPORTER_DISABLED=1`
        # drains every Stat, within so many seconds
        self.flush: Callable[[float], bool] = lambda _seconds: True

    def obtain(self, definition: StatDefinition, *, own: bool = False) -> StatState:
        """Give the state of a Stat, made now or earlier; DefinitionError where it was made otherwise, or its names are taken."""
        identity = (definition.name, definition.labels)
        # Without the lock: a signal handler or a finalizer may ask for a Stat while this thread is making one.
        known = self._states.get(identity)
        if known is None:
            is_full = self.recording and len(self._states) >= MOST_STATS
            if is_full:
                self.refused += 1
                told = f"{definition.name!r} and those made after it are not"
                tell_once("stats", f"only {MOST_STATS} Stats are recorded in a process: {told}")
            if is_full or not self.recording:
                return StatState(definition, wall=time(), samples=0)
            known = self._make(identity, definition, own=own)
            self.wake()
        if known.definition != definition:
            _differs(known, definition)
        return known

    def _make(self, identity: Identity, definition: StatDefinition, *, own: bool) -> StatState:
        with self._lock:
            state = StatState(definition, wall=time(), own=own)
            state.origin = _origin()
            self._claim_names(state)
            self._apply(state)
            # Another thread, or a handler that interrupted this one, may have been first.
            kept = self._states.setdefault(identity, state)
            if kept is state:
                self._order.append(state)
            return kept

    def states(self) -> tuple[StatState, ...]:
        """The state of every Stat, in order of construction; a snapshot that later Stats do not change."""
        return tuple(self._order)

    def find(self, name: str, labels: Mapping[str, str] | None = None) -> Stat | None:
        """Look a Stat up by its identity."""
        state = self._states.get((name, tuple(sorted((labels or {}).items()))))
        return None if state is None else Stat.of(state)

    def matching(self, pattern: str = "*") -> list[Stat]:
        """List those whose names match a pattern (`*`: any characters, `?`: one), in order of construction."""
        return [Stat.of(each) for each in self._order if fnmatchcase(each.definition.name, pattern)]

    def switch(self, pattern: str, *, enabled: bool) -> None:
        """Switch the Stats whose names match a shell pattern on or off, those still to be made included.

        What was counted stays counted; samples added while a Stat is off are dropped.
        """
        with self._lock:
            others = [rule for rule in self._switched if rule["match"] != pattern]
            self._switched = [*others, {"match": pattern, "enabled": enabled}]
            for state in self._order:
                self._apply(state)

    def override(self, rules: Sequence[Rule]) -> list[str]:
        """Put the configuration's rules in force, before the code's own switches; gives what is wrong with those left out."""
        good, wrong = check_rules(rules)
        with self._lock:
            if good != self._rules:
                self._rules = good
                for state in self._order:
                    self._apply(state)
        return wrong

    def on_window(self, handler: Callable[[Stat, WindowReading], object], match: str = "*") -> Handle:
        """Have a handler given each window that closes with a sample in it, of the Stats whose names match a pattern.

        It is called with the Stat and the window, on a thread of its own, in order; what it raises, and what its queue has
        no room for, is counted. `unregister` of what is returned ends it; one that cannot be called is a TypeError.
        """
        return self._listen(handler, lambda state: fnmatchcase(state.definition.name, match))

    def _listen(
        self, handler: Callable[[Stat, WindowReading], object], wants: Callable[[StatState], bool]
    ) -> Handle:
        if not callable(handler):
            raise TypeError(f"a handler of windows must be a callable (stat, window), not {handler!r}")
        handle = EVENTS.register(
            lambda item: handler(Stat.of(item[0]), item[1]),
            types=(),
            queue=WAITING_WINDOWS,
            name=name_of(handler),
        )
        with self._lock:
            self._listeners = (*[each for each in self._listeners if each[1].registered], (wants, handle))
            for state in self._order:
                self._apply(state)
        return handle

    def after_fork(self) -> None:
        """In a forked child: forget what the parent recorded, keep the Stats."""
        self._lock = threading.RLock()
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
                told = f"the Stat {definition.name!r} would publish {name!r}, which is {whose}; choose another name"
                allowed = "a name whose families are free"
                raise DefinitionError(told, field="name", found=definition.name, allowed=allowed)
        self._owners.update(dict.fromkeys(names, definition.name))
        self._firsts[definition.name] = state


REGISTRY = Registry()
"""The Stats of this process."""


class Stat:
    """A named statistic: numbers go in, windows, quantiles, a histogram and exact totals come out.

    Identity is (name, labels): the same definition again is the same Stat.

    Args:
        name: Words of letters, digits and `_`, joined by dots: `training.batch.latency`.
        aggregations: What to compute over each window; None means MEAN, MAX, P50, P90, P95 and P99. The number
            of samples and their exact total and sum are always kept.
        window_seconds: Length of a window, at least 0.1; windows are aligned to multiples of it on the wall
            clock, so that all ranks' windows cover the same seconds. None for windows that only count.
        window_samples: Samples that close a window; with both limits, whichever comes first.
        unit: A base unit: `seconds`, `bytes`, `ratio`, … None for a plain number.
        help: One line for the people who read the dashboard.
        labels: Constant labels.
        buckets: Upper bounds of the histogram; None for a choice that suits the unit.
        stale_seconds: After so long without a sample, a window that only counts has no data.
        min_samples: A window with fewer samples has no data but their number, since a mean or a quantile of so few
            would be compared with those of many.

    Attributes:
        add: Record one number. Takes any int or float; what is not finite or not a number is counted and kept
            out of every aggregate. Never raises, never waits. Keep tensors out of it: see `add_tensor`.

    Raises:
        DefinitionError: Something is wrong with the definition, or it differs from an earlier one.

    Source: RFC-0018 (torch.monitor) and what its reviewers asked for.
    """

    __slots__ = ("_state", "add")

    add: Callable[[float], None]
    _state: StatState

    def __new__(
        cls,
        name: str,
        aggregations: Iterable[Aggregation | str] | None = None,
        *,
        window_seconds: float | None = 60.0,
        window_samples: int | None = None,
        unit: str | None = None,
        help: str = "",
        labels: Mapping[str, str] | None = None,
        buckets: Iterable[float] | None = None,
        stale_seconds: float = 300.0,
        min_samples: int = 1,
    ) -> Self:
        """Check the definition and make the Stat, or find it."""
        definition = check_definition(
            name,
            aggregations,
            window_seconds=window_seconds,
            window_samples=window_samples,
            unit=unit,
            help=help,
            labels=labels,
            buckets=buckets,
            stale_seconds=stale_seconds,
            min_samples=min_samples,
        )
        return cls.of(REGISTRY.obtain(definition))

    @classmethod
    def of(cls, state: StatState) -> Self:
        """Give the Stat of a state, always the same object."""
        known = _STATS.get((cls, state))
        if known is None:
            known = stat = super().__new__(cls)
            stat._state = state
            stat.add = state.buffer.append
            if state.buffer.maxlen:  # else beyond the registry's bound, or recording is disabled
                known = _STATS.setdefault((cls, state), stat)
        return known  # type: ignore[return-value]  # keyed by cls

    @classmethod
    def passive(
        cls,
        name: str,
        measure: Callable[[], float],
        aggregations: Iterable[Aggregation | str] | None = None,
        *,
        window_seconds: float = 15.0,
        unit: str | None = None,
        help: str = "",
        labels: Mapping[str, str] | None = None,
    ) -> Self:
        """Make a Stat that is measured by a callback, once per flush, on a thread that all callbacks share.

        What `measure` raises is counted; one that hangs costs the passive Stats. It must not call CUDA. Aggregations of
        None mean VALUE and MAX; the rest is as for any Stat.
        """
        require(callable(measure), "measure", measure, "callable")
        wanted = (Aggregation.VALUE, Aggregation.MAX) if aggregations is None else aggregations
        stat = cls(name, wanted, window_seconds=window_seconds, unit=unit, help=help, labels=labels)
        known = stat._state.measure
        require(
            known is None or known == measure,
            "measure",
            measure,
            f"{known!r}, which measures {name!r} already",
        )
        stat._state.measure = measure
        return stat

    def add_tensor(self, tensor: object) -> None:
        """Record the value of a torch tensor of one element; never waits for a GPU, never raises.

        A CPU tensor is read at once; the value of a CUDA tensor is recorded by a later call on this thread, or by
        `exporter.flush()` on it. Refused and counted: more than one element, other devices, a DTensor that is not
        replicated, calls during CUDA graph capture, and values beyond the copies that may be under way.
        """
        if self._state.tensors is None:
            self._state.tensors = TensorReader(self.add, self._state.refusals.append)
        self._state.tensors.add(tensor)

    def time(self) -> Timer:
        """Time a `with` block or, as a decorator, each call of a function or coroutine function; in seconds."""
        unit = self._state.definition.unit
        require(unit in {None, "seconds"}, "unit", unit, f"seconds or None for {self.name!r} to time")
        return Timer(self.add)

    def on_window(self, handler: Callable[[Stat, WindowReading], object]) -> Handle:
        """Have a handler given each window of this Stat that closes with a sample in it; see `Registry.on_window`."""
        return REGISTRY._listen(handler, lambda state: state is self._state)  # noqa: SLF001  # of this file

    def get(self) -> dict[Aggregation, float]:
        """Give the aggregations of the last closed window; empty when there is none, or no sample was in it."""
        return dict(self._state.closed.values)

    @property
    def name(self) -> str:
        """As the code wrote it."""
        return self._state.definition.name

    @property
    def definition(self) -> StatDefinition:
        """What is in force: the code's definition, changed by the configuration's overrides."""
        return self._state.effective

    @property
    def enabled(self) -> bool:
        """Whether it is recorded; see `Registry.switch` and the configuration's `recording:` rules."""
        return self._state.enabled

    @property
    def window(self) -> WindowReading:
        """The last closed window."""
        return self._state.closed

    @property
    def count(self) -> int:
        """Samples accepted since the process began, as far as they are drained (`exporter.flush()` drains)."""
        return self._state.count

    @property
    def sum(self) -> float:
        """Their exact sum."""
        return self._state.sum

    def __reduce__(self) -> tuple[object, ...]:
        """Copy and pickle it as its definition: a copy in this process is the same Stat."""
        return _remade, (type(self), self._state.definition)

    def __repr__(self) -> str:
        definition = self._state.effective
        labels = "".join(f", {name}={value!r}" for name, value in definition.labels)
        return f"<Stat {definition.name!r}{labels}: {self.count} samples>"


_STATS: dict[tuple[type[Stat], StatState], Stat] = {}
"""So that the same definition is the same object; as many as the registry keeps."""


def _remade(cls: type[Stat], definition: StatDefinition) -> Stat:
    known = REGISTRY.find(definition.name, dict(definition.labels))
    return cls.of(REGISTRY.obtain(definition)) if known is None else known


def metric(
    kind: str,
    name: str,
    *,
    unit: str | None = None,
    labels: Mapping[str, str] | None = None,
    buckets: Iterable[float] | None = None,
    own: bool = True,
) -> Callable[[float], None]:
    """Make a series of a family without windows, for faces and bridges; a counter is 0 from then on.

    The kind is `counter` (its value is the sum of what is added), `gauge` (the latest), `histogram` or `summary`; the
    counter `training.elastic.restarts` becomes `training_elastic_restarts_total`. A name of the exporter's own is declared
    in the sidecar (`exporter.ledger.admission`), which admits nothing else to it. Gives `add`; raises as `Stat` does.
    """
    aggregations = {Aggregation.HISTOGRAM} if kind == "histogram" else set()
    definition = check_definition(name, aggregations, unit=unit, labels=labels, buckets=buckets)
    return REGISTRY.obtain(definition.replace(kind=kind), own=own).buffer.append


def _shape(definition: StatDefinition) -> tuple[object, ...]:
    """What the Stats of one name must share, since they share their main family."""
    histogram = Aggregation.HISTOGRAM in definition.aggregations
    return definition.kind, definition.unit, definition.buckets, histogram


def _differs(known: StatState, second: StatDefinition) -> None:
    first = known.definition
    names = [each.name for each in dataclasses.fields(first) if each.name != "labels"]
    found = [name for name in names if getattr(first, name) != getattr(second, name)]
    told = [f"{name} {getattr(first, name)!r} and now {getattr(second, name)!r}" for name in found]
    raise DefinitionError(
        f"the Stat {first.name!r} was first made at {known.origin} with another definition: {', '.join(told)}",
        field=found[0],
        found=getattr(second, found[0]),
        allowed="the same definition, or another name or labels",
    )


def _origin() -> str:
    frame = sys._getframe(1)  # noqa: SLF001  # the only way to a caller's line that costs nothing
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("exporter"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
