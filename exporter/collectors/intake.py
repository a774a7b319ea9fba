"""What a collector handed over, as the page takes it: old families as they are, metric families converted.

Used in the sidecar by the scheduler, on the collector's thread. No state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import Metric

from exporter import families
from exporter.collectors.family import Collected, Distribution, Family, FamilySpec, FamilyType, Sample
from exporter.errors import CollectError

_TYPES: dict[str, FamilyType] = {
    "counter": "counter",
    "histogram": "histogram",
    "summary": "summary",
    "info": "info",
    "stateset": "stateset",
}
_SUFFIXES = {"counter": "_total", "info": "_info"}


def take(collected: Collected | Iterable[Metric]) -> Collected:
    """Take one pass of any collector.

    Raises:
        CollectError: All that was tried failed, so that there is nothing to publish.
    """
    if isinstance(collected, Collected):
        return collected
    problems: Sequence[tuple[str, str]] = ()
    unsupported: Sequence[str] = ()
    if isinstance(collected, families.Collected):
        problems, unsupported = collected.problems, collected.unsupported
    made = tuple(_family(metric) for metric in collected)
    if problems and not made:
        reason, message = problems[0]
        more = len(problems) - 1
        raise CollectError(f"{message} (and {more} more)" if more else message, reason=reason)
    return Collected(made, tuple(problems), tuple(unsupported))


def _family(metric: Metric) -> Family:
    kind = _TYPES.get(metric.type, "gauge")
    names = sorted({name for sample in metric.samples for name in sample.labels})
    if kind == "histogram":
        names = [name for name in names if name != "le"]
    spec = FamilySpec(
        metric.name + _SUFFIXES.get(kind, ""), kind, metric.documentation, tuple(names), metric.unit
    )
    if kind in ("histogram", "summary"):
        return Family(spec, _distributions(metric, names))
    return Family(
        spec,
        tuple(
            Sample(tuple(each.labels.get(name, "") for name in names), each.value) for each in metric.samples
        ),
    )


def _distributions(metric: Metric, names: list[str]) -> tuple[Sample, ...]:
    buckets: dict[tuple[str, ...], list[tuple[float, int]]] = {}
    sums: dict[tuple[str, ...], float] = {}
    counts: dict[tuple[str, ...], int] = {}
    for sample in metric.samples:
        labels = tuple(sample.labels.get(name, "") for name in names)
        if sample.name.endswith("_bucket"):
            if sample.labels["le"] != "+Inf":
                buckets.setdefault(labels, []).append((float(sample.labels["le"]), int(sample.value)))
        elif sample.name.endswith("_sum"):
            sums[labels] = sample.value
        elif sample.name.endswith("_count"):
            counts[labels] = int(sample.value)
    return tuple(
        Sample(labels, Distribution(count, sums.get(labels), tuple(buckets.get(labels, ()))))
        for labels, count in counts.items()
    )
