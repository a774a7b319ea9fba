"""Families of Stats: totals, gauges and windows of every visible slot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric

from exporter.families import Distribution, Family, FamilyType, Precedence
from exporter.ledger.families import IDENTITY_LABELS
from exporter.ledger.families.training_family import Lifetime
from exporter.ledger.family_owners import TRAINING_FAMILIES, FamilyOwner, FamilyOwners, create_plan
from exporter.ledger.totals import GapRules, Moment, StatPlan, VisibleSlot
from exporter.recording.values import AGGREGATIONS, Aggregation, StatReading, WindowReading

Samples = dict[tuple[str, ...], float | Distribution]


@dataclass(frozen=True, slots=True, eq=False)
class StatSeries:
    """Series of a Stat: owner of the family, and label values."""

    owner: FamilyOwner
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _CachedFamily:
    """Family of the last pass, which is reused if specification and samples are equal."""

    spec: Family
    samples: Samples
    metric: Metric


@dataclass(frozen=True, slots=True, eq=False)
class _SlotSeries:
    """Series of the Stats of a slot's running process, in the order of the plans; None for a Stat that is not published."""

    plans: list[StatPlan | None]
    series: list[StatSeries | None]


class StatMetrics:
    """Families of all Stats. An unchanged family is the same object as in the last pass."""

    def __init__(self, owners: FamilyOwners) -> None:
        self._owners = owners
        self._oldest_window_end = 0.0  # Unix time
        self._samples: dict[str, Samples] = {}
        self._cache: dict[str, _CachedFamily] = {}
        # Specifications and series are valid for a version of the owners.
        self._version = 0
        self._specs: dict[str, Family] = {}
        self._series_by_slot: dict[tuple[str, ...], _SlotSeries] = {}

    def build(self, slots: Sequence[VisibleSlot], rules: GapRules, now: Moment) -> list[Metric]:
        """Return the families of a pass, sorted by name."""
        # Claimed after the Stats of running processes, which `FamilyOwners.count` has decided.
        exited_plans = [
            (slot, plan) for slot in slots for plan in _exited_plans(slot) if self._owners.claim(plan)
        ]
        if self._version != self._owners.version:
            self._version, self._specs, self._series_by_slot = self._owners.version, {}, {}
        self._samples = {}
        self._oldest_window_end = now.wall - rules.stale_after_seconds
        for slot in slots:
            self._add_running(slot)
        for slot, plan in exited_plans:
            total, series = slot.worker_slot.total(plan.key), self._series_of(plan, slot)
            if total is not None and series is not None:
                self._add_total(slot, plan, series, total)
        previous, self._cache = self._cache, {}
        for name, samples in sorted(self._samples.items()):
            spec, family = self._specs[name], previous.get(name)
            if family is None or family.spec is not spec or family.samples != samples:
                family = _CachedFamily(spec, samples, spec.lazy_family(samples))
            self._cache[name] = family
        return [cached_family.metric for cached_family in self._cache.values()]

    def _add_running(self, slot: VisibleSlot) -> None:
        """Add the Stats of the slot's running process, with the totals of the slot's earlier processes."""
        process, worker_slot = slot.process, slot.worker_slot
        if process.snapshot is None or not process.is_alive:
            return
        slot_series = self._series_by_slot.get(slot.labels)
        if slot_series is None or slot_series.plans is not process.admitted_plans:
            series_of_plans = [
                None if plan is None else self._series_of(plan, slot) for plan in process.admitted_plans
            ]
            slot_series = self._series_by_slot[slot.labels] = _SlotSeries(
                process.admitted_plans, series_of_plans
            )
        other_parts = [part for part in worker_slot.parts() if part is not process and part.series]
        readings = process.snapshot.recording.stats
        for plan, stat_series, reading in zip(slot_series.plans, slot_series.series, readings, strict=True):
            if plan is None or stat_series is None or plan.key not in process.series:
                continue
            total = process.series[plan.key]
            if other_parts and any(plan.key in part.series for part in other_parts):
                total = worker_slot.total(plan.key) or total
            self._add_total(slot, plan, stat_series, total)
            if slot.is_fresh and plan.families.samples:
                self._add_windows(plan, stat_series, reading.window)

    def _series_of(self, plan: StatPlan, slot: VisibleSlot) -> StatSeries | None:
        """Return the series of a Stat, or None if the Stat is not admitted.

        Returns None too if only rank 0 provides the family, and the slot is of another rank.
        """
        owner = self._owners.owner(plan)
        if owner is None:
            return None
        identity_labels: tuple[str, ...] = slot.labels
        spec = TRAINING_FAMILIES.get(owner.main)
        if spec is not None and "rank" not in spec.labels:
            if not slot.is_rank_0:
                return None
            identity_labels = identity_labels[:1]
        stat_labels = dict(plan.key.labels)
        return StatSeries(
            owner, (*identity_labels, *[stat_labels.get(name, "") for name in owner.label_names])
        )

    def _add_total(self, slot: VisibleSlot, plan: StatPlan, series: StatSeries, total: StatReading) -> None:
        """Add the total, or the value of a gauge, as far as it may be shown, and the time of the last sample."""
        families, kind = plan.families, plan.definition.kind
        value: float | Distribution | None = None
        if kind == "gauge":
            if _shows_gauge(families.main, slot):
                value = total.value
        elif slot.is_saved and kind == "counter":
            value = total.sum
        elif slot.is_saved:
            buckets = tuple(zip(total.definition.buckets, total.bucket_counts, strict=True))
            value = Distribution(total.count, total.sum, buckets, total.exponential)
        if value is not None:
            self._add(families.main, None, series, value)
        if families.last_sample and total.last_sample is not None:
            self._add(families.last_sample, None, series, total.last_sample)

    def _add_windows(self, plan: StatPlan, series: StatSeries, window: WindowReading | None) -> None:
        """Add the gauges of the last closed window.

        Adds nothing if the next window should have closed more than `GapRules.stale_after_seconds` ago.
        """
        window_seconds = plan.definition.window_seconds
        if (
            window is not None
            and window_seconds is not None
            and window.ended + window_seconds < self._oldest_window_end
        ):
            return
        self._add(plan.families.samples, None, series, 0 if window is None else window.samples)
        if window is not None and window.samples:
            for aggregation, name in plan.families.windows:
                value = window.values.get(aggregation)
                # The first window after a new Stat rule still has the previous aggregations.
                if value is not None:
                    self._add(name, aggregation, series, value)

    def _add(
        self, name: str, aggregation: Aggregation | None, series: StatSeries, value: float | Distribution
    ) -> None:
        """Add a value to a family, whose specification is created on first use."""
        samples = self._samples.get(name)
        if samples is None:
            samples = self._samples[name] = {}
            if name not in self._specs:
                self._specs[name] = _spec(name, aggregation, series.owner)
        samples[series.labels] = value


def _shows_gauge(name: str, slot: VisibleSlot) -> bool:
    """Return True if the lifetime of a gauge permits the value: current, or the last position of an exited process."""
    spec = TRAINING_FAMILIES.get(name)
    lifetime = Lifetime.CURRENT if spec is None else spec.lifetime
    if lifetime is Lifetime.LAST_VALUE:
        return slot.is_advancing
    return slot.is_fresh or (lifetime is Lifetime.POSITION and not slot.process.is_alive)


def _exited_plans(slot: VisibleSlot) -> Iterable[StatPlan]:
    """Return the plans of the Stats that processes within the retention time had, and the running process does not have."""
    running_series = slot.process.series if slot.process.is_alive else {}
    definitions = {
        key: reading.definition for part in slot.lingering_parts for key, reading in part.series.items()
    }
    return filter(
        None,
        [create_plan(definition) for key, definition in definitions.items() if key not in running_series],
    )


def _spec(name: str, aggregation: Aggregation | None, owner: FamilyOwner) -> Family:
    """Return the specification of a family of a Stat: the main family, a window gauge, the number of samples or the last sample.

    *aggregation* is the aggregation of a window gauge, and None for other families.
    """
    if name in TRAINING_FAMILIES:
        return TRAINING_FAMILIES[name]
    first, unit = owner.first_definition, owner.first_definition.unit or ""
    kind: FamilyType = "gauge"
    precedence = Precedence.SAMPLES
    absence = "the process exited or the feed is stale."
    if name == owner.main:
        precedence = Precedence.TOTAL
        text = first.help or f"Stat {first.name}."
        if first.kind != "gauge":
            distribution: FamilyType = "histogram" if owner.shape.is_histogram else "summary"
            kind = "counter" if first.kind == "counter" else distribution
    elif aggregation is not None:
        precedence = Precedence.WINDOW
        aggregation_help = AGGREGATIONS[aggregation].help
        text = f"{aggregation_help} of the last closed window of {first.name}; absent when the window was empty, {absence}"
    elif name.endswith("_last_sample_timestamp_seconds"):
        text, unit = f"Unix time of the latest sample of {first.name}; absent before the first.", "seconds"
    else:
        text = (
            f"Samples of the last closed window of {first.name}; 0 for an empty window, absent when {absence}"
        )
        unit = ""
    labels = IDENTITY_LABELS + owner.label_names
    return Family(name=name, type=kind, help=text, labels=labels, unit=unit, precedence=precedence)
