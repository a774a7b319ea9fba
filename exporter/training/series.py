"""Series: the families of the training as this process fills them, read once a flush like any Stat.

Used by the recording thread of the training process. They are not Stats with buffers: the interpreter already has the
numbers one by one, so each is added where it belongs. What they are is declared in the sidecar
(`exporter.ledger.families.training`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from itertools import accumulate
from math import inf

from exporter.recording.values import Aggregation, StatDefinition, StatReading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeVar

    S = TypeVar("S", bound="_Series")

STEP_BUCKETS = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
PHASE_BUCKETS = (0.001, *STEP_BUCKETS)
LARGEST = 1e30
"""What the job says of samples, tokens or bytes is below it: the sum of many such is still a float."""
MOST_SERIES = 200
"""Of one family; beyond it, label values of the job's own choice become `other`."""
_HISTOGRAM = frozenset({Aggregation.HISTOGRAM})
_NOTHING: frozenset[Aggregation] = frozenset()


class _Series(ABC):
    """One series.

    Attributes:
        definition: As the feed carries it.
    """

    __slots__ = ("definition", "_reading")

    def __init__(self, definition: StatDefinition) -> None:
        self.definition = definition
        self._reading: StatReading | None = None

    def reading(self) -> StatReading:
        """Tell all; the same object as long as nothing has changed."""
        if self._reading is None:
            self._reading = self._read()
        return self._reading

    @abstractmethod
    def reset(self) -> None:
        """Begin from zero."""

    @abstractmethod
    def _read(self) -> StatReading: ...


class Counter(_Series):
    """A number that only grows.

    Attributes:
        value: So far.
        count: Times that it has grown.
    """

    __slots__ = ("value", "count")

    def __init__(self, definition: StatDefinition) -> None:
        super().__init__(definition)
        self.reset()

    def reset(self) -> None:
        """Begin from zero."""
        self.value = 0.0
        self.count = 0
        self._reading = None

    def add(self, amount: float = 1) -> None:
        """Grow; never by less than nothing, nor beyond what a float holds."""
        if amount >= 0 and self.value + amount < inf:
            self.value += amount
            self.count += 1
            self._reading = None

    def add_many(self, times: int) -> None:
        """Grow by one so many times."""
        self.value += times
        self.count += times
        self._reading = None

    def _read(self) -> StatReading:
        return StatReading(self.definition, self.count, self.value)


class Gauge(_Series):
    """A number that is set, or not known."""

    __slots__ = ("_value", "_count")

    def __init__(self, definition: StatDefinition) -> None:
        super().__init__(definition)
        self.reset()

    def reset(self) -> None:
        """Forget the value."""
        self._value: float | None = None
        self._count = 0
        self._reading = None

    @property
    def value(self) -> float | None:
        """The latest; None for no data."""
        return self._value

    def set(self, value: float | None) -> None:
        """Replace it; None where it is not known any more."""
        if value != self._value:
            self._value = value
            self._count += 1
            self._reading = None

    def _read(self) -> StatReading:
        return StatReading(self.definition, self._count, 0.0, value=self._value)


class Histogram(_Series):
    """Durations by size."""

    __slots__ = ("_counts", "_sum", "_count")

    def __init__(self, definition: StatDefinition) -> None:
        super().__init__(definition)
        self.reset()

    def reset(self) -> None:
        """Begin from zero."""
        self._counts = [0] * (len(self.definition.buckets) + 1)
        self._sum = 0.0
        self._count = 0
        self._reading = None

    def observe(self, value: float) -> None:
        """Add one."""
        self._counts[bisect_left(self.definition.buckets, value)] += 1
        self._sum += value
        self._count += 1
        self._reading = None

    def observe_all(self, values: Sequence[float], total: float, longest: float) -> None:
        """Add several; when all are of one bucket, at the cost of at most two passes in C.

        Args:
            values: None of them negative.
            total: Their sum.
            longest: None of them is more.
        """
        buckets = self.definition.buckets
        low = 0 if longest <= buckets[0] else bisect_left(buckets, min(values))
        if longest <= buckets[0] or bisect_left(buckets, max(values)) == low:
            self._counts[low] += len(values)
        else:
            for value in values:
                self._counts[bisect_left(buckets, value)] += 1
        self._sum += total
        self._count += len(values)
        self._reading = None

    def _read(self) -> StatReading:
        below = tuple(accumulate(self._counts[:-1]))
        return StatReading(self.definition, self._count, self._sum, below)


class Families:
    """All series of the training of this process, made when they are first needed."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, tuple[tuple[str, str], ...]], _Series] = {}
        self._sizes: dict[str, int] = {}

    def counter(self, name: str, unit: str | None = None, **labels: str) -> Counter:
        """Give a counter; its name has dots, no unit and no `_total`."""
        return self._of(Counter, "counter", name, unit, labels, ())

    def gauge(self, name: str, unit: str | None = None, **labels: str) -> Gauge:
        """Give a gauge."""
        return self._of(Gauge, "gauge", name, unit, labels, ())

    def histogram(self, name: str, buckets: tuple[float, ...] = STEP_BUCKETS, **labels: str) -> Histogram:
        """Give a histogram of seconds."""
        return self._of(Histogram, "histogram", name, "seconds", labels, buckets)

    def reset(self) -> None:
        """Begin from zero with all."""
        for series in self._series.values():
            series.reset()

    def readings(self) -> list[StatReading]:
        """Read all, in the order in which they were made."""
        return [series.reading() for series in self._series.values()]

    def _of(
        self,
        make: type[S],
        kind: str,
        name: str,
        unit: str | None,
        labels: dict[str, str],
        buckets: tuple[float, ...],
    ) -> S:
        key = (name, tuple(sorted(labels.items())))
        known = self._series.get(key)
        if known is None:
            if self._sizes.get(name, 0) >= MOST_SERIES and set(labels.values()) != {"other"}:
                return self._of(make, kind, name, unit, dict.fromkeys(labels, "other"), buckets)
            self._sizes[name] = self._sizes.get(name, 0) + 1
            aggregations = _HISTOGRAM if kind == "histogram" else _NOTHING
            definition = StatDefinition(
                name, aggregations, unit=unit, labels=key[1], buckets=buckets, kind=kind
            )
            known = self._series[key] = make(definition)
        return known  # type: ignore[return-value]  # a name is always asked for as the same kind
