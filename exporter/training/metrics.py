"""The families of the training as this process fills them, read once a flush like any Stat; misuse among them.

The interpreter has the numbers one by one, so each is added where it belongs, on the recording thread; `report` may be
called on any. What the families are is declared in the sidecar (`exporter.ledger.families.training`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import accumulate
from math import inf

from exporter.recording.exponential import bucket_of
from exporter.recording.notices import tell_once
from exporter.recording.values import Aggregation, StatDefinition, StatReading

STEP_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
PHASE_BUCKETS = (0.001, *STEP_BUCKETS)
LARGEST = 1e30
"""What the job says of samples, tokens or bytes is below it: the sum of many such is still a float."""
MOST_SERIES = 200
"""Of one family; beyond it, label values of the job's own choice become `other`."""
MOST_CALL = 100
"""Characters of the label `call`."""
REPORTED: deque[tuple[str, str, str]] = deque(maxlen=10_000)
"""What was reported and is not counted yet: (call, rule, expected)."""


def amount(value: object, below: float = LARGEST) -> float | None:
    """Give a number of 0 or more, and below a bound, as a float; None for anything else."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < below
    return float(value) if usable else None  # type: ignore[arg-type]  # as just seen


class Series:
    """One series: the total of a counter or histogram, or the value of a gauge, and how often it has changed."""

    __slots__ = ("definition", "total", "value", "count", "_counts", "_exponential", "_reading")

    def __init__(self, definition: StatDefinition) -> None:
        self.definition = definition
        self.reset()

    def reset(self) -> None:
        """Begin from zero."""
        self.count = 0
        self.total = 0.0
        self.value: float | None = None
        self._counts = [0] * (len(self.definition.buckets) + 1)
        self._exponential: dict[int, int] = {}
        self._reading: StatReading | None = None

    def add(self, amount: float = 1) -> None:
        """Let a counter grow; never by less than nothing, nor beyond what a float holds."""
        if amount >= 0 and self.total + amount < inf:
            self.total += amount
            self.count += 1

    def set(self, value: float | None) -> None:
        """Set a gauge; None where it is not known any more."""
        if value != self.value:
            self.value = value
            self.count += 1

    def observe(self, value: float) -> None:
        """Add to a histogram."""
        self._counts[bisect_left(self.definition.buckets, value)] += 1
        bucket = bucket_of(value)
        self._exponential[bucket] = self._exponential.get(bucket, 0) + 1
        self.total += value
        self.count += 1

    def reading(self) -> StatReading:
        """Tell all; the same object as long as nothing has changed."""
        if self._reading is None or self._reading.count != self.count:
            counts = (self.count, self.total, tuple(accumulate(self._counts[:-1])))
            exponential = dict(self._exponential)
            self._reading = StatReading(self.definition, *counts, value=self.value, exponential=exponential)
        return self._reading


class Families:
    """All series of the training of this process, made when they are first needed."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, tuple[tuple[str, str], ...]], Series] = {}
        self._sizes: dict[str, int] = {}

    def counter(self, name: str, unit: str | None = None, **labels: str) -> Series:
        """Give a counter; its name has dots, no unit and no `_total`."""
        return self._obtain("counter", name, unit, labels)

    def gauge(self, name: str, unit: str | None = None, **labels: str) -> Series:
        """Give a gauge."""
        return self._obtain("gauge", name, unit, labels)

    def histogram(self, name: str, buckets: tuple[float, ...] = STEP_BUCKETS, **labels: str) -> Series:
        """Give a histogram of seconds."""
        return self._obtain("histogram", name, "seconds", labels, buckets)

    def summary(self, name: str, **labels: str) -> Series:
        """Give a count and a sum of seconds."""
        return self._obtain("summary", name, "seconds", labels)

    def reset(self) -> None:
        """Begin from zero with all."""
        for series in self._series.values():
            series.reset()

    def readings(self) -> list[StatReading]:
        """Read all, in the order in which they were made."""
        return [series.reading() for series in self._series.values()]

    def _obtain(
        self,
        kind: str,
        name: str,
        unit: str | None,
        labels: dict[str, str],
        buckets: tuple[float, ...] = (),
    ) -> Series:
        key = (name, tuple(sorted(labels.items())))
        known = self._series.get(key)
        if known is None:
            if self._sizes.get(name, 0) >= MOST_SERIES and set(labels.values()) != {"other"}:
                return self._obtain(kind, name, unit, dict.fromkeys(labels, "other"), buckets)
            self._sizes[name] = self._sizes.get(name, 0) + 1
            aggregations = frozenset({Aggregation.HISTOGRAM} if buckets else ())
            definition = StatDefinition(
                name, aggregations, unit=unit, labels=key[1], buckets=buckets, kind=kind
            )
            known = self._series[key] = Series(definition)
        return known


def report(call: str, rule: str, expected: str) -> None:
    """Have a misuse counted, by the call as the user writes it and a slug of the rule, and what was expected logged."""
    REPORTED.append((call, rule, expected))


class Misuse:
    """Calls of one process that cannot be meant so, counted always, told once each; the latest may be raised."""

    def __init__(self, families: Families) -> None:
        self._families = families
        self.latest: deque[str] = deque(maxlen=100)

    def count(self, call: str, rule: str, expected: str) -> None:
        """Count one now; the arguments are those of `report`."""
        call = call[:MOST_CALL]
        self._families.counter("training.misuse", call=call, rule=rule).add()
        self.latest.append(f"{call}: expected {expected}")
        tell_once(
            f"training {call} {rule}",
            f"misuse of exporter.training: {call} expected {expected} (rule {rule}; told once, counted always)",
        )

    def count_reported(self) -> None:
        """Count what was reported since."""
        while REPORTED:
            self.count(*REPORTED.popleft())
