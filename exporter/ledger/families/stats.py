"""Families of the Stats: what users recorded, under the names that they gave it.

Runs in the sidecar, on the ledger's collecting thread; no I/O. Visible slots come in, families go out.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.core import Metric

from exporter.families import Distribution, FamilySpec, FamilyType
from exporter.ledger.admission import OWN, Admission, Claim, Plan, identity_labels
from exporter.ledger.families.training import IDENTITY_LABELS, LAST_VALUES
from exporter.ledger.totals import Moment
from exporter.ledger.visible import VisibleSlot
from exporter.recording.values import AGGREGATIONS, Aggregation, StatReading, WindowReading

RANK_0 = ("0", "", "")
"""Rank, worker and role of the process whose word is the run's."""

Samples = dict[tuple[str, ...], float | Distribution]
Place = tuple[Claim, tuple[str, ...]]
"""The family of a Stat, and the labels of its series."""


class StatFamilies:
    """Makes the families of all Stats; one in which nothing has changed is taken as the last pass made it.

    Args:
        admission: Says which Stat may use which names.
        stale_after_seconds: A time window that ended longer ago than its length and this is no longer the last one: its
            gauges and its number of samples are absent.
    """

    def __init__(self, admission: Admission, *, stale_after_seconds: float) -> None:
        self._admission = admission
        self._stale_after_seconds = stale_after_seconds
        self._oldest = 0.0
        self._samples: dict[str, Samples] = {}
        self._made: dict[str, tuple[FamilySpec, Samples, Metric]] = {}
        # As long as nobody claims another family, everything has the place that it had in the last pass.
        self._settled = 0
        self._specs: dict[str, FamilySpec] = {}
        self._places: dict[tuple[str, ...], tuple[list[Plan | None], list[Place | None]]] = {}

    def fill(self, slots: Sequence[VisibleSlot], now: Moment) -> list[Metric]:
        """Make those of one pass, sorted by name."""
        if self._settled != self._admission.settled:
            self._settled, self._specs, self._places = self._admission.settled, {}, {}
        self._samples = {}
        self._oldest = now.wall - self._stale_after_seconds
        for each in slots:
            self._living(each)
            for key, plan in each.leftovers().items():
                total, place = each.slot.total(key), self._place(plan, each)
                if total is not None and place is not None:
                    self._totals(each, plan, place, total)
        before, self._made = self._made, {}
        for name, samples in sorted(self._samples.items()):
            spec, old = self._specs[name], before.get(name)
            if old is not None and old[0] == spec and old[1] == samples:
                self._made[name] = old
            else:
                self._made[name] = spec, samples, spec.later(samples)
        return [metric for _, _, metric in self._made.values()]

    def _living(self, visible: VisibleSlot) -> None:
        process, slot = visible.process, visible.slot
        if process.snapshot is None or not process.living:
            return
        admitted, places = self._places.get(visible.labels, ([], []))
        if admitted is not process.admitted:
            admitted = process.admitted
            places = [None if plan is None else self._place(plan, visible) for plan in admitted]
            self._places[visible.labels] = admitted, places
        others = [part for part in slot.parts() if part is not process and part.series]
        readings = process.snapshot.recording.stats
        for plan, place, total, recorded in zip(admitted, places, process.current, readings, strict=True):
            if plan is None or place is None or total is None:
                continue
            if others and any(plan.key in part.series for part in others):
                total = slot.total(plan.key) or total  # noqa: PLW2901  # of all processes, where there were several
            self._totals(visible, plan, place, total)
            if visible.fresh and plan.families.samples:
                self._windows(plan, place, recorded.window)

    def _place(self, plan: Plan, visible: VisibleSlot) -> Place | None:
        claim = self._admission.claim(plan)
        if claim is None:
            return None
        identity: tuple[str, ...] = visible.labels
        own = OWN.get(claim.main)
        if own is not None and len(identity_labels(own)) == 1:
            if visible.labels[1:] != RANK_0:
                return None
            identity = identity[:1]
        mine = dict(plan.key[1])
        return claim, (*identity, *[mine.get(name, "") for name in claim.label_names])

    def _totals(self, visible: VisibleSlot, plan: Plan, place: Place, total: StatReading) -> None:
        names, kind = plan.families, plan.definition.kind
        value: float | Distribution | None = None
        if kind == "gauge":
            # A gauge tells of now, and is no total that a restart could take back.
            if visible.advancing if names.main in LAST_VALUES else visible.fresh:
                value = total.value
        elif visible.counted and kind == "counter":
            value = total.sum
        elif visible.counted:
            buckets = tuple(zip(total.definition.buckets, total.bucket_counts, strict=True))
            value = Distribution(total.count, total.sum, buckets)
        if value is not None:
            self._add(names.main, None, place, value)
        if names.last_sample and total.last_sample is not None:
            self._add(names.last_sample, None, place, total.last_sample)

    def _windows(self, plan: Plan, place: Place, window: WindowReading | None) -> None:
        """Add the gauges of the last window, unless another should long have closed."""
        length = plan.definition.window_seconds
        if window is not None and length is not None and window.ended + length < self._oldest:
            return
        self._add(plan.families.samples, None, place, 0 if window is None else window.samples)
        if window is not None and window.samples:
            for aggregation, name in plan.families.windows:
                value = window.values.get(aggregation)
                if value is not None:  # the first window after an override still has the old ones
                    self._add(name, aggregation, place, value)

    def _add(
        self, name: str, aggregation: Aggregation | None, place: Place, value: float | Distribution
    ) -> None:
        samples = self._samples.get(name)
        if samples is None:
            samples = self._samples[name] = {}
            if name not in self._specs:
                self._specs[name] = _spec(name, aggregation, place[0])
        samples[place[1]] = value


def _spec(name: str, aggregation: Aggregation | None, claim: Claim) -> FamilySpec:
    if name in OWN:
        return OWN[name]
    first, unit = claim.first, claim.first.unit or ""
    kind: FamilyType = "gauge"
    gone = "the process is gone or its feed is not refreshed."
    if name == claim.main:
        text = first.help or f"Stat {first.name}."
        if first.kind != "gauge":
            kind = "counter" if first.kind == "counter" else "histogram" if claim.shape[0] else "summary"
    elif aggregation is not None:
        what = AGGREGATIONS[aggregation].help
        text = f"{what} of the last closed window of {first.name}; absent when the window was empty, {gone}"
    elif name.endswith("_seconds"):
        text, unit = f"Unix time of the latest sample of {first.name}; absent before the first.", "seconds"
    else:
        text, unit = (
            f"Samples of the last closed window of {first.name}; 0 when there were none, absent when {gone}",
            "",
        )
    return FamilySpec(name, kind, text, IDENTITY_LABELS + claim.label_names, unit)
