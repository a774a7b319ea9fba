"""Training metrics: counters, gauges and histograms of a process.

The recording thread fills the series and reads them at each flush. `exporter.ledger.families.training` has the specifications.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from math import inf

from exporter.recording.exponential import bucket_of
from exporter.recording.values import Aggregation, StatDefinition, StatReading

# fmt: off
STEP_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)
# fmt: on
PHASE_BUCKETS = (0.001, *STEP_BUCKETS)
"""Upper bounds of the classic buckets in seconds."""
MAX_AMOUNT = 1e30
"""Bound of the samples, tokens or bytes in a call, so that the sum of many calls stays finite."""
MAX_SERIES = 200
"""Limit of the series of a family. The labels of further series become `other`."""


def to_amount(value: object, below: float = MAX_AMOUNT) -> float | None:
    """Return a number as a float if it is at least 0 and less than *below*. Return None for any other object."""
    is_valid = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < below
    return float(value) if is_valid else None  # type: ignore[arg-type]  # checked above


class Series:
    """Series of a metric.

    Attributes:
        total: Total of a counter, or sum of a histogram.
        value: Value of a gauge; None if unknown.
        count: Number of observations of a histogram, or of changes of a counter or gauge.
    """

    __slots__ = ("definition", "total", "value", "count", "_counts", "_exponential", "_reading")

    def __init__(self, definition: StatDefinition) -> None:
        self.definition = definition
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self.count = 0
        self.total = 0.0
        self.value: float | None = None
        self._counts = [0] * (len(self.definition.buckets) + 1)
        self._exponential: dict[int, int] = {}
        self._reading: StatReading | None = None

    def add(self, amount: float = 1) -> None:
        """Increase a counter. A negative amount, and an amount that makes the total infinite, are ignored."""
        if amount >= 0 and self.total + amount < inf:
            self.total += amount
            self.count += 1

    def raise_to(self, total: float) -> None:
        """Increase a counter to a total. A lower total is ignored."""
        if total > self.total:
            self.total = total
            self.count += 1

    def replace(self, total: float, counts: list[int], exponential: dict[int, int]) -> None:
        """Set the sum, the counts of the classic buckets and the native buckets of a histogram that is counted elsewhere."""
        self.count = sum(counts)
        self.total = total
        self._counts = counts
        self._exponential = exponential

    def set(self, value: float | None) -> None:
        """Set a gauge; None if the value is unknown."""
        if value != self.value:
            self.value = value
            self.count += 1

    def observe(self, value: float) -> None:
        """Add a value to a histogram."""
        self._counts[bisect_left(self.definition.buckets, value)] += 1
        bucket = bucket_of(value)
        self._exponential[bucket] = self._exponential.get(bucket, 0) + 1
        self.total += value
        self.count += 1

    def reading(self) -> StatReading:
        """Return the current reading. Until the next change, the same object is returned."""
        if self._reading is None or self._reading.count != self.count:
            counts = (self.count, self.total, tuple(accumulate(self._counts[:-1])))
            exponential = dict(self._exponential)
            self._reading = StatReading(self.definition, *counts, value=self.value, exponential=exponential)
        return self._reading


class Families:
    """All training series of a process, created on first use."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, tuple[tuple[str, str], ...]], Series] = {}
        self._series_counts: dict[str, int] = {}

    def counter(self, name: str, unit: str | None = None, **labels: str) -> Series:
        """Return a counter. *name* is dotted, without the unit and without `_total`."""
        return self._obtain("counter", name, unit, labels)

    def gauge(self, name: str, unit: str | None = None, **labels: str) -> Series:
        """Return a gauge."""
        return self._obtain("gauge", name, unit, labels)

    def histogram(self, name: str, buckets: tuple[float, ...] = STEP_BUCKETS, **labels: str) -> Series:
        """Return a histogram of seconds."""
        return self._obtain("histogram", name, "seconds", labels, buckets)

    def summary(self, name: str, **labels: str) -> Series:
        """Return a summary of seconds without quantiles: a count and a sum."""
        return self._obtain("summary", name, "seconds", labels)

    def reset(self) -> None:
        """Count from zero in all series."""
        for series in self._series.values():
            series.reset()

    def readings(self) -> list[StatReading]:
        """Return the readings of all series in the order of their creation."""
        return [series.reading() for series in self._series.values()]

    def _obtain(
        self,
        kind: str,
        name: str,
        unit: str | None,
        labels: dict[str, str],
        buckets: tuple[float, ...] = (),
    ) -> Series:
        """Return a series, created on first use. Above `MAX_SERIES`, return the series whose labels are `other`."""
        key = (name, tuple(sorted(labels.items())))
        series = self._series.get(key)
        if series is None:
            if self._series_counts.get(name, 0) >= MAX_SERIES and set(labels.values()) != {"other"}:
                return self._obtain(kind, name, unit, dict.fromkeys(labels, "other"), buckets)
            self._series_counts[name] = self._series_counts.get(name, 0) + 1
            aggregations = frozenset({Aggregation.HISTOGRAM} if buckets else ())
            definition = StatDefinition(
                name, aggregations, unit=unit, labels=key[1], buckets=buckets, kind=kind
            )
            series = self._series[key] = Series(definition)
        return series
