"""Specifications of metric families, and the result of a collector's pass.

Collectors have the interface of prometheus_client: any registry accepts the exporter's collectors, and the sidecar also runs
third-party collectors. A missing value is a missing sample, not NaN, a sentinel or the last value.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, Protocol, get_args

from prometheus_client.core import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from exporter.errors import CollectError

FamilyType = Literal["counter", "gauge", "histogram", "summary", "info", "stateset"]

TYPE_SUFFIXES = {"counter": "_total", "info": "_info"}
"""Suffix of a family's name in Prometheus' text format, by type."""

BASE_UNITS = frozenset(
    ["bytes", "celsius", "grams", "hertz", "joules", "liters", "ratio", "seconds", "watts"]
)
"""Units that the names of the exporter's own families may have."""

_NAME = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")
"""Name of a family or label of the exporter."""

_go_number: Callable[[float], str] = lru_cache(maxsize=2048)(floatToGoString)
"""Text of a number as Go prints it. Cached, because the bounds of all histograms are rendered in each pass."""

MAX_PROBLEMS_PER_REASON = 5
"""Maximum number of problems that a pass reports for the same reason, because many files may fail for one reason."""


class Precedence(enum.Enum):
    """Precedence of families on a page with a limited number of series, the most important first."""

    TOTAL = "total"  # totals and values of Stats, and all families that belong to no Stat
    SAMPLES = "samples"  # numbers and times of the samples of Stats
    WINDOW = "window"  # gauges of the last window of Stats


@dataclass(frozen=True, slots=True)
class Distribution:
    """Value of a histogram or summary series."""

    count: int  # number of observations
    sum: float | None  # sum of the observations; None omits `_sum`, as after a negative observation
    # pairs of upper bound and number of observations up to the bound, ascending, without +Inf; empty for a summary
    buckets: tuple[tuple[float, int], ...] = ()
    # number of observations by exponential bucket (`exporter.recording.exponential`), for a native histogram; if the
    # observations of some buckets are unknown, the mapping is empty or incomplete
    exponential: Mapping[int, int] = field(default_factory=dict)


class DistributionSample(Sample):
    """Sample `_count` of a histogram or summary, with the whole distribution for formats with native histograms."""

    distribution: Distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Name, type, help, labels and unit of a family. The fields are not checked: the name may come from a Stat of the job."""

    name: str  # name in Prometheus' text format: with `_total` for a counter, with `_info` for an info
    type: FamilyType
    help: str
    labels: tuple[str, ...] = ()  # names of the labels, in the order of the label values of a sample
    unit: str = ""  # unit in the name, before `_total`; "" without a unit
    precedence: Precedence = Precedence.TOTAL

    def family(self, values_by_labels: Mapping[tuple[str, ...], float | Distribution]) -> Metric:
        """Return the metric with a value for each tuple of label values. An empty label value omits the label."""
        metric = Metric(self._base_name(), self.help, self.type, self.unit)
        metric.samples = self.samples(values_by_labels)
        return metric

    def lazy_family(self, values_by_labels: Mapping[tuple[str, ...], float | Distribution]) -> Metric:
        """Return the metric, whose samples are created on first access. The mapping must not change afterwards."""
        metric = _LazyMetric(
            self._base_name(), self.help, self.type, self.unit, lambda: self.samples(values_by_labels)
        )
        metric.precedence = self.precedence
        return metric

    def _base_name(self) -> str:
        """Return the name without the suffix of the type, as prometheus_client expects it."""
        return self.name.removesuffix(TYPE_SUFFIXES.get(self.type, ""))

    def samples(self, values_by_labels: Mapping[tuple[str, ...], float | Distribution]) -> list[Sample]:
        """Return the samples of `family`."""
        samples: list[Sample] = []
        for label_values, value in values_by_labels.items():
            labels = {name: text for name, text in zip(self.labels, label_values, strict=True) if text != ""}
            if isinstance(value, Distribution):
                samples += _distribution_samples(self._base_name(), self.type, labels, value)
            else:
                samples.append(Sample(self.name, labels, value))
        return samples


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySpec(Family):
    """Specification of a family of the exporter: a named constant next to the code that fills the family.

    docs/METRICS.md is generated from the specifications. A specification that contradicts itself raises ValueError.

    Attributes:
        help: Meaning of the value in one or two sentences, as a scrape contains them. The texts below are Markdown and appear
            only in the document.
        source: File, call or formula from which the value comes.
        absent: Conditions under which the series is absent, such as "without a limit". "" if it is always present.
        details: Items of a list: meanings of label values, and rules.
    """

    help: str
    source: str
    absent: str = ""
    details: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problem = _contradiction(self)
        if problem:
            raise ValueError(f"family {self.name}: {problem}")


def _contradiction(spec: FamilySpec) -> str:
    """Return a sentence about the first contradiction in a specification, or "" without a contradiction."""
    name_parts = spec.name.removesuffix(TYPE_SUFFIXES.get(spec.type, "")).split("_")
    if not _NAME.fullmatch(spec.name):
        return "the name is not lower case letters, digits and single underscores"
    if spec.type not in get_args(FamilyType):
        return f"no exposition type {spec.type}"
    if not spec.name.endswith(TYPE_SUFFIXES.get(spec.type, "")):
        return f"the name of type {spec.type} ends in {TYPE_SUFFIXES[spec.type]}"
    for family_type, suffix in TYPE_SUFFIXES.items():
        if family_type != spec.type and spec.name.endswith(suffix):
            return f"the name of type {spec.type} does not end in {suffix}"
    if spec.unit != (name_parts[-1] if name_parts[-1] in BASE_UNITS else ""):
        return f"the unit {spec.unit!r} is not the base unit at the end of the name"
    if not all(map(_NAME.fullmatch, spec.labels)) or len(set(spec.labels)) < len(spec.labels):
        return f"the label names {spec.labels} are not distinct lower case names"
    if not spec.help.strip() or not spec.source.strip():
        return "help or source is empty"
    return ""


class _LazyMetric(Metric):
    """Metric with samples that are created on first access. Concurrent first accesses create equal samples."""

    precedence: Precedence

    def __init__(
        self, name: str, help: str, type_: str, unit: str, create_samples: Callable[[], list[Sample]]
    ) -> None:
        super().__init__(name, help, type_, unit)
        self._create_samples = create_samples
        del self.samples  # so that the first access calls `__getattr__`

    def __getattr__(self, name: str) -> list[Sample]:
        if name != "samples":
            raise AttributeError(name)
        self.samples: list[Sample] = self._create_samples()
        return self.samples


def _distribution_samples(
    name: str, type_: FamilyType, labels: dict[str, str], value: Distribution
) -> Iterator[Sample]:
    """Yield the samples `_bucket` (of a histogram), `_count`, and `_sum` if the sum is known."""
    if type_ == "histogram":
        for bound, count in (*value.buckets, (float("inf"), value.count)):
            # Adding 0.0 turns -0.0 into 0.0: they are equal, so that the cache would return the text of either for both.
            yield Sample(f"{name}_bucket", {**labels, "le": _go_number(bound + 0.0)}, count)
    count_sample = DistributionSample(f"{name}_count", labels, value.count)
    count_sample.distribution = value
    yield count_sample
    if value.sum is not None:
        yield Sample(f"{name}_sum", labels, value.sum)


def with_values(metric: Metric, values: Iterable[float]) -> Metric:
    """Return a copy of a gauge, counter or info with new values, in the order of its series."""
    new_metric = Metric(metric.name, metric.documentation, metric.type, metric.unit)
    new_metric.samples = [
        Sample(sample.name, sample.labels, value)
        for sample, value in zip(metric.samples, values, strict=True)
    ]
    return new_metric


@dataclass(frozen=True, slots=True)
class CachedFamily:
    """Family of the last pass, with its values by label values."""

    values: Mapping[tuple[str, ...], float]
    metric: Metric


class FamilyCache:
    """Families of the last pass, for collectors whose values rarely change.

    A family without a new value is returned as the same object, so that the page neither compares nor renders its samples.
    """

    def __init__(self) -> None:
        self._families: dict[str, CachedFamily] = {}

    def values(self, spec: FamilySpec) -> Mapping[tuple[str, ...], float] | None:
        """Return the values of the last pass by label values, or None if the family was absent."""
        cached = self._families.get(spec.name)
        return None if cached is None else cached.values

    def family(self, spec: FamilySpec, values: Mapping[tuple[str, ...], float]) -> Metric | None:
        """Return the family with these values by label values, or None without values.

        The mapping must not change afterwards.
        """
        cached = self._families.get(spec.name)
        if not values:
            self._families.pop(spec.name, None)
            return None
        if cached is None or [*cached.values] != [*values]:
            cached = self._families[spec.name] = CachedFamily(values, spec.family(values))
        elif cached.values != values:
            metric = with_values(cached.metric, values.values())
            cached = self._families[spec.name] = CachedFamily(values, metric)
        return cached.metric


def visible_name(metric: Metric) -> str:
    """Return the name of a family in Prometheus' text format."""
    return f"{metric.name}{TYPE_SUFFIXES.get(metric.type, '')}"


def precedence_of(metric: Metric) -> Precedence:
    """Return the precedence of a family. A family that does not belong to a Stat has `TOTAL`."""
    return metric.precedence if isinstance(metric, _LazyMetric) else Precedence.TOTAL


class Collected(list[Metric]):
    """Families and problems of a collector's pass.

    Attributes:
        problems: Reason and message of each failed part. With a problem, exporter_collector_success is 0, and the families of
            the other parts are published. A pass without families has failed.
        unsupported: Sentences about sources that this machine does not have, equal in every pass. A missing source is logged
            once and counted, and is not a failure.
    """

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[tuple[str, str]] = []
        self.unsupported: list[str] = []
        self._families: dict[str, Metric] = {}

    def add(self, spec: Family, value: float | Distribution | None, *label_values: str) -> None:
        """Add a sample, and with the first sample the family. The value None adds no sample."""
        if value is not None:
            if spec.name not in self._families:
                self._families[spec.name] = spec.family({})
                self.append(self._families[spec.name])
            self._families[spec.name].samples += spec.samples({label_values: value})

    def add_family(
        self, spec: Family, values_by_labels: Mapping[tuple[str, ...], float | Distribution]
    ) -> None:
        """Add a family with a value for each tuple of label values, unless the mapping is empty."""
        if values_by_labels:
            self.append(spec.family(values_by_labels))

    @contextmanager
    def part(self) -> Iterator[None]:
        """Record a `CollectError` of the body as a problem. The body must add its families last, so that a failure adds none."""
        try:
            yield
        except CollectError as error:
            self.fail(error)

    def fail(self, error: CollectError) -> None:
        """Record a problem, up to `MAX_PROBLEMS_PER_REASON` for each reason."""
        reasons = [reason for reason, _ in self.problems]
        if reasons.count(error.reason) < MAX_PROBLEMS_PER_REASON:
            self.problems.append((error.reason, str(error)))


class AnyCollector(Protocol):
    """Collector of prometheus_client with a name, which the scheduler calls."""

    @property
    def name(self) -> str:
        """Value of the label `collector`, and key in the configuration; in lower case."""

    def collect(self) -> Iterable[Metric]:
        """Read the source once. The call may block."""


class Collector(AnyCollector, Protocol):
    """Collector of the exporter, called from one thread at a time and never from a scrape."""

    @property
    def specs(self) -> tuple[FamilySpec, ...]:
        """Specifications of all families with fixed names that the collector can publish."""

    def collect(self) -> Collected:
        """Read the source once, and return the families and the problems."""
