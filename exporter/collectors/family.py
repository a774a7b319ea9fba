"""Families and their samples: what every collector publishes, and the one-method seam it does it through.

Used in the sidecar only. A `Family` is immutable; a collector hands over a whole new block each time, or
nothing. Absent is *no sample*, never NaN and never a sentinel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

FamilyType = Literal["counter", "gauge", "histogram", "summary", "info"]


@dataclass(frozen=True, slots=True)
class FamilySpec:
    """What a family is; stands beside the code that fills it and is the source of docs/METRICS.md.

    Attributes:
        name: As Prometheus' text format shows it: counters with `_total`, infos with `_info`.
        type: Its exposition type.
        help: One sentence: what it is, and when it is absent.
        labels: Label names in the order in which samples give their values.
        unit: The base unit that the name carries before `_total`; "" for none.
        source: Where the number comes from (file, call, formula).
    """

    name: str
    type: FamilyType
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Distribution:
    """The value of one histogram or summary series.

    Attributes:
        count: All observations.
        sum: Their sum; None leaves `_sum` out (a negative observation was seen).
        buckets: (upper bound, observations <= bound), ascending, finite bounds only; empty for a summary.
    """

    count: int
    sum: float | None
    buckets: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One series of a family.

    Attributes:
        labels: Values in the order of the spec's names; an empty string means that the label is absent.
        value: A number, or a Distribution for histograms and summaries.
    """

    labels: tuple[str, ...]
    value: float | Distribution


@dataclass(frozen=True, slots=True)
class Family:
    """A spec and its samples at one moment; label sets are unique within it."""

    spec: FamilySpec
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class Collected:
    """The outcome of a collection that has something to publish.

    Attributes:
        families: The whole block; replaces the previous one.
        problems: (reason, message) of parts that failed; any makes the verdict 0 though the rest is published.
        unsupported: What this machine does not offer, in words that stay the same from pass to pass. No
            failure: it is logged once and counted in `exporter_collector_unsupported_sources`.
    """

    families: Sequence[Family]
    problems: tuple[tuple[str, str], ...] = field(default=())
    unsupported: tuple[str, ...] = field(default=())


class Collector(Protocol):
    """A source of families; one file per subject.

    `collect` is called from one thread at a time, never from the scrape. It may block: its deadline costs
    only itself. A class that also has `reasons` names the closed set of its `CollectError` and problem
    reasons; tests hold it to that.
    """

    @property
    def name(self) -> str:
        """The value of the label `collector`; lower case, stable."""
        ...

    @property
    def specs(self) -> Sequence[FamilySpec]:
        """Every family this collector can publish under a fixed name."""
        ...

    def collect(self) -> Collected:
        """Read the source once.

        Raises:
            CollectError: Nothing can be published; `reason` says why.
        """
        ...
