"""What a collector handed over, as the page takes it: metric families; those of the old kind are converted.

Used in the sidecar, on the collector's thread. No state.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric

from exporter import families
from exporter.collectors.family import Collected, Family


def take(collected: Collected | Iterable[Metric]) -> families.Collected:
    """Take one pass of any collector: ours, or any that yields prometheus_client's families.

    Raises:
        TypeError: It is neither.
    """
    if isinstance(collected, families.Collected):
        return collected
    taken = families.Collected()
    if isinstance(collected, Collected):
        taken.extend(metrics_of(collected.families))
        taken.problems.extend(collected.problems)
        taken.unsupported.extend(collected.unsupported)
        return taken
    for metric in collected:
        if not isinstance(metric, Metric):
            raise TypeError(f"a collector yields metric families, not {type(metric).__name__}")
        taken.append(metric)
    return taken


def metrics_of(given: Iterable[Family | Metric]) -> tuple[Metric, ...]:
    """Convert families of the old kind."""
    return tuple(
        each.spec.family({sample.labels: sample.value for sample in each.samples})
        if isinstance(each, Family)
        else each
        for each in given
    )
