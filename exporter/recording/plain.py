"""Plain families: counters, gauges, histograms and summaries without windows, under a name of the exporter's own.

Used in the training process by the exporter's own faces and bridges. What is recorded goes the way of every Stat; the
family it becomes is declared in the sidecar (`exporter.ledger.admission`), which admits nothing else to its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from exporter.recording.definition import check_definition
from exporter.recording.stat import REGISTRY
from exporter.recording.values import Aggregation


def plain(
    kind: str,
    name: str,
    *,
    unit: str | None = None,
    labels: Mapping[str, str] | None = None,
    buckets: Iterable[float] | None = None,
    own: bool = True,
) -> Callable[[float], None]:
    """Make a plain family, or one more series of it; a counter is 0 from then on, so that its first rise is seen.

    Args:
        kind: `counter` (its value is the sum of what is added), `gauge` (the latest), `histogram` or `summary`.
        name: With dots: `training.elastic.restarts` is `training_elastic_restarts_total`.
        unit: A base unit.
        labels: Of this series; the names are the same for every series of a family.
        buckets: Of a histogram; None for a choice that suits the unit.
        own: Whether the name is one of the exporter's own; False for one that the job has chosen.

    Returns:
        `add`, which takes any int or float, never raises and never waits.

    Raises:
        DefinitionError: It cannot be, or is another family already.
    """
    aggregations = {Aggregation.HISTOGRAM} if kind == "histogram" else set()
    definition = check_definition(name, aggregations, unit=unit, labels=labels, buckets=buckets)
    tally = REGISTRY.obtain(definition.replace(kind=kind), own=own)
    return tally.buffer.append
