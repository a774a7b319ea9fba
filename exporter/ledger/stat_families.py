"""Families of the Stats: what users recorded, under the names that they gave it.

Runs in the sidecar, on the ledger's collecting thread; no I/O. Views of seats come in, families go out. A
series whose number did not change is the same object as in the last pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from exporter.collectors.family import Distribution, Family, FamilySpec, FamilyType, Sample
from exporter.ledger.admission import Admission, Claim, Plan, SeriesKey
from exporter.ledger.identity_labels import IDENTITY_LABELS
from exporter.ledger.own_families import OWN, identity_labels
from exporter.ledger.seats import Moment, Seat, added
from exporter.ledger.views import SeatView
from exporter.recording.aggregations import AGGREGATIONS, Aggregation
from exporter.recording.values import StatReading, WindowReading

RANK_0 = ("0", "", "")
"""Rank, worker and role of the process whose word is the run's."""


class _Series:
    """The series of one Stat in one seat, kept from pass to pass."""

    __slots__ = (
        "key",
        "kind",
        "labels",
        "last",
        "length",
        "main",
        "names",
        "over",
        "reading",
        "settled",
        "window",
        "windows",
    )

    def __init__(self, plan: Plan, claim: Claim, identity: tuple[str, ...]) -> None:
        own = dict(plan.key[1])
        self.key = plan.key
        self.length = plan.definition.window_seconds
        self.labels = identity + tuple([own.get(name, "") for name in claim.label_names])
        self.names = plan.families
        self.reading: StatReading | None = None
        self.settled: object = None
        self.kind = plan.definition.kind
        self.main: Sample | None = None
        self.last: Sample | None = None
        self.window: WindowReading | None = None
        self.over = False
        self.windows: list[tuple[str, Sample]] = []
        if self.names.samples:
            self.windows.append((self.names.samples, Sample(self.labels, 0)))

    def count(self, total: StatReading) -> None:
        if self.kind in {"counter", "gauge"}:
            value = total.sum if self.kind == "counter" else total.value
            self.main = None if value is None else Sample(self.labels, value)
        else:
            bounds = total.definition.buckets
            buckets = tuple(zip(bounds, total.bucket_counts, strict=True)) if bounds else ()
            self.main = Sample(self.labels, Distribution(total.count, total.sum, buckets))
        last = total.last_sample if self.names.last_sample else None
        if last is not None and (self.last is None or self.last.value != last):
            self.last = Sample(self.labels, last)

    def close(self, window: WindowReading | None, *, over: bool) -> None:
        """Make the gauges of a window; it is over when another should long have closed."""
        self.window, self.over, self.windows = window, over, []
        if over:
            return
        self.windows.append(
            (self.names.samples, Sample(self.labels, 0 if window is None else window.samples))
        )
        if window is not None and window.samples:
            for aggregation, name in self.names.windows:
                value = window.values.get(aggregation)
                if value is not None:  # the first window after an override still has the old ones
                    self.windows.append((name, Sample(self.labels, value)))


class _SeatSeries:
    """The series of one seat: those of the living process in the order of its Stats, and all by key."""

    __slots__ = ("admitted", "by_key", "renewed", "rows", "version")

    def __init__(self) -> None:
        self.version = -1
        self.admitted: object = None
        self.renewed = False
        self.rows: list[_Series | None] = []
        self.by_key: dict[SeriesKey, _Series] = {}


class StatBlock:
    """Makes the families of all Stats."""

    def __init__(self, admission: Admission, *, stale_after_seconds: float) -> None:
        """Start empty.

        Args:
            admission: Says which Stat may use which names.
            stale_after_seconds: A time window that ended longer ago than its length and this is no longer
                the last one: its gauges and its number of samples are absent.
        """
        self._admission = admission
        self._stale_after_seconds = stale_after_seconds
        self._seats: dict[Seat, _SeatSeries] = {}
        self._specs: dict[str, FamilySpec] = {}
        self._version = -1
        self._window_seats: list[Seat] = []
        self._window_families: list[Family] = []

    def families(self, views: Sequence[SeatView], now: Moment) -> list[Family]:
        """Fill the families for one pass, sorted by name."""
        if self._version != self._admission.version:
            self._specs.clear()
            self._version = self._admission.version
        self._seats = {view.seat: self._seats.get(view.seat) or _SeatSeries() for view in views}
        totals: defaultdict[str, list[Sample]] = defaultdict(list)
        for view in views:
            seat = self._seats[view.seat]
            if seat.version != self._version:
                # Names or labels may have changed with the settlement.
                seat.by_key.clear()
                seat.admitted, seat.version = None, self._version
            self._living(view, seat, totals)
            self._lingering(view, seat.by_key, totals)
        families = [Family(self._specs[name], tuple(samples)) for name, samples in totals.items()]
        families += self._windows([view for view in views if view.fresh], now)
        return sorted(families, key=lambda family: family.spec.name)

    def _living(self, view: SeatView, known: _SeatSeries, out: defaultdict[str, list[Sample]]) -> None:
        record = view.record
        if record.snapshot is None or not record.living:
            return
        if known.admitted is not record.admitted:
            known.rows = [None if plan is None else self._made(plan, view) for plan in record.admitted]
            known.admitted, known.renewed = record.admitted, True
        settled = view.seat.settled()
        alone = view.seat.unsettled() == [record]
        for series, reading in zip(known.rows, record.current, strict=True):
            if series is None or reading is None:
                continue
            if series.reading is not reading or series.settled is not settled or not alone:
                series.reading, series.settled = reading, settled
                if alone:
                    series.count(added(settled.get(series.key), reading) if settled else reading)
                else:
                    series.count(view.seat.total(series.key) or reading)
            names = series.names
            # A gauge tells of now, and is no total that a restart could take back.
            shown = view.fresh if series.kind == "gauge" else view.counted
            if shown and series.main is not None:
                out[names.main].append(series.main)
            if series.last is not None:
                out[names.last_sample].append(series.last)

    def _windows(self, views: Sequence[SeatView], now: Moment) -> list[Family]:
        """The gauges; those of the pass before as long as no window has closed, which is most of the time."""
        oldest = now.wall - self._stale_after_seconds
        seats = [view.seat for view in views]
        changed = seats != self._window_seats
        for view in views:
            known, snapshot = self._seats[view.seat], view.record.snapshot
            changed, known.renewed = changed or known.renewed, False
            for series, reading in zip(known.rows, snapshot.recording.stats if snapshot else (), strict=True):
                if series is None or not series.names.samples:
                    continue
                window = reading.window
                over = (
                    window is not None and series.length is not None and window.ended + series.length < oldest
                )
                if window is not series.window or over is not series.over:
                    series.close(window, over=over)
                    changed = True
        if changed:
            out: defaultdict[str, list[Sample]] = defaultdict(list)
            for seat in seats:
                for series in self._seats[seat].rows:
                    for name, sample in () if series is None else series.windows:
                        out[name].append(sample)
            self._window_seats = seats
            self._window_families = [Family(self._specs[name], tuple(found)) for name, found in out.items()]
        return self._window_families

    def _lingering(
        self, view: SeatView, known: dict[SeriesKey, _Series], out: defaultdict[str, list[Sample]]
    ) -> None:
        settled = view.seat.settled()
        for key, plan in view.shown().items():
            series = known.get(key)
            if series is None or series.settled is not settled:
                total, made = view.seat.total(key), self._made(plan, view)
                if made is None or total is None:
                    continue
                series = known[key] = made
                series.settled = settled
                series.count(total)
            if view.counted and series.main is not None and series.kind != "gauge":
                out[plan.families.main].append(series.main)
            if series.last is not None:
                out[plan.families.last_sample].append(series.last)

    def _made(self, plan: Plan, view: SeatView) -> _Series | None:
        claim = self._admission.claim(plan)
        if claim is None:
            return None
        identity: tuple[str, ...] = view.labels
        own = OWN.get(claim.main)
        if own is not None and len(identity_labels(own)) < len(identity):
            if view.labels[1:] != RANK_0:
                return None
            identity = identity[:1]
        for name, aggregation in claim.families.items():
            if name not in self._specs:
                self._specs[name] = _spec(name, aggregation, claim)
        return _Series(plan, claim, identity)


def _spec(name: str, aggregation: Aggregation | None, claim: Claim) -> FamilySpec:
    first, unit = claim.first, claim.first.unit or ""
    if name in OWN:
        return OWN[name]
    labels = IDENTITY_LABELS + claim.label_names
    if name == claim.main:
        text = first.help or f"Stat {first.name}."
        kind: FamilyType = "histogram" if claim.shape[0] else "summary"
        if first.kind in {"counter", "gauge"}:
            kind = "counter" if first.kind == "counter" else "gauge"
        return FamilySpec(name, kind, text, labels, unit)
    if aggregation is not None:
        text = (
            f"{AGGREGATIONS[aggregation].help} of the last closed window of {first.name}; absent when the window was"
            " empty, the process is gone or its feed is not refreshed."
        )
        return FamilySpec(name, "gauge", text, labels, unit)
    if name.endswith("_seconds"):
        text = f"Unix time of the latest sample of {first.name}; absent before the first."
        return FamilySpec(name, "gauge", text, labels, "seconds")
    text = (
        f"Samples of the last closed window of {first.name}; 0 when there were none, absent when the process"
        " is gone or its feed is not refreshed."
    )
    return FamilySpec(name, "gauge", text, labels)
