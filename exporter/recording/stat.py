"""Stat: what training code records numbers with.

Used in the training process. `Stat.add` is the buffer's own bound `append`, so recording is one call into C:
no lock, no clock, no check, no I/O. Whatever needs more (windows, quantiles, refusing what is no number) is
done by the recording thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from exporter.errors import DefinitionError
from exporter.recording.definition import check_definition
from exporter.recording.registry import Registry
from exporter.recording.state import StatState
from exporter.recording.tensors import TensorReader
from exporter.recording.timing import Timer
from exporter.recording.values import Aggregation, StatDefinition, WindowReading

if TYPE_CHECKING:
    from typing_extensions import Self

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

    __slots__ = ("_state", "_tensors", "add")

    add: Callable[[float], None]
    _state: StatState
    _tensors: TensorReader | None

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
        return cls._of(REGISTRY.obtain(definition))

    @classmethod
    def _of(cls, state: StatState) -> Self:
        """Give the Stat of a state, always the same object."""
        known = _FACES.get((cls, state))
        if known is None:
            known = stat = super().__new__(cls)
            stat._state = state
            stat.add = state.buffer.append
            stat._tensors = None
            if (
                state.buffer.maxlen
            ):  # else beyond the registry's bound, or recording is disabled: nothing is kept
                known = _FACES.setdefault((cls, state), stat)
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

        Args:
            name: As for any Stat.
            measure: Called without arguments; what it raises is counted. One that hangs costs the passive
                Stats, which is shown, and nothing else. It must not call CUDA.
            aggregations: None means VALUE and MAX.
            window_seconds: As for any Stat.
            unit: As for any Stat.
            help: As for any Stat.
            labels: As for any Stat.

        Raises:
            DefinitionError: The definition is wrong, or `measure` is not callable.
        """
        if not callable(measure):
            raise DefinitionError(
                f"measure must be callable, not {measure!r}",
                field="measure",
                found=measure,
                allowed="a callable",
            )
        wanted = (Aggregation.VALUE, Aggregation.MAX) if aggregations is None else aggregations
        stat = cls(name, wanted, window_seconds=window_seconds, unit=unit, help=help, labels=labels)
        known = stat._state.measure
        if known is not None and known != measure:
            raise DefinitionError(
                f"the passive Stat {name!r} is measured by {known!r} already, and now {measure!r} is to measure it",
                field="measure",
                found=measure,
                allowed="one callable for each name and labels",
            )
        stat._state.measure = measure
        return stat

    def add_tensor(self, tensor: object) -> None:
        """Record the value of a torch tensor of one element; never waits for a GPU, never raises.

        A CPU tensor is read at once; the value of a CUDA tensor is recorded by a later call on this thread, or by
        `exporter.flush()` on it. Refused and counted: more than one element, other devices, a DTensor that is not
        replicated, calls during CUDA graph capture, and values beyond the copies that may be under way.
        """
        if self._tensors is None:
            self._tensors = TensorReader(self.add, self._state.refusals.append)
            self._state.tensors = self._tensors
        self._tensors.add(tensor)

    def time(self) -> Timer:
        """Time a `with` block or, as a decorator, each call of a function or coroutine function; in seconds.

        Raises:
            DefinitionError: The Stat's unit is not seconds.
        """
        if self._state.definition.unit not in {None, "seconds"}:
            raise DefinitionError(
                f"the Stat {self.name!r} cannot time: its unit is {self._state.definition.unit!r}",
                field="unit",
                found=self._state.definition.unit,
                allowed=("seconds", None),
            )
        return Timer(self.add)

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

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _: object) -> Self:
        return self

    def __repr__(self) -> str:
        definition = self._state.effective
        labels = "".join(f", {name}={value!r}" for name, value in definition.labels)
        return f"<Stat {definition.name!r}{labels}: {self.count} samples>"


_FACES: dict[tuple[type[Stat], StatState], Stat] = {}
"""So that the same definition is the same object; as many as the registry keeps."""


def _remade(cls: type[Stat], definition: StatDefinition) -> Stat:
    known = next(
        (
            each
            for each in REGISTRY.states()
            if each.definition.name == definition.name and each.definition.labels == definition.labels
        ),
        None,
    )
    return cls._of(REGISTRY.obtain(definition) if known is None else known)  # its own file


class Stats:
    """The Stats of a process, to be listed, looked up and switched.

    Args:
        registry: Where they are kept.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def find(self, name: str, labels: Mapping[str, str] | None = None) -> Stat | None:
        """Look one up by its identity."""
        wanted = (name, tuple(sorted((labels or {}).items())))
        return next(
            (stat for stat in self.matching(name) if (stat.name, stat.definition.labels) == wanted), None
        )

    def matching(self, pattern: str = "*") -> list[Stat]:
        """List those whose names match a pattern (`*`: any characters, `?`: one), in order of construction."""
        return [
            Stat._of(state)  # noqa: SLF001  # its own file
            for state in self._registry.states()
            if fnmatchcase(state.definition.name, pattern)
        ]

    def names(self, pattern: str = "*") -> list[str]:
        """List their names, each once; one name may stand for Stats of several label sets."""
        return list(dict.fromkeys(stat.name for stat in self.matching(pattern)))

    def switch(self, pattern: str, *, enabled: bool) -> None:
        """Switch those whose names match on or off, those still to be made included.

        What was counted stays counted; samples added while a Stat is off are dropped.
        """
        self._registry.switch(pattern, enabled=enabled)


def metric(
    kind: str,
    name: str,
    *,
    unit: str | None = None,
    labels: Mapping[str, str] | None = None,
    buckets: Iterable[float] | None = None,
    own: bool = True,
) -> Callable[[float], None]:
    """Make a plain family, or one more series of it; a counter is 0 from then on, so that its first rise is seen.

    Args:
        kind: `counter` (its value is the sum of what is added), `gauge` (the latest), `histogram` or `summary`.
        name: With dots: `training.elastic.restarts` is `training_elastic_restarts_total`.
        unit: A base unit.
        labels: Of this series; the names are the same for every series of a family.
        buckets: Of a histogram; None for a choice that suits the unit.
        own: Whether the name is one of the exporter's own; False for one that the job has chosen.

    Returns:
        `add`, which takes any int or float, never raises and never waits.

    Raises:
        DefinitionError: It cannot be, or is another family already.
    """
    aggregations = {Aggregation.HISTOGRAM} if kind == "histogram" else set()
    definition = check_definition(name, aggregations, unit=unit, labels=labels, buckets=buckets)
    state = REGISTRY.obtain(definition.replace(kind=kind), own=own)
    return state.buffer.append
