"""Stat: a named statistic of the job, and the public registry of all Stats.

Runs on any thread. `Stat.add` is the buffer's own bound `append`; the recording thread aggregates. Constructing a Stat locks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from exporter.recording.definition import check_definition, require
from exporter.recording.event_log import EventLog
from exporter.recording.handle import Handle, name_of
from exporter.recording.recorder import RECORDER
from exporter.recording.stat_table import StatTable
from exporter.recording.state import StatState
from exporter.recording.tensors import TensorReader
from exporter.recording.timing import Timer
from exporter.recording.values import Aggregation, StatDefinition, WindowReading

if TYPE_CHECKING:
    from typing_extensions import Self

WAITING_WINDOWS = 10_000
"""Closed windows that may wait for one handler."""


class Registry:
    """The Stats of one process, to be listed, looked up and switched."""

    def __init__(self, table: StatTable, events: EventLog) -> None:
        self._table = table
        self._events = events

    def states(self) -> tuple[StatState, ...]:
        """Return the state of every Stat, in order of construction."""
        return self._table.states()

    def find(self, name: str, labels: Mapping[str, str] | None = None) -> Stat | None:
        """Return the Stat of a name and labels, or None."""
        state = self._table.get(name, labels)
        return None if state is None else Stat.of(state)

    def matching(self, pattern: str = "*") -> list[Stat]:
        """Return the Stats whose names match a shell pattern, in order of construction."""
        return [Stat.of(each) for each in self.states() if fnmatchcase(each.definition.name, pattern)]

    def switch(self, pattern: str, *, enabled: bool) -> None:
        """Enable or disable the Stats whose names match a shell pattern, including Stats constructed later.

        Counts are kept; samples added to a disabled Stat are dropped.
        """
        self._table.switch(pattern, enabled=enabled)

    def on_window(self, handler: Callable[[Stat, WindowReading], object], match: str = "*") -> Handle:
        """Register a handler of closed windows with samples, of the Stats whose names match a shell pattern.

        Calls `handler(stat, window)` on a thread of its own, in order. Exceptions of the handler and windows that find its
        queue full are counted. Returns the handle, whose `unregister` ends the delivery. Raises TypeError for a handler
        that is not callable.
        """
        return self.listen(handler, lambda state: fnmatchcase(state.definition.name, match))

    def listen(
        self, handler: Callable[[Stat, WindowReading], object], wants: Callable[[StatState], bool]
    ) -> Handle:
        """Register a handler of the windows of all Stats that *wants* selects."""
        if not callable(handler):
            raise TypeError(f"a handler of windows must be a callable (stat, window), not {handler!r}")
        handle = self._events.register(
            lambda item: handler(Stat.of(item[0]), item[1]),
            types=(),
            queue=WAITING_WINDOWS,
            name=name_of(handler),
        )
        self._table.listen(handle, wants)
        return handle


class Stat:
    """Named statistic: windows, quantiles, a histogram and exact totals of recorded numbers.

    Identity is (name, labels): the same definition returns the same Stat.

    Args:
        name: Words of letters, digits and `_`, joined by dots: `training.batch.latency`.
        aggregations: Aggregations of each window; None means MEAN, MAX, P50, P90, P95 and P99. The number of samples and their
            exact total and sum are always published.
        window_seconds: Length of a window, at least 0.1; windows are aligned to multiples of the length on the wall clock,
            equally for all ranks. None for count windows.
        window_samples: Samples that close a window; with both limits, the first reached closes the window.
        unit: A base unit: `seconds`, `bytes`, `ratio`, … None for a plain number.
        help: A single line for readers of the dashboard.
        labels: Constant labels.
        buckets: Upper bounds of the histogram; None for the default of the unit.
        stale_seconds: Time without a sample after which a count window has no data.
        min_samples: A window with fewer samples has no data except the number of samples: the mean of a few samples is not
            comparable with the mean of many.

    Attributes:
        add: Record an int or float. Other values and values that are not finite are counted and excluded from every
            aggregate. Never raises, never waits. For tensors, see `add_tensor`.

    Raises:
        DefinitionError: The definition is invalid, or differs from an earlier definition of the same Stat.

    Source: RFC-0018 (torch.monitor) and the requests of its reviewers.
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
        """Return the Stat of the definition, constructed now or earlier."""
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
        return cls.of(RECORDER.stats.obtain(definition))

    @classmethod
    def of(cls, state: StatState) -> Self:
        """Return the Stat of a state, always the same object."""
        known = _STATS.get((cls, state))
        if known is None:
            known = stat = super().__new__(cls)
            stat._state = state
            stat.add = state.buffer.append
            if state.buffer.maxlen:  # 0 for a Stat beyond the limit, or if recording is disabled
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
        """Return a Stat that a callback measures, once per flush, on a thread that all callbacks share.

        Exceptions of `measure` are counted; a callback that hangs pauses all passive Stats. The callback must not call CUDA.
        Aggregations of None mean VALUE and MAX; the other arguments are those of any Stat.
        """
        require(callable(measure), "measure", measure, "callable")
        wanted = (Aggregation.VALUE, Aggregation.MAX) if aggregations is None else aggregations
        stat = cls(name, wanted, window_seconds=window_seconds, unit=unit, help=help, labels=labels)
        known = stat._state.measure
        require(
            known is None or known == measure,
            "measure",
            measure,
            f"{known!r}, the present callback of {name!r}",
        )
        stat._state.measure = measure
        return stat

    def add_tensor(self, tensor: object) -> None:
        """Record the value of a torch tensor or JAX array of one element; never waits for a device, never raises.

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
        """Register a handler of this Stat's closed windows with samples; see `Registry.on_window`."""
        return REGISTRY.listen(handler, lambda state: state is self._state)

    def get(self) -> dict[Aggregation, float]:
        """Return the aggregations of the last closed window; empty without a window or without samples."""
        return dict(self._state.closed.values)

    @property
    def name(self) -> str:
        """Name in the job's code."""
        return self._state.definition.name

    @property
    def definition(self) -> StatDefinition:
        """Definition in force: the code's definition, changed by the configuration's overrides."""
        return self._state.effective

    @property
    def enabled(self) -> bool:
        """True if samples are recorded; see `Registry.switch` and the configuration's `recording:` rules."""
        return self._state.enabled

    @property
    def window(self) -> WindowReading:
        """Last closed window."""
        return self._state.closed

    @property
    def count(self) -> int:
        """Accepted and drained samples since the start of the process (`exporter.flush()` drains)."""
        return self._state.count

    @property
    def sum(self) -> float:
        """Exact sum of these samples."""
        return self._state.sum

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the Stat as a definition: a copy in this process is the same Stat."""
        return _remade, (type(self), self._state.definition)

    def __repr__(self) -> str:
        definition = self._state.effective
        labels = "".join(f", {name}={value!r}" for name, value in definition.labels)
        return f"<Stat {definition.name!r}{labels}: {self.count} samples>"


_STATS: dict[tuple[type[Stat], StatState], Stat] = {}
"""The Stat of each state, so that the same definition returns the same object."""

REGISTRY = Registry(RECORDER.stats, RECORDER.events)
"""The Stats of this process."""


def _remade(cls: type[Stat], definition: StatDefinition) -> Stat:
    known = REGISTRY.find(definition.name, dict(definition.labels))
    return cls.of(RECORDER.stats.obtain(definition)) if known is None else known


def metric(
    kind: str,
    name: str,
    *,
    unit: str | None = None,
    labels: Mapping[str, str] | None = None,
    buckets: Iterable[float] | None = None,
    own: bool = True,
) -> Callable[[float], None]:
    """Create a series of a family without windows, for compatibility modules and bridges; returns the function `add`.

    The kind is `counter` (the sum of all added numbers, 0 from now on), `gauge` (the latest), `histogram` or `summary`; the
    counter `training.elastic.restarts` becomes `training_elastic_restarts_total`. A name of the exporter's own is declared
    in the sidecar (`exporter.ledger.family_owners`), which admits nothing else to it. Gives `add`; raises as `Stat` does.
    """
    aggregations = {Aggregation.HISTOGRAM} if kind == "histogram" else set()
    definition = check_definition(name, aggregations, unit=unit, labels=labels, buckets=buckets)
    return RECORDER.stats.obtain(definition.replace(kind=kind), own=own).buffer.append
