"""Families of the Stats: what users recorded, under the names that they gave it.

Runs in the sidecar, on the ledger's collecting thread; no I/O. Visible slots come in, families go out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric

from exporter.families import Distribution, FamilySpec, FamilyType
from exporter.ledger.admission import OWN, Admission, Claim, Plan, identity_labels
from exporter.ledger.families.training import HANGING, IDENTITY_LABELS
from exporter.ledger.totals import Moment
from exporter.ledger.visible import VisibleSlot
from exporter.recording.aggregations import AGGREGATIONS, Aggregation
from exporter.recording.values import StatReading, WindowReading

RANK_0 = ("0", "", "")
"""Rank, worker and role of the process whose word is the run's."""

Samples = dict[tuple[str, ...], float | Distribution]


@dataclass(slots=True)
class Made:
    """A family of one pass, which the next takes as it is where nothing has changed: most windows close once a minute."""

    spec: FamilySpec
    samples: Samples
    metric: Metric | None = None


class StatFamilies:
    """Makes the families of all Stats.

    Args:
        admission: Says which Stat may use which names.
        stale_after_seconds: A time window that ended longer ago than its length and this is no longer the last one: its
            gauges and its number of samples are absent.
    """

    def __init__(self, admission: Admission, *, stale_after_seconds: float) -> None:
        self._admission = admission
        self._stale_after_seconds = stale_after_seconds
        self._oldest = 0.0
        self._families: dict[str, Made] = {}

    def fill(self, slots: Sequence[VisibleSlot], now: Moment) -> list[Metric]:
        """Make those of one pass, sorted by name."""
        before, self._families = self._families, {}
        self._oldest = now.wall - self._stale_after_seconds
        for each in slots:
            self._living(each)
            for key, plan in each.leftovers().items():
                total = each.slot.total(key)
                if total is not None and (found := self._claim(plan, each)) is not None:
                    self._totals(each, plan, *found, total)
        metrics: list[Metric] = []
        for name, made in sorted(self._families.items()):
            old = before.get(name)
            if old is not None and old.samples == made.samples and old.spec == made.spec:
                made.metric = old.metric
            made.metric = made.metric or made.spec.later(made.samples)
            metrics.append(made.metric)
        return metrics

    def _living(self, visible: VisibleSlot) -> None:
        process = visible.process
        if process.snapshot is None or not process.living:
            return
        alone = not visible.slot.base.series and len(visible.slot.processes) == 1
        last = visible.slot.processes[-1] is process
        before = [visible.slot.base, *visible.slot.processes[:-1]] if last and not alone else []
        for plan, reading, recorded in zip(
            process.admitted, process.current, process.snapshot.recording.stats, strict=True
        ):
            if plan is None or reading is None or (found := self._claim(plan, visible)) is None:
                continue
            if alone or (last and not any(plan.key in part.series for part in before)):
                total = reading
            else:
                total = visible.slot.total(plan.key) or reading
            self._totals(visible, plan, *found, total)
            if visible.fresh and plan.families.samples:
                self._windows(plan, *found, recorded.window)

    def _claim(self, plan: Plan, visible: VisibleSlot) -> tuple[Claim, tuple[str, ...]] | None:
        """Find the family of a Stat, and the labels of its series; None where it has none."""
        claim = self._admission.claim(plan)
        if claim is None:
            return None
        identity: tuple[str, ...] = visible.labels
        own = OWN.get(claim.main)
        if own is not None and len(identity_labels(own)) < len(identity):
            if visible.labels[1:] != RANK_0:
                return None
            identity = identity[:1]
        if not claim.label_names:
            return claim, identity
        mine = dict(plan.key[1])
        return claim, (*identity, *[mine.get(name, "") for name in claim.label_names])

    def _totals(
        self, visible: VisibleSlot, plan: Plan, claim: Claim, labels: tuple[str, ...], total: StatReading
    ) -> None:
        names, kind = plan.families, plan.definition.kind
        if kind == "gauge":
            # A gauge tells of now, and is no total that a restart could take back.
            shown = visible.advancing if names.main in HANGING else visible.fresh
            if shown and total.value is not None:
                self._add(names.main, None, claim, labels, total.value)
            return
        if visible.counted:
            if kind == "counter":
                if total.sum is not None:
                    self._add(names.main, None, claim, labels, total.sum)
            else:
                bounds = total.definition.buckets
                buckets = tuple(zip(bounds, total.bucket_counts, strict=True)) if bounds else ()
                self._add(names.main, None, claim, labels, Distribution(total.count, total.sum, buckets))
        if names.last_sample and total.last_sample is not None:
            self._add(names.last_sample, None, claim, labels, total.last_sample)

    def _windows(
        self, plan: Plan, claim: Claim, labels: tuple[str, ...], window: WindowReading | None
    ) -> None:
        """The gauges of the last window, unless another should long have closed."""
        length = plan.definition.window_seconds
        if window is not None and length is not None and window.ended + length < self._oldest:
            return
        names = plan.families
        self._add(names.samples, None, claim, labels, 0 if window is None else window.samples)
        if window is not None and window.samples:
            for aggregation, name in names.windows:
                value = window.values.get(aggregation)
                if value is not None:  # the first window after an override still has the old ones
                    self._add(name, aggregation, claim, labels, value)

    def _add(
        self,
        name: str,
        aggregation: Aggregation | None,
        claim: Claim,
        labels: tuple[str, ...],
        value: float | Distribution,
    ) -> None:
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = Made(_spec(name, aggregation, claim), {})
        family.samples[labels] = value


def _spec(name: str, aggregation: Aggregation | None, claim: Claim) -> FamilySpec:
    if name in OWN:
        return OWN[name]
    first, unit = claim.first, claim.first.unit or ""
    labels = IDENTITY_LABELS + claim.label_names
    if name == claim.main:
        kind: FamilyType = "histogram" if claim.shape[0] else "summary"
        if first.kind in {"counter", "gauge"}:
            kind = "counter" if first.kind == "counter" else "gauge"
        return FamilySpec(name, kind, first.help or f"Stat {first.name}.", labels, unit)
    if aggregation is not None:
        text = (
            f"{AGGREGATIONS[aggregation].help} of the last closed window of {first.name}; absent when the window was empty, the"
            " process is gone or its feed is not refreshed."
        )
        return FamilySpec(name, "gauge", text, labels, unit)
    if name.endswith("_seconds"):
        text = f"Unix time of the latest sample of {first.name}; absent before the first."
        return FamilySpec(name, "gauge", text, labels, "seconds")
    text = (
        f"Samples of the last closed window of {first.name}; 0 when there were none, absent when the process is gone or"
        " its feed is not refreshed."
    )
    return FamilySpec(name, "gauge", text, labels)
