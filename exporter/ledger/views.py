"""What may be shown of each seat in one pass: the ledger's gap rules, in one place.

Runs in the sidecar, on the ledger's collecting thread; no I/O. The families are filled from these views.

| the process                         | window gauges | totals, last sample    |
|-------------------------------------|---------------|------------------------|
| lives, and its feed is refreshed    | shown         | shown                  |
| lives, but is stopped or hangs      | absent        | shown                  |
| is dead                             | absent        | shown while it lingers |
| is dead for longer                  | absent        | absent, but kept       |
| its rank's state cannot be written  | shown         | absent (last sample: shown) |
"""

from __future__ import annotations

from dataclasses import dataclass

from exporter.ledger.admission import Plan, SeriesKey
from exporter.ledger.seats import Moment, Part, Record, Seat
from exporter.ledger.totals import RankKey

LONGEST_FLUSH_SECONDS = 600.0
"""A writer that claims to write less often is measured by this."""


@dataclass(frozen=True, slots=True)
class GapRules:
    """When data ends.

    Attributes:
        stale_after_seconds: A feed that is not refreshed for so long has no windows; at least three times what
            its writer means to take.
        linger_seconds: How long totals are shown after the end of a process.
    """

    stale_after_seconds: float = 10.0
    linger_seconds: float = 900.0

    def fresh(self, record: Record) -> bool:
        """Whether the windows of a process tell of now."""
        snapshot = record.snapshot
        if snapshot is None or not record.living:
            return False
        flush = min(snapshot.flush_seconds, LONGEST_FLUSH_SECONDS)
        return record.age_seconds <= max(self.stale_after_seconds, 3.0 * flush)

    def lingers(self, part: Part, now: Moment) -> bool:
        """Whether what the dead have left is still shown."""
        return part.departed is not None and now.monotonic - part.departed_monotonic <= self.linger_seconds


@dataclass(frozen=True, slots=True, eq=False)
class SeatView:
    """One seat in one pass.

    Attributes:
        labels: Values of run, rank, worker and role.
        seat: Whose.
        record: The living process, else the last one.
        fresh: Whether its window gauges may be shown.
        counted: Whether its totals are in the state file and may be shown.
        lingering: Parts that ended a short while ago.
    """

    labels: tuple[str, str, str, str]
    seat: Seat
    record: Record
    fresh: bool
    counted: bool
    lingering: tuple[Part, ...]

    def shown(self) -> dict[SeriesKey, Plan]:
        """What lingers, without the Stats that the living process has itself."""
        plans = {
            plan.key: plan for part in self.lingering for plan in part.lingering or () if plan is not None
        }
        if plans and self.record.living:
            for plan in self.record.admitted:
                if plan is not None:
                    plans.pop(plan.key, None)
        return plans


def view(key: RankKey, seat: Seat, rules: GapRules, now: Moment, *, counted: bool) -> SeatView | None:
    """Look at a seat; None when there is nothing to show of it."""
    record = seat.latest()
    lingering = tuple(part for part in seat.parts() if rules.lingers(part, now))
    if record is None or not (record.living or lingering):
        return None
    return SeatView(
        labels=(
            key.run,
            "" if key.rank is None else str(key.rank),
            str(seat.slot) if seat.slot else "",
            key.role,
        ),
        seat=seat,
        record=record,
        fresh=rules.fresh(record),
        counted=counted,
        lingering=lingering,
    )
