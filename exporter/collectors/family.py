"""Families and their samples: what every collector publishes, and the one-method seam it does it through.

Used in the sidecar only. A `Family` is immutable; a collector hands over a whole new block each time, or
nothing. Absent is *no sample*, never NaN and never a sentinel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client.core import Metric

from exporter.families import Distribution, FamilySpec, FamilyType

__all__ = [
    "AnyCollector",
    "Collected",
    "Collector",
    "Distribution",
    "Family",
    "FamilySpec",
    "FamilyType",
    "Sample",
]


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


class AnyCollector(Protocol):
    """What the scheduler takes: one of ours, new or old, or any of prometheus_client's kind with a name."""

    @property
    def name(self) -> str:
        """The value of the label `collector`."""
        ...

    def collect(self) -> Collected | Iterable[Metric]:
        """Read the source once."""
        ...
