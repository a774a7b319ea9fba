"""Lookup of samples by family name and labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric

from exporter.families import visible_name

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Observations:
    """Count and sum of the observations of a histogram or summary."""

    labels: Labels
    count: float
    sum: float | None  # None without a sample `_sum`, which a histogram with negative observations lacks


class SampleIndex:
    """Index of samples by family name. Families of the same name are merged.

    The label arguments of the methods select the samples with these label values. The value "" also selects samples without the
    label, as in PromQL.
    """

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families: dict[str, list[Metric]] = {}
        for family in families:
            self._families.setdefault(visible_name(family), []).append(family)

    def names(self) -> Iterable[str]:
        """Return the names of all families."""
        return self._families

    def unit(self, name: str) -> str:
        """Return the base unit of a family; "" for no unit or no such family."""
        return next((family.unit for family in self._families.get(name, ())), "")

    def select(self, name: str, suffix: str = "", **labels: str) -> Iterator[tuple[Labels, float]]:
        """Yield labels and value of each matching sample of a family. *suffix* is the suffix of the sample name, such as "_count"."""
        for family in self._families.get(name, ()):
            for sample in family.samples:
                sample_labels = sample.labels
                if sample.name == name + suffix and all(
                    sample_labels.get(key, "") == value for key, value in labels.items()
                ):
                    yield sample_labels, sample.value

    def value(self, name: str, **labels: str) -> float | None:
        """Return the value of the first matching sample, or None if no sample matches."""
        return next((value for _, value in self.select(name, **labels)), None)

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of the matching samples, or None if no sample matches."""
        values = [value for _, value in self.select(name, **labels)]
        return sum(values) if values else None

    def observations(self, name: str, **labels: str) -> Iterator[Observations]:
        """Yield the count and the sum of each matching series of a histogram or summary."""
        sums = {
            frozenset(sample_labels.items()): value
            for sample_labels, value in self.select(name, "_sum", **labels)
        }
        for sample_labels, count in self.select(name, "_count", **labels):
            yield Observations(sample_labels, count, sums.get(frozenset(sample_labels.items())))
