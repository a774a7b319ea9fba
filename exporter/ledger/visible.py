"""What may be shown of each worker slot in one pass: the ledger's gap rules, in one place.

Runs in the sidecar, on the ledger's collecting thread; no I/O. The families are filled from these.

| the process                              | window gauges | last values of the training | totals, last sample |
|------------------------------------------|---------------|-----------------------------|---------------------|
| lives, and its feed is refreshed         | shown         | shown                       | shown               |
| lives, and no step has ended for long    | shown         | absent                      | shown               |
| lives, but is stopped or hangs as a whole| absent        | absent                      | shown               |
| is dead                                  | absent        | absent                      | while it lingers    |
| is dead for longer                       | absent        | absent                      | absent, but kept    |
| its rank's state cannot be written       | shown         | shown                       | absent              |
"""

from __future__ import annotations

from dataclasses import dataclass

from exporter.ledger.admission import Plan, SeriesKey
from exporter.ledger.rank import RankKey
from exporter.ledger.totals import Moment, Process, Slot, Totals
from exporter.training.phases import PHASES

LONGEST_FLUSH_SECONDS = 600.0
"""A writer that claims to write less often is measured by this."""
LONG_PHASES = frozenset(
    name
    for name, phase in PHASES.items()
    if phase.badput in {"compile", "validation", "checkpoint_load", "checkpoint_save"}
)
"""Phases that may take longer than steps do."""
_IDEAL: SeriesKey = ("training_step_ideal_seconds", ())


@dataclass(frozen=True, slots=True)
class GapRules:
    """When data ends: without a refresh of the feed, after the end of a process, and without a step (a hang)."""

    stale_after_seconds: float = 10.0  # at least three times what the writer means to take
    linger_seconds: float = 900.0
    hang_seconds: float = 60.0
    hang_steps: float = 10.0  # usual steps; a hang is longer than both

    def fresh(self, process: Process) -> bool:
        """Whether the windows of a process tell of now."""
        snapshot = process.snapshot
        if snapshot is None or not process.living:
            return False
        flush = min(snapshot.flush_seconds, LONGEST_FLUSH_SECONDS)
        return process.age_seconds <= max(self.stale_after_seconds, 3.0 * flush)

    def lingers(self, totals: Totals, now: Moment) -> bool:
        """Whether what the dead have left is still shown."""
        gone = now.monotonic - totals.departed_monotonic
        return totals.departed is not None and gone <= self.linger_seconds

    def without_step(self, process: Process, now: Moment) -> float | None:
        """Give how long no step has ended, where that is longer than it may be; None where all is well.

        Before the first step has ended, which may compile, and after the training nothing is overdue; a phase that may
        take long is given five times as long.
        """
        reading, since = process.training, process.since_progress(now)
        if reading is None or since is None or reading.steps < 1:
            return None
        ideal = process.series.get(_IDEAL)
        usual = None if ideal is None else ideal.value
        if usual is None:
            usual = reading.work_seconds / reading.steps
        limit = max(self.hang_seconds, self.hang_steps * usual)
        return since if since > limit * (5.0 if reading.phase in LONG_PHASES else 1.0) else None


@dataclass(frozen=True, slots=True, eq=False)
class VisibleSlot:
    """One worker slot in one pass."""

    labels: tuple[str, str, str, str]  # run, rank, worker, role
    slot: Slot
    process: Process  # the living one, else the last one
    fresh: bool  # its window gauges may be shown
    advancing: bool  # the last values of its training may be
    counted: bool  # its totals are in the state file and may be shown
    lingering: tuple[Totals, ...]  # of processes that ended a short while ago

    def leftovers(self) -> dict[SeriesKey, Plan]:
        """What lingers, without the Stats that the living process has itself."""
        plans = {
            plan.key: plan for part in self.lingering for plan in part.lingering or () if plan is not None
        }
        for plan in self.process.admitted if plans and self.process.living else ():
            if plan is not None:
                plans.pop(plan.key, None)
        return plans


def visible(key: RankKey, slot: Slot, rules: GapRules, now: Moment, *, counted: bool) -> VisibleSlot | None:
    """Look at a slot; None when there is nothing to show of it."""
    process = slot.latest()
    lingering = tuple(each for each in slot.parts() if rules.lingers(each, now))
    if process is None or not (process.living or lingering):
        return None
    fresh = rules.fresh(process)
    rank, worker = "" if key.rank is None else str(key.rank), str(slot.number or "")
    return VisibleSlot(
        labels=(key.run, rank, worker, key.role),
        slot=slot,
        process=process,
        fresh=fresh,
        advancing=fresh and rules.without_step(process, now) is None,
        counted=counted,
        lingering=lingering,
    )
