"""Readings: the samples of a page by the names of their families. Values only, no threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import Metric

from exporter.families import visible_name

Labels = Mapping[str, str]


class Readings:
    """What a page says, by name.

    Args:
        families: All of a page; those of one name may stand in several blocks.
    """

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families: dict[str, list[Metric]] = {}
        for family in families:
            self._families.setdefault(visible_name(family), []).append(family)

    def names(self) -> Iterable[str]:
        """Every family there is."""
        return self._families

    def unit(self, name: str) -> str:
        """The base unit of a family; "" for none, and for one that is not there."""
        return next((family.unit for family in self._families.get(name, ())), "")

    def rows(self, name: str, suffix: str = "", **labels: str) -> Iterator[tuple[Labels, float]]:
        """Give labels and value of every sample of a family that has this suffix and these labels."""
        for family in self._families.get(name, ()):
            for sample in family.samples:
                found = sample.labels
                if sample.name == name + suffix and all(
                    found.get(key, "") == value for key, value in labels.items()
                ):
                    yield found, sample.value

    def value(self, name: str, **labels: str) -> float | None:
        """The first of them; None when there is none."""
        return next((value for _, value in self.rows(name, **labels)), None)

    def total(self, name: str, **labels: str) -> float | None:
        """Their sum; None when there is none."""
        values = [value for _, value in self.rows(name, **labels)]
        return sum(values) if values else None

    def means(self, name: str, **labels: str) -> Iterator[tuple[Labels, float, float | None]]:
        """The same for histograms and summaries: labels, count, and the sum where there is one."""
        sums = {frozenset(found.items()): value for found, value in self.rows(name, "_sum", **labels)}
        for found, count in self.rows(name, "_count", **labels):
            yield found, count, sums.get(frozenset(found.items()))
