"""Metric families: what a family is, and how a collector hands its families over.

Used in the sidecar only. A collector is what prometheus_client calls one, so that ours can be registered in any registry
and any other runs beside ours. Absent is *no sample*: never NaN, never a sentinel, never the last good value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, Protocol

from prometheus_client.core import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from exporter.errors import CollectError

FamilyType = Literal["counter", "gauge", "histogram", "summary", "info", "stateset"]

_go_number: Callable[[float], str] = lru_cache(maxsize=2048)(floatToGoString)

MAX_PROBLEMS_PER_REASON = 5
"""How many of one reason are kept: the five hundred files of a large machine tend to fail in the same way."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """The value of one histogram or summary series."""

    count: int  # all observations
    sum: float | None  # their sum; None leaves `_sum` out (a negative observation was seen)
    # (upper bound, observations <= bound), ascending, finite bounds only; empty for a summary
    buckets: tuple[tuple[float, int], ...] = ()
    # observations by exponential bucket (`exporter.recording.exponential`), for a native histogram; not all of them, or
    # none, where there can be no native one
    exponential: Mapping[int, int] = field(default_factory=dict)


class DistributionSample(Sample):
    """The `_count` of a histogram or summary, which brings the whole along for formats with native histograms."""

    distribution: Distribution


@dataclass(frozen=True, slots=True)
class FamilySpec:
    """What a family is; stands beside the code that fills it and is the source of docs/METRICS.md."""

    name: str  # as Prometheus' text format shows it: counters with `_total`, infos with `_info`
    type: FamilyType  # its exposition type
    help: str  # one sentence: what it is, and when it is absent
    labels: tuple[str, ...] = ()  # label names in the order in which samples give their values
    unit: str = ""  # the base unit that the name carries before `_total`; "" for none
    source: str = ""  # where the number comes from (file, call, formula)

    def family(self, samples: Mapping[tuple[str, ...], float | Distribution]) -> Metric:
        """Make the family of samples by label values, in the order of `labels`; "" means that the label is absent."""
        metric = Metric(self._base(), self.help, self.type, self.unit)
        metric.samples = self.samples(samples)
        return metric

    def later(self, samples: Mapping[tuple[str, ...], float | Distribution]) -> Metric:
        """The same, but made when somebody first asks for its samples, which may not be changed any more."""
        return _Later(self._base(), self.help, self.type, self.unit, lambda: self.samples(samples))

    def _base(self) -> str:
        return self.name.removesuffix({"counter": "_total", "info": "_info"}.get(self.type, ""))

    def samples(self, found: Mapping[tuple[str, ...], float | Distribution]) -> list[Sample]:
        """Make samples by label values, as for `family`."""
        samples: list[Sample] = []
        for values, value in found.items():
            labels = {name: text for name, text in zip(self.labels, values, strict=True) if text != ""}
            if isinstance(value, Distribution):
                samples += _distribution(self._base(), self.type, labels, value)
            else:
                samples.append(Sample(self.name, labels, value))
        return samples


class _Later(Metric):
    """A family whose samples are made at first sight; two threads that look at once make the same."""

    def __init__(self, name: str, text: str, kind: str, unit: str, make: Callable[[], list[Sample]]) -> None:
        super().__init__(name, text, kind, unit)
        self._make = make
        del self.samples  # so that the first look asks `__getattr__`

    def __getattr__(self, name: str) -> list[Sample]:
        if name != "samples":
            raise AttributeError(name)
        self.samples: list[Sample] = self._make()
        return self.samples


BASE_UNITS = frozenset(
    ["bytes", "celsius", "grams", "hertz", "joules", "liters", "ratio", "seconds", "watts"]
)


def family(name: str, help: str, source: str, *labels: str) -> FamilySpec:
    """Describe a family whose name tells its type and its unit: `…_bytes_total` is a counter of bytes, else a gauge."""
    suffix = name.rpartition("_")[2]
    kind: FamilyType = "counter" if suffix == "total" else "info" if suffix == "info" else "gauge"
    unit = name.removesuffix("_total").rpartition("_")[2]
    return FamilySpec(name, kind, help, labels, unit if unit in BASE_UNITS else "", source)


_ROW = re.compile(r"(\w+)(?:\{([\w,]+)\})?(?: \[([^]]*)\])?: (.*) <- (.*)")


def rows(written: str) -> dict[FamilySpec, str]:
    """Read a table of families, each with the words of its row: `name{labels} [words]: help <- source`.

    Lines that are indented belong to the row before. The name tells type and unit, unless the words are of a histogram or
    summary; others are the reader's, such as where its code finds the value.
    """
    found = {}
    for row in re.split(r"\n(?=\w)", written.strip()):
        ((name, labels, words, text, source),) = _ROW.findall(" ".join(row.split()))
        spec = family(name, text, source, *(labels.split(",") if labels else ()))
        if "histogram" in words or "summary" in words:
            spec = replace(spec, type="histogram" if "histogram" in words else "summary")
        found[spec] = words
    return found


def table(written: str) -> tuple[FamilySpec, ...]:
    """Read a table of families; see `rows`."""
    return tuple(rows(written))


def _distribution(
    name: str, kind: FamilyType, labels: dict[str, str], value: Distribution
) -> Iterator[Sample]:
    if kind == "histogram":
        for bound, count in (*value.buckets, (float("inf"), value.count)):
            yield Sample(f"{name}_bucket", {**labels, "le": _go_number(bound)}, count)
    counted = DistributionSample(f"{name}_count", labels, value.count)
    counted.distribution = value
    yield counted
    if value.sum is not None:
        yield Sample(f"{name}_sum", labels, value.sum)


def visible_name(metric: Metric) -> str:
    """A family's name as Prometheus' text format shows it."""
    suffix = {"counter": "_total", "info": "_info"}.get(metric.type, "")
    return f"{metric.name}{suffix}"


class Collected(list[Metric]):
    """The families of one pass of a collector, and what it could not read.

    Attributes:
        problems: (reason, message) of parts that failed: the verdict is 0 while the rest is published. Without any family
            the pass has failed as a whole.
        unsupported: What this machine does not offer, in words that stay the same from pass to pass. No failure: it is
            logged once and counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[tuple[str, str]] = []
        self.unsupported: list[str] = []
        self._families: dict[str, Metric] = {}

    def add(self, spec: FamilySpec, value: float | Distribution | None, *labels: str) -> None:
        """Add one sample to its family, which the first one makes; None adds none."""
        if value is not None:
            if spec.name not in self._families:
                self._families[spec.name] = spec.family({})
                self.append(self._families[spec.name])
            self._families[spec.name].samples += spec.samples({labels: value})

    def add_family(self, spec: FamilySpec, samples: Mapping[tuple[str, ...], float | Distribution]) -> None:
        """Add a family by its samples; one without samples is left out."""
        if samples:
            self.append(spec.family(samples))

    @contextmanager
    def part(self) -> Iterator[None]:
        """Let what is inside fail with `CollectError` alone; families are added last, so that none is half there."""
        try:
            yield
        except CollectError as error:
            self.fail(error)

    def fail(self, error: CollectError) -> None:
        """Note what went wrong."""
        if sum(reason == error.reason for reason, _ in self.problems) < MAX_PROBLEMS_PER_REASON:
            self.problems.append((error.reason, str(error)))


class AnyCollector(Protocol):
    """What the scheduler takes: one of ours, or any of prometheus_client's kind with a name."""

    @property
    def name(self) -> str:
        """The value of the label `collector` and the key in the configuration; lower case, stable."""

    def collect(self) -> Iterable[Metric]:
        """Read the source once; may block: its deadline costs only itself."""


class Collector(AnyCollector, Protocol):
    """One of ours; one file per subject. Called from one thread at a time, never from the scrape."""

    @property
    def specs(self) -> tuple[FamilySpec, ...]:
        """Every family this collector can publish under a fixed name."""

    def collect(self) -> Collected:
        """Read the source once; what fails is told in the result, not raised."""
