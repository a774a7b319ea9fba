"""Quotas of the families on a page with a limited number of series.

Tiers of families are admitted in order. Runs share the capacity of a tier fairly, and within a run small families are complete
before large families are cut. Families of third-party collectors may contain objects that are no samples; `text.write` refuses
these objects.
"""

from __future__ import annotations

import copy
import enum
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from exporter.exposition.text import PART_LABELS
from exporter.families import Precedence, precedence_of, visible_name
from exporter.recording.reserved import RESERVED, RESERVED_PREFIXES

Quotas = Mapping[tuple[str, str], int]
"""Maximum number of series of the families that are cut, by run and family; the run is "" for the exporter's own families."""

_GROWTH_RATIO = 1.25
"""A cut family keeps its previous quota until the new quota is larger by more than this factor, or smaller. Otherwise its last
series would appear and disappear with small changes of other families, which would look like gaps."""


class _Tier(enum.Enum):
    """Groups of families of equal precedence on a full page, in the order of admission."""

    ABOUT_THE_EXPORTER = "watched blocks, and exporter_*"
    EXPORTER = "other families of the exporter"
    TOTALS = "totals and values of Stats, and families of third-party collectors"
    SAMPLES = "numbers and times of samples"
    WINDOWS = "gauges of windows"


_Demands = dict[_Tier, dict[str, Counter[str]]]
"""Number of series by tier, run and family. The run is "" for the exporter's own families and for series without a run."""


def compute_quotas(
    watched_families: Iterable[Metric],
    published_families: Iterable[Metric],
    *,
    max_series: int,
    previous_quotas: Quotas,
) -> Quotas:
    """Return the quotas of the families that must be cut. A family without a quota is complete.

    Each tier receives the capacity that the earlier tiers leave.
    """
    quotas: dict[tuple[str, str], int] = {}
    capacity = max_series
    for demands_by_run in _count_series(watched_families, published_families).values():
        demands = {run: count_by_family.total() for run, count_by_family in demands_by_run.items()}
        shares = _allocate(demands, capacity)
        for run, count_by_family in demands_by_run.items():
            for name, quota in _allocate(count_by_family, shares.get(run, demands[run])).items():
                previous_quota = previous_quotas.get((run, name), 0)
                is_steady = previous_quota <= quota <= previous_quota * _GROWTH_RATIO
                quotas[run, name] = previous_quota if is_steady else quota
        capacity -= min(capacity, sum(demands.values()))
    return quotas


def cut_family(metric: Metric, name: str, quotas: Quotas) -> Metric:
    """Return a family cut to its quotas, or the same object if all series fit.

    A series of a histogram or summary keeps all of its samples or none.
    """
    # The series of one of the exporter's own families share a quota, of all runs.
    has_common_quota = ("", name) in quotas
    capacities: dict[str, float] = {}
    kept_samples = []
    for _, group in itertools.groupby(metric.samples, _labels_of_series):
        samples = list(group)
        run = "" if has_common_quota else _run_of(samples[0])
        capacity = capacities.get(run, quotas.get((run, name), math.inf))
        fits = len(samples) <= capacity
        kept_samples += samples if fits else []
        # After a group that does not fit, a smaller group must not appear and disappear.
        capacities[run] = capacity - len(samples) if fits else 0
    if len(kept_samples) == len(metric.samples):
        return metric
    cut_metric = copy.copy(metric)
    cut_metric.samples = kept_samples
    return cut_metric


def samples_of(metric: Metric) -> Sequence[Sample]:
    """Return the samples of a family. A family with another object than a list in `samples` has no samples."""
    return metric.samples if isinstance(metric.samples, list | tuple) else ()


def _count_series(watched_families: Iterable[Metric], published_families: Iterable[Metric]) -> _Demands:
    """Return the number of series of all families."""
    demands: _Demands = {tier: {} for tier in _Tier}
    for metric in watched_families:
        own_demands = demands[_Tier.ABOUT_THE_EXPORTER].setdefault("", Counter())
        own_demands[visible_name(metric)] += len(samples_of(metric))
    for metric in published_families:
        name = visible_name(metric)
        tier = _tier_of(name, metric)
        if tier in {_Tier.ABOUT_THE_EXPORTER, _Tier.EXPORTER}:
            demands[tier].setdefault("", Counter())[name] += len(samples_of(metric))
        else:
            for run, count in Counter(map(_run_of, samples_of(metric))).items():
                demands[tier].setdefault(run, Counter())[name] += count
    return demands


def _tier_of(name: str, metric: Metric) -> _Tier:
    """Return the tier of a published family, from its precedence and its name."""
    match precedence_of(metric):
        case Precedence.WINDOW:
            return _Tier.WINDOWS
        case Precedence.SAMPLES:
            return _Tier.SAMPLES
        case Precedence.TOTAL if name.startswith("exporter_"):
            return _Tier.ABOUT_THE_EXPORTER
        case Precedence.TOTAL if name in RESERVED or name.startswith(RESERVED_PREFIXES):
            return _Tier.EXPORTER
        case Precedence.TOTAL:
            return _Tier.TOTALS


def _run_of(sample: Sample) -> str:
    """Return the label `run` of a sample; "" if the label is absent or is not text."""
    run = _labels_of(sample).get("run", "")
    return run if isinstance(run, str) else ""


def _labels_of(sample: Sample) -> Mapping[str, str]:
    """Return the labels of a sample; no labels for an object that is not a sample."""
    labels = getattr(sample, "labels", None)
    return labels if isinstance(labels, Mapping) else {}


def _labels_of_series(sample: Sample) -> list[tuple[str, Any]]:
    """Return the labels that the samples of a series of a histogram or summary have in common."""
    return [(name, value) for name, value in _labels_of(sample).items() if name not in PART_LABELS]


def _allocate(demands: Mapping[str, int], capacity: int) -> dict[str, int]:
    """Divide a capacity fairly among demands, the smallest demand first.

    Returns the shares of the demands that are not met completely. For example, a capacity of 100 meets the demand of a in
    {a: 10, b: 60, c: 80}; the result is {b: 45, c: 45}.
    """
    shares: dict[str, int] = {}
    remaining_count = len(demands)
    for name in sorted(demands, key=lambda name: (demands[name], name)):
        demand = demands[name]
        # Rounded up, so that the capacity is used if it is below the number of demands.
        share = math.ceil(capacity / remaining_count)
        if demand > share:
            shares[name] = share
        capacity -= min(demand, share)
        remaining_count -= 1
    return shares
