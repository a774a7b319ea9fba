"""Totals of a worker slot, and the rules by which a pass publishes them.

The total of a slot is base + first process + … + last process, added in this order, so that rounding never decreases a total.

| the process                              | window gauges | last values of the training | totals, last sample    |
|------------------------------------------|---------------|-----------------------------|------------------------|
| running, with a current feed             | shown         | shown                       | shown                  |
| running, and a step is overdue           | shown         | absent                      | shown                  |
| running, with a stale feed               | absent        | absent                      | shown                  |
| exited                                   | absent        | absent                      | for the retention time |
| exited earlier                           | absent        | absent                      | absent, but saved      |
| running, and the state cannot be written | shown         | shown                       | only the last sample   |

After the exit, positions (step, last checkpoint) are shown as long as the totals.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import ClassVar, NamedTuple, TypeVar

from exporter.feed.snapshot import ProcessIdentity, Snapshot
from exporter.ledger.goodput.hang import HangRule
from exporter.ledger.goodput.outcome import Outcome
from exporter.recording.values import (
    NO_EVENTS,
    Aggregation,
    EventsReading,
    StatDefinition,
    StatFamilies,
    StatReading,
    TrainingReading,
)

Key = TypeVar("Key", str, int, tuple[str, str])

STEP_TIME_TOLERANCE_SECONDS = 0.01
"""Maximum difference of two reported times of the same step."""


class SeriesKey(NamedTuple):
    """Identity of a Stat over restarts and code versions."""

    main: str  # name of the main family
    labels: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class StatShape:
    """Properties of a Stat's definition. Readings can be added if their shapes are equal."""

    is_histogram: bool
    unit: str | None
    buckets: tuple[float, ...]
    kind: str


@dataclass(frozen=True, slots=True, eq=False)
class StatPlan:
    """Definition of a Stat, and the derived families."""

    definition: StatDefinition
    families: StatFamilies
    names: frozenset[str]  # names of the families and of their samples
    key: SeriesKey
    shape: StatShape


def shape_of(definition: StatDefinition) -> StatShape:
    """Return the shape of a definition."""
    return StatShape(
        is_histogram=Aggregation.HISTOGRAM in definition.aggregations,
        unit=definition.unit,
        buckets=definition.buckets,
        kind=definition.kind,
    )


@dataclass(frozen=True, slots=True)
class Moment:
    """Time of a pass: Unix time and monotonic seconds."""

    wall: float
    monotonic: float


@dataclass(frozen=True, slots=True)
class RankKey:
    """Rank of a run, or the processes of a run that have a role and no rank."""

    run: str
    rank: int | None
    role: str  # empty for a rank, and for trainers

    @classmethod
    def of_process(cls, process: ProcessIdentity) -> RankKey:
        """Return the key of a process."""
        if process.rank is not None:
            return cls(process.run, process.rank, "")
        return cls(process.run, None, "" if process.role == "trainer" else process.role)

    def __str__(self) -> str:
        if self.rank is not None:
            return f"run {self.run!r}, rank {self.rank}"
        return f"run {self.run!r}, role {self.role!r}" if self.role else f"run {self.run!r}, without a rank"


@dataclass(slots=True, eq=False)
class StatTotals:
    """Totals of a process, or of all earlier processes of a slot."""

    SAVED_FIELDS: ClassVar[Sequence[str]] = ("dropped_counts", "events", "refused_readings", "exited_at")
    JSON_KEYS: ClassVar[Mapping[str, str]] = {
        "dropped_counts": "dropped",
        "refused_readings": "refused",
        "exited_at": "departed",
        "written_at": "written",
        "is_final": "final",
        "is_finished": "finished",
    }
    series: dict[SeriesKey, StatReading] = field(default_factory=dict)  # saved separately, see `encode_rank`
    dropped_counts: Mapping[str, int] = field(default_factory=dict)  # data lost by the writer, by reason
    events: EventsReading = NO_EVENTS
    refused_readings: int = 0  # readings of Stats with a conflicting definition
    exited_at: float | None = None  # Unix time of the exit; None if running
    exited_monotonic: float = 0.0

    def record_exit(self, wall_time: float, now: Moment) -> None:
        """Record the exit at a Unix time; a time in the future is replaced by the current time."""
        self.exited_at = min(wall_time, now.wall)
        self.exited_monotonic = now.monotonic - (now.wall - self.exited_at)

    def absorb(self, later: StatTotals) -> None:
        """Add the totals of a later process."""
        for key, reading in later.series.items():
            self.series[key] = sum_readings(self.series.get(key), reading)
        self.refused_readings += later.refused_readings
        self.events = sum_events(self.events, later.events)
        self.dropped_counts = sum_counts(self.dropped_counts, later.dropped_counts)
        self.exited_at, self.exited_monotonic = later.exited_at, later.exited_monotonic


@dataclass(slots=True, eq=False)
class ProcessTotals(StatTotals):
    """Totals and latest snapshot of a process. `plans` and `admitted_plans` have the order of the snapshot's Stats."""

    SAVED_FIELDS = (
        *StatTotals.SAVED_FIELDS,
        "identity",
        "written_at",
        "sequence",
        "is_final",
        "exception",
        "failure",
        "is_finished",
        "has_trained",
        "outcome",
    )
    identity: ProcessIdentity = field(kw_only=True)
    written_at: float = 0.0  # Unix time of the last snapshot
    sequence: int = 0  # of the last snapshot that was counted
    is_final: bool = False  # the last snapshot was written at a normal exit
    exception: str = ""  # uncaught exception
    failure: str = ""  # reported reason of the end, or "user" after an uncaught KeyboardInterrupt
    is_finished: bool = False  # True if the job reported the end of the application
    has_trained: bool = False  # True if the process has started a training loop
    outcome: Outcome | None = None  # of an exited process, once decided
    snapshot: Snapshot | None = None  # latest that this sidecar has read
    counted_snapshot: Snapshot | None = None  # latest that was counted
    definitions: list[StatDefinition] | None = None  # of the Stats; None before the first snapshot
    # None for a Stat with a reserved name, and for the second Stat with the same series
    plans: list[StatPlan | None] = field(default_factory=list)
    # the plans of Stats that may be published; also None for a Stat that differs from the family's owner
    admitted_plans: list[StatPlan | None] = field(default_factory=list)
    age_seconds: float = 0.0  # since the snapshot last changed
    is_outdated: bool = False  # the process has newer values and cannot write them to the feed
    missed_passes: int = 0  # passes in a row without a readable file
    last_seen_monotonic: float = 0.0
    first_seen_monotonic: float = 0.0
    last_step_at: float | None = None  # reported Unix time of the latest step; None if no further step is due
    last_step_monotonic: float = 0.0

    @property
    def is_alive(self) -> bool:
        """True if the process was alive in the last pass."""
        return self.exited_at is None

    @property
    def training(self) -> TrainingReading | None:
        """Training reading; None if the process reports no training."""
        return None if self.snapshot is None else self.snapshot.recording.training

    @property
    def trains(self) -> bool:
        """True if the process claimed to train, or has trained."""
        return self.identity.trains or _has_trained(self.training)

    def update_step_times(self, now: Moment, seconds_since_last_pass: float) -> None:
        """Update the times of the latest step from the snapshot.

        The monotonic time is estimated from the reported Unix time. A later step than the first has completed since the last pass, also if
        the wall clock was changed.
        """
        last_step_at = None if self.training is None else self.training.last_progress
        is_first = self.last_step_at is None
        # The reported time moves by microseconds between snapshots without a step.
        if last_step_at is not None and (
            is_first or abs(last_step_at - (self.last_step_at or 0.0)) > STEP_TIME_TOLERANCE_SECONDS
        ):
            seconds_since_step = max(0.0, now.wall - last_step_at)
            if not is_first:
                seconds_since_step = min(seconds_since_step, seconds_since_last_pass)
            self.last_step_monotonic = now.monotonic - seconds_since_step
        self.last_step_at = last_step_at

    def count(self, snapshot: Snapshot) -> None:
        """Replace the totals with the cumulative readings of a snapshot; an older snapshot is ignored.

        The readings of Stats that are not admitted are counted as refused.
        """
        self.counted_snapshot = snapshot
        if snapshot.sequence < self.sequence:
            return  # the file was replaced by an older copy
        is_newer = snapshot.sequence > self.sequence
        for plan, reading in zip(self.admitted_plans, snapshot.recording.stats, strict=True):
            if plan is not None:
                self.series[plan.key] = reading
            elif is_newer:
                self.refused_readings += 1
        self.events, self.dropped_counts = snapshot.recording.events, snapshot.dropped
        self.sequence, self.written_at = snapshot.sequence, snapshot.written
        self.is_final = snapshot.recording.final
        self.exception = "" if snapshot.ending is None else snapshot.ending.exception
        self.failure = "" if self.training is None else self.training.failure
        if not self.failure and self.exception == "KeyboardInterrupt":
            self.failure = "user"  # raised outside of the blocks that report the failure
        self.is_finished = self.training is not None and self.training.finished
        self.has_trained = _has_trained(self.training)


def _has_trained(reading: TrainingReading | None) -> bool:
    """Return True if the process has started a training loop or finished a step."""
    return reading is not None and (reading.loop > 0 or reading.steps > 0)


@dataclass(slots=True, eq=False)
class WorkerSlot:
    """Worker slot of a rank: a base, which sums the earlier processes, and the later processes in order of arrival."""

    number: int  # 0 for the rank's only or first process
    base: StatTotals = field(default_factory=StatTotals)
    processes: list[ProcessTotals] = field(default_factory=list)

    def parts(self) -> Iterator[StatTotals]:
        """Yield base and processes in the order of addition."""
        yield self.base
        yield from self.processes

    def running_process(self) -> ProcessTotals | None:
        """Return the running process that was bound last, or None."""
        return next((process for process in reversed(self.processes) if process.is_alive), None)

    def total(self, key: SeriesKey) -> StatReading | None:
        """Return the total of a Stat over all parts, or None if no part has the Stat."""
        total: StatReading | None = None
        for part in self.parts():
            if (reading := part.series.get(key)) is not None:
                total = sum_readings(total, reading)
        return total

    def fold(self, keep_count: int, present_ids: Collection[str]) -> Iterator[str]:
        """Move exited processes into the base, oldest first, and yield their ids.

        The last *keep_count* exited processes stay, and so does the last process that trained, which may decide the state of the
        run. Processes are moved until the first that has a feed file, whose id is in *present_ids*.
        """
        exited_processes = [process for process in self.processes if not process.is_alive]
        last_trainer = next((process for process in reversed(self.processes) if process.has_trained), None)
        for process in exited_processes[: max(0, len(exited_processes) - keep_count)]:
            if process.identity.id in present_ids:
                return
            if process is not last_trainer:
                self.processes.remove(process)
                self.base.absorb(process)
                yield process.identity.id


@dataclass(frozen=True, slots=True)
class GapRules:
    """Rules that decide whether a value is published, for a stale feed, an exited process and a hang."""

    stale_after_seconds: float = 10.0  # `is_fresh` allows at least three flush intervals
    linger_seconds: float = 900.0  # retention time of the totals after the exit
    hang: HangRule = field(default_factory=HangRule)

    def is_fresh(self, process: ProcessTotals) -> bool:
        """Return True if the feed of a running process is current."""
        snapshot = process.snapshot
        if snapshot is None or not process.is_alive or process.is_outdated:
            return False
        return process.age_seconds <= max(self.stale_after_seconds, 3.0 * snapshot.flush_seconds)

    def lingers(self, totals: StatTotals, now: Moment) -> bool:
        """Return True if the totals belong to processes that have exited, the last within the retention time."""
        seconds_since_exit = now.monotonic - totals.exited_monotonic
        return totals.exited_at is not None and seconds_since_exit <= self.linger_seconds

    def overdue_seconds(self, process: ProcessTotals, now: Moment) -> float | None:
        """Return the time since the last finished step if a step is overdue, otherwise None.

        No step is due after the last snapshot of a process that exits normally.
        """
        if process.last_step_at is None or process.is_final:
            return None
        seconds = now.monotonic - process.last_step_monotonic
        return seconds if self.hang.is_overdue(process.training, seconds) else None

    def hangs(self, process: ProcessTotals, now: Moment) -> bool:
        """Return True if a step is overdue and the phase is not a waiting phase."""
        overdue_seconds = self.overdue_seconds(process, now)
        return overdue_seconds is not None and self.hang.is_hung(process.training, overdue_seconds)


@dataclass(frozen=True, slots=True, eq=False)
class VisibleSlot:
    """Worker slot that a pass publishes, with the decisions of `GapRules`."""

    key: RankKey
    labels: tuple[str, ...]  # values of the labels run, rank, worker, role
    worker_slot: WorkerSlot
    process: ProcessTotals  # the running process, otherwise the last process
    is_fresh: bool  # window gauges may be shown
    is_advancing: bool  # last values of the training may be shown
    is_saved: bool  # the totals are saved and may be shown
    lingering_parts: tuple[StatTotals, ...]  # of exited processes within the retention time

    @property
    def is_rank_0(self) -> bool:
        """True for the first worker of rank 0, which provides the values of the whole run."""
        return self.key.rank == 0 and self.worker_slot.number == 0 and not self.key.role


def visible_slot(
    key: RankKey, slot: WorkerSlot, rules: GapRules, now: Moment, *, is_saved: bool
) -> VisibleSlot | None:
    """Return the slot as published by a pass, or None after the retention time of the exited processes."""
    process = slot.running_process() or next(reversed(slot.processes), None)
    lingering_parts = tuple(part for part in slot.parts() if rules.lingers(part, now))
    if process is None or not (process.is_alive or lingering_parts):
        return None
    is_fresh = rules.is_fresh(process)
    rank, worker = "" if key.rank is None else str(key.rank), str(slot.number or "")
    return VisibleSlot(
        key=key,
        labels=(key.run, rank, worker, key.role),
        worker_slot=slot,
        process=process,
        is_fresh=is_fresh,
        is_advancing=is_fresh and rules.overdue_seconds(process, now) is None,
        is_saved=is_saved,
        lingering_parts=lingering_parts,
    )


def sum_readings(earlier: StatReading | None, later: StatReading) -> StatReading:
    """Return the total of earlier processes plus the reading of a later process.

    If the shapes differ, count, sum and distribution restart with the later process; rejected samples and overflows continue. If
    the shapes are equal and a process has no sum, the total has no sum.
    """
    if earlier is None:
        return later
    total, count, counts, exponential = later.sum, later.count, later.bucket_counts, later.exponential
    if earlier.definition is later.definition or shape_of(earlier.definition) == shape_of(later.definition):
        count += earlier.count
        counts = tuple(map(int.__add__, earlier.bucket_counts, counts))
        exponential = sum_counts(earlier.exponential, exponential)
        total = None if total is None or earlier.sum is None else total + earlier.sum
    return StatReading(
        later.definition,
        count=count,
        sum=None if total is None or not isfinite(total) else total,
        bucket_counts=counts,
        last_sample=earlier.last_sample if later.last_sample is None else later.last_sample,
        rejected=sum_counts(earlier.rejected, later.rejected),
        overflows=earlier.overflows + later.overflows,
        value=later.value,
        exponential=exponential,
    )


def sum_counts(first: Mapping[Key, int], second: Mapping[Key, int]) -> Mapping[Key, int]:
    """Return the sum of the counts by key."""
    if not first or not second:
        return first or second
    return {key: first.get(key, 0) + second.get(key, 0) for key in {**first, **second}}


def sum_events(earlier: EventsReading, later: EventsReading) -> EventsReading:
    """Return the event counts of earlier processes plus those of a later process, with the latest times."""
    if not earlier or not later:
        return earlier or later or NO_EVENTS
    return EventsReading(
        sum_counts(earlier.counts, later.counts),
        {**earlier.last, **later.last},
        sum_counts(earlier.suppressed, later.suppressed),
        sum_counts(earlier.delivered, later.delivered),
        sum_counts(earlier.dropped, later.dropped),
    )
