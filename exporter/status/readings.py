"""Readings: the samples of a page by the names of their families.

Used in the sidecar, when the status page is made and when its history is noted. Values only, no threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from exporter.collectors.family import Distribution, Family

Row = tuple[Mapping[str, str], float]


class Readings:
    """What a page says, by name.

    Args:
        families: All of a page; those of one name may stand in several blocks.
    """

    def __init__(self, families: Iterable[Family]) -> None:
        self._families: dict[str, list[Family]] = {}
        for family in families:
            self._families.setdefault(family.spec.name, []).append(family)

    def names(self) -> Iterable[str]:
        """Every family there is."""
        return self._families

    def unit(self, name: str) -> str:
        """The base unit of a family; "" for none, and for one that is not there."""
        return next((family.spec.unit for family in self._families.get(name, ())), "")

    def rows(self, name: str, **labels: str) -> Iterator[Row]:
        """Give labels and value of every plain sample of a family that has these labels."""
        for found, value in self._samples(name, labels):
            if not isinstance(value, Distribution):
                yield found, value

    def value(self, name: str, **labels: str) -> float | None:
        """The first of them; None when there is none."""
        return next((value for _, value in self.rows(name, **labels)), None)

    def total(self, name: str, **labels: str) -> float | None:
        """Their sum; None when there is none."""
        values = [value for _, value in self.rows(name, **labels)]
        return sum(values) if values else None

    def distributions(self, name: str, **labels: str) -> Iterator[tuple[Mapping[str, str], Distribution]]:
        """The same for histograms and summaries."""
        for found, value in self._samples(name, labels):
            if isinstance(value, Distribution):
                yield found, value

    def _samples(
        self, name: str, wanted: Mapping[str, str]
    ) -> Iterator[tuple[Mapping[str, str], float | Distribution]]:
        for family in self._families.get(name, ()):
            for sample in family.samples:
                labels = dict(zip(family.spec.labels, sample.labels, strict=True))
                if all(labels.get(key, "") == value for key, value in wanted.items()):
                    yield labels, sample.value
