"""Readings: the samples of a page by the names of their families.

Used in the sidecar, when the status page is made and when its history is noted. Values only, no threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import Metric

from exporter.families import Distribution, visible_name

Row = tuple[Mapping[str, str], float]


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

    def rows(self, name: str, **labels: str) -> Iterator[Row]:
        """Give labels and value of every plain sample of a family that has these labels."""
        for family in self._families.get(name, ()):
            for sample in family.samples:
                if sample.name == name and _has(sample.labels, labels):
                    yield sample.labels, sample.value

    def value(self, name: str, **labels: str) -> float | None:
        """The first of them; None when there is none."""
        return next((value for _, value in self.rows(name, **labels)), None)

    def total(self, name: str, **labels: str) -> float | None:
        """Their sum; None when there is none."""
        values = [value for _, value in self.rows(name, **labels)]
        return sum(values) if values else None

    def distributions(self, name: str, **labels: str) -> Iterator[tuple[Mapping[str, str], Distribution]]:
        """The same for histograms and summaries."""
        buckets: list[tuple[float, int]] = []
        counted: tuple[Mapping[str, str], int] | None = None
        for family in self._families.get(name, ()):
            for sample in (*family.samples, None):
                if counted is not None and (sample is None or sample.name != f"{name}_sum"):
                    yield counted[0], Distribution(counted[1], None, tuple(buckets))
                    buckets, counted = [], None
                if sample is None or not _has(sample.labels, labels):
                    continue
                if sample.name == f"{name}_bucket" and sample.labels["le"] != "+Inf":
                    buckets.append((float(sample.labels["le"]), int(sample.value)))
                elif sample.name == f"{name}_count":
                    counted = sample.labels, int(sample.value)
                elif sample.name == f"{name}_sum" and counted is not None:
                    yield counted[0], Distribution(counted[1], sample.value, tuple(buckets))
                    buckets, counted = [], None


def _has(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(labels.get(key, "") == value for key, value in wanted.items())
