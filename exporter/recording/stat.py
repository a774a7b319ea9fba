"""Stat: a named statistic of the job, and the public registry of all Stats.

All methods may be called on any thread. `Stat.add` is the bound method `append` of the Stat's buffer and takes no lock. The first
construction of a Stat, `set_enabled` and `on_window` take a lock. The recording thread aggregates the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from exporter.recording.definition import check_definition, require
from exporter.recording.event_log import EventLog
from exporter.recording.handle import Handle, name_of
from exporter.recording.recorder import RECORDER
from exporter.recording.stat_state import StatState
from exporter.recording.stat_table import StatTable
from exporter.recording.timing import Timer
from exporter.recording.values import Aggregation, StatDefinition, WindowReading

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_QUEUED_WINDOWS = 10_000
"""Maximum number of closed windows that wait for a handler."""


class Registry:
    """Registry of the Stats of a process: listing, look-up, enabling and window handlers."""

    def __init__(self, table: StatTable, events: EventLog) -> None:
        self._table = table
        self._events = events

    def states(self) -> tuple[StatState, ...]:
        """Return the state of every Stat, in order of construction."""
        return self._table.states()

    def find(self, name: str, labels: Mapping[str, str] | None = None) -> Stat | None:
        """Return the Stat of a name and labels, or None if no such Stat is recorded."""
        state = self._table.get(name, labels)
        return None if state is None else Stat.from_state(state)

    def matching(self, pattern: str = "*") -> list[Stat]:
        """Return the Stats whose names match a shell pattern, in order of construction."""
        return [
            Stat.from_state(state) for state in self.states() if fnmatchcase(state.definition.name, pattern)
        ]

    def set_enabled(self, pattern: str, *, enabled: bool) -> None:
        """Enable or disable the Stats whose names match a shell pattern, including Stats constructed later.

        Counts are kept. Samples added to a disabled Stat are dropped.
        """
        self._table.set_enabled(pattern, enabled=enabled)

    def on_window(self, handler: Callable[[Stat, WindowReading], object], match: str = "*") -> Handle:
        """Call *handler* for each closed window with a sample, of the Stats whose names match a shell pattern.

        Calls `handler(stat, window)` in order, on a thread of its own. With fewer than `min_samples` samples, `window.values`
        is empty. Exceptions of the handler and windows dropped by a full queue are counted. The `unregister` method of the
        returned handle ends the delivery. Raises TypeError for a handler that is not callable, and for a pattern that is not a
        str.
        """
        if not isinstance(match, str):
            raise TypeError(f"match must be a pattern such as 'training.*', not {match!r}")
        return self.register_window_handler(handler, lambda state: fnmatchcase(state.definition.name, match))

    def register_window_handler(
        self, handler: Callable[[Stat, WindowReading], object], is_selected: Callable[[StatState], bool]
    ) -> Handle:
        """Register a handler of the windows of the Stats for which *is_selected* returns True."""
        if not callable(handler):
            raise TypeError(f"a handler of windows must be a callable (stat, window), not {handler!r}")
        handle = self._events.register(
            lambda item: handler(Stat.from_state(item[0]), item[1]),
            types=(),
            queue=MAX_QUEUED_WINDOWS,
            name=name_of(handler),
        )
        self._table.add_window_handler(handle, is_selected)
        return handle


class Stat:
    """Named statistic: windows, quantiles, cumulative count and sum of recorded numbers, and a histogram if requested.

    A Stat is identified by its name and labels: the same definition returns the same Stat. Above the limit of Stats, and in a
    process without recording, a new object is returned, which records nothing.

    Args:
        name: Words of letters, digits and `_`, joined by dots, such as `training.batch.latency`.
        aggregations: Aggregations of each window; None for MEAN, MAX, P50, P90, P95 and P99. The number of samples is published
            with any aggregations, and so is their sum if no sample was negative and the sum is finite.
        window_seconds: Length of a window, at least 0.1. Windows end at multiples of the length on the wall clock, so that the
            windows of all ranks coincide. None for count windows.
        window_samples: Number of samples that closes a window. With both limits, the first that is reached closes the window.
        unit: Base unit (`seconds`, `bytes`, `ratio`, …); None for a plain number.
        help: Single line for readers of the dashboard.
        labels: Constant labels.
        buckets: Only with HISTOGRAM: upper bounds of the histogram; None for the default of the unit.
        stale_seconds: Time without a sample after which a count window has no data.
        min_samples: A window with fewer samples publishes only its number of samples. The mean of a few samples is not comparable
            with the mean of many.

    Attributes:
        add: Records an int, float or bool, or a real number of numpy. Other values and values that are not finite are counted, and
            excluded from all aggregates. Never raises and never waits. For tensors, see `add_tensor`.

    Raises:
        DefinitionError: The definition is invalid, or differs from an earlier definition of the same Stat.

    Source: RFC-0018 (torch.monitor).
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
        """Return the Stat of the definition, constructed on first use."""
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
        return cls.from_state(RECORDER.stats.get_or_create(definition))

    @classmethod
    def from_state(cls, state: StatState) -> Self:
        """Return the Stat of a state: the same object for each call, if the state records samples."""
        stat = _STATS.get((cls, state))
        if stat is None:
            stat = super().__new__(cls)
            stat._state = state
            stat.add = state.buffer.append
            if state.buffer.maxlen:  # 0 for a Stat above the limit, or if recording is disabled
                stat = _STATS.setdefault((cls, state), stat)
        return stat  # type: ignore[return-value]  # keyed by cls

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
        """Return a Stat that a callback measures once per flush, on a thread shared by all callbacks.

        Exceptions of `measure` are counted. A callback that hangs pauses all passive Stats. The callback must not call CUDA. The
        default aggregations are VALUE and MAX; the other arguments are those of a Stat.
        """
        require(callable(measure), "measure", measure, "callable")
        if aggregations is None:
            aggregations = (Aggregation.VALUE, Aggregation.MAX)
        stat = cls(name, aggregations, window_seconds=window_seconds, unit=unit, help=help, labels=labels)
        callback = stat._state.measure
        require(
            callback is None or callback == measure,
            "measure",
            measure,
            f"{callback!r}, the callback already registered for {name!r}",
        )
        stat._state.measure = measure
        return stat

    def add_tensor(self, tensor: object) -> None:
        """Record the value of a torch tensor or JAX array of one element. Never waits for a device and never raises.

        A CPU tensor is read at once, and a JAX array if its value has been computed. Other values are recorded by a later call, or by
        `exporter.flush()`, on the same thread. These objects are refused and counted:

        - objects that are neither a torch tensor nor a JAX array
        - tensors and arrays that do not have exactly one element
        - torch tensors on a device other than CPU and CUDA
        - DTensors that are not replicated
        - tensors that are added during the capture of a CUDA graph
        - tensors above the limit of copies in flight
        """
        (self._state.tensors or self._state.tensor_reader()).add(tensor)

    def time(self) -> Timer:
        """Return a context manager and decorator that records the duration of a block or call in seconds.

        Raises DefinitionError if the Stat has a unit other than seconds.
        """
        unit = self._state.definition.unit
        require(unit in {None, "seconds"}, "unit", unit, f"seconds or None for {self.name!r} to time")
        return Timer(self.add)

    def on_window(self, handler: Callable[[Stat, WindowReading], object]) -> Handle:
        """Call *handler* for each closed window of this Stat with a sample; see `Registry.on_window`."""
        return REGISTRY.register_window_handler(handler, lambda state: state is self._state)

    def get(self) -> dict[Aggregation, float]:
        """Return the aggregations of the last closed window. Empty without a window, or with fewer than `min_samples` samples."""
        return dict(self._state.closed_window.values)

    @property
    def name(self) -> str:
        """Name of the Stat in the job's code."""
        return self._state.definition.name

    @property
    def definition(self) -> StatDefinition:
        """Effective definition: the definition in the code, changed by the Stat rules of the configuration."""
        return self._state.effective

    @property
    def enabled(self) -> bool:
        """False if `Registry.set_enabled` or a rule in the configuration's `recording:` disabled the Stat."""
        return self._state.enabled

    @property
    def window(self) -> WindowReading:
        """Latest closed window."""
        return self._state.closed_window

    @property
    def count(self) -> int:
        """Number of aggregated samples since the start of the process or the last change of its identity.

        `exporter.flush()` aggregates all recorded samples.
        """
        return self._state.count

    @property
    def sum(self) -> float:
        """Sum of the aggregated samples since the start of the process or the last change of its identity."""
        return self._state.sum

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle and copy by the definition, so that a copy in the same process is the same Stat."""
        return _restore, (type(self), self._state.definition)

    def __repr__(self) -> str:
        definition = self._state.effective
        labels = "".join(f", {name}={value!r}" for name, value in definition.labels)
        return f"<Stat {definition.name!r}{labels}: {self.count} samples>"


_STATS: dict[tuple[type[Stat], StatState], Stat] = {}
"""Stats by class and state, so that the same definition returns the same object."""

REGISTRY = Registry(RECORDER.stats, RECORDER.events)
"""Registry of the Stats of this process."""


def _restore(cls: type[Stat], definition: StatDefinition) -> Stat:
    """Return the Stat of a pickled definition. An existing Stat is returned even if its definition differs."""
    existing = REGISTRY.find(definition.name, dict(definition.labels))
    return cls.from_state(RECORDER.stats.get_or_create(definition)) if existing is None else existing


def create_series(
    kind: str,
    name: str,
    *,
    unit: str | None = None,
    labels: Mapping[str, str] | None = None,
    buckets: Iterable[float] | None = None,
    is_exporter_family: bool = True,
) -> Callable[[float], None]:
    """Create a series of a family without windows, and return the function that adds a number to it.

    For compatibility modules and bridges. The kind is `counter` (the sum of the added numbers, published as 0 from the start),
    `gauge` (the latest number), `histogram` or `summary`. The counter `training.elastic.restarts` becomes
    `training_elastic_restarts_total`. *is_exporter_family* is True if the sidecar declares type and help of the family
    (`exporter.ledger.family_owners`). Raises DefinitionError for the same reasons as `Stat`.
    """
    aggregations = {Aggregation.HISTOGRAM} if kind == "histogram" else set()
    definition = check_definition(name, aggregations, unit=unit, labels=labels, buckets=buckets)
    state = RECORDER.stats.get_or_create(definition.replace(kind=kind), is_exporter_family=is_exporter_family)
    return state.buffer.append
