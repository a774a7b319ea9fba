"""A seat: a worker slot of a rank, with what each process that sat there has brought.

Runs in the sidecar, on the ledger's collecting thread; no I/O, no clock of its own. Snapshots come in, sums
go out.

A seat's total is base + first record + … + last record, added in this order, always. A record moves into the
base only from the front, so the floating-point sum stays the same to the bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from operator import lt

from exporter.feed.snapshot import ProcessIdentity, Snapshot
from exporter.ledger.admission import Plan, SeriesKey, shape_of
from exporter.ledger.event_totals import added_events, continued
from exporter.recording.values import NO_EVENTS, EventsReading, StatDefinition, StatReading


@dataclass(frozen=True, slots=True)
class Moment:
    """When a pass is made.

    Attributes:
        wall: Unix time, seconds.
        monotonic: A clock that is never set, seconds.
    """

    wall: float
    monotonic: float


@dataclass(slots=True, eq=False)
class Part:
    """What one process, or all before it, brought to a seat; all of it only grows.

    Attributes:
        readings: Last reading of each Stat; of a base, the sum.
        messages: Snapshots written.
        dropped: What writers lost, by reason.
        events: What has become of the events.
        refused: Readings of Stats that were kept out since their definition did not fit.
        departed: Unix time of the end; None while alive.
        departed_monotonic: The same, for this life of the sidecar.
        lingering: The plans of its Stats for the time after its end; None when they are to be made anew.
        row_texts: How `encoding` wrote the numbers of each reading.
        stats_text: How it wrote what the Stats are; None when that has changed since.
        totals_text: How it wrote everything.
    """

    readings: dict[SeriesKey, StatReading] = field(default_factory=dict)
    messages: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    events: EventsReading = NO_EVENTS
    refused: int = 0
    departed: float | None = None
    departed_monotonic: float = 0.0
    lingering: list[Plan | None] | None = None
    row_texts: dict[SeriesKey, tuple[StatReading, str]] = field(default_factory=dict)
    stats_text: str | None = None
    totals_text: str | None = None

    def depart(self, wall: float, now: Moment) -> None:
        """Note the end, at a wall time that may be long ago but is never in the future."""
        self.totals_text = None
        self.departed = min(wall, now.wall)
        self.departed_monotonic = now.monotonic - (now.wall - self.departed)

    def absorb(self, later: Part) -> None:
        """Add what came after."""
        self.lingering = self.stats_text = self.totals_text = None
        for key, reading in later.readings.items():
            self.readings[key] = added(self.readings.get(key), reading)
        self.messages += later.messages
        self.refused += later.refused
        self.events = added_events(self.events, later.events)
        if later.dropped:
            self.dropped = added_counts(self.dropped, later.dropped)
        self.departed, self.departed_monotonic = later.departed, later.departed_monotonic


@dataclass(slots=True, eq=False)
class Record(Part):
    """One process.

    Attributes:
        process: Who.
        process_text: How `encoding` wrote that.
        written: Unix time of its last snapshot.
        snapshot: The last one seen in this life of the sidecar.
        taken: The last one that was counted.
        definitions: Of the Stats in the snapshot; None before one was looked at.
        plans: The plans of its Stats, in the snapshot's order; None where it may not be published at all.
        admitted: The same, None also where another process's definition stands.
        current: What counts of each Stat in the snapshot, in its order; None where it is not admitted.
        age_seconds: Since its last snapshot changed.
        unseen: Passes in a row in which its file was not there or could not be read.
        seen_monotonic: When it was last there and readable.
    """

    process: ProcessIdentity = field(kw_only=True)
    process_text: str | None = None
    written: float = 0.0
    snapshot: Snapshot | None = None
    taken: Snapshot | None = None
    definitions: list[StatDefinition] | None = None
    plans: list[Plan | None] = field(default_factory=list)
    admitted: list[Plan | None] = field(default_factory=list)
    current: list[StatReading | None] = field(default_factory=list)
    age_seconds: float = 0.0
    unseen: int = 0
    seen_monotonic: float = 0.0

    @property
    def living(self) -> bool:
        """Whether it was alive when last looked at."""
        return self.departed is None

    def admit(self, admitted: list[Plan | None]) -> None:
        """Note which of its Stats count from now on."""
        self.admitted = admitted
        self.stats_text = None

    def take(self, snapshot: Snapshot) -> None:
        """Count a newer snapshot in, for the Stats that were admitted.

        A number that is lower than one that was already counted is not believed: whatever made it, the
        total does not fall.
        """
        self.lingering = self.totals_text = None
        readings, newer = self.readings, snapshot.sequence > self.messages
        self.current = []
        for plan, reading in zip(self.admitted, snapshot.recording.stats, strict=True):
            if plan is None:
                self.refused += newer
                self.current.append(None)
                continue
            old = readings.get(plan.key)
            if old is None or (not _unchanged(old, reading) and _continues(old, reading)):
                old = readings[plan.key] = reading
            self.current.append(old)
        self.taken = snapshot
        self.events = continued(self.events, snapshot.recording.events)
        self.messages = max(self.messages, snapshot.sequence)
        self.written = snapshot.written
        if snapshot.dropped:
            before = self.dropped
            self.dropped = {
                reason: max(snapshot.dropped.get(reason, 0), before.get(reason, 0))
                for reason in {**before, **snapshot.dropped}
            }


@dataclass(slots=True, eq=False)
class Seat:
    """A worker slot of a rank.

    Attributes:
        slot: 0 for the rank's only or first process.
        base: The sum over processes without a record.
        records: In the order in which they came.
    """

    slot: int
    base: Part = field(default_factory=Part)
    records: list[Record] = field(default_factory=list)
    _settled: dict[SeriesKey, StatReading] | None = None
    _settled_parts: int = 0

    def parts(self) -> Iterator[Part]:
        """Base and records, in the order in which they are added up."""
        yield self.base
        yield from self.records

    def living(self) -> Record | None:
        """The latest living process, None when there is none."""
        return next((record for record in reversed(self.records) if record.living), None)

    def latest(self) -> Record | None:
        """The living process, else the last one to come; None when all are in the base."""
        return self.living() or (self.records[-1] if self.records else None)

    def unsettle(self) -> None:
        """Forget the sum over the dead: one of them, or their number, has changed."""
        self._settled = None

    def settled(self) -> dict[SeriesKey, StatReading]:
        """The sum over the base and the dead in front of the first living process."""
        if self._settled is None:
            total = Part()
            count = 0
            for part in self.parts():
                if isinstance(part, Record) and part.living:
                    break
                total.absorb(part)
                count += 1
            self._settled, self._settled_parts = total.readings, count
        return self._settled

    def unsettled(self) -> Sequence[Record]:
        """The records that `settled` leaves out: the first living one and all after it."""
        self.settled()
        return self.records[self._settled_parts - 1 :]  # the base is the first part

    def total(self, key: SeriesKey) -> StatReading | None:
        """The sum over all parts; None when none of them has the Stat."""
        total = self.settled().get(key)
        for record in self.unsettled():
            reading = record.readings.get(key)
            if reading is not None:
                total = added(total, reading)
        return total

    def fold(self, keep: int, present: Collection[str]) -> list[str]:
        """Move the oldest records into the base.

        Args:
            keep: So many of the departed stay.
            present: Ids whose files are still there; their records stay, and all after them.

        Returns:
            The ids that no longer have a record.
        """
        departed = sum(not record.living for record in self.records)
        gone: list[str] = []
        while departed > keep and not self.records[0].living and self.records[0].process.id not in present:
            record = self.records.pop(0)
            self.base.absorb(record)
            gone.append(record.process.id)
            departed -= 1
            self.unsettle()
        return gone


def added(before: StatReading | None, after: StatReading) -> StatReading:
    """Add the readings of a process to the total of those before it.

    Where unit or buckets have changed, the distribution starts anew; what was rejected goes on. A sum that
    one process could not keep is kept by none after it.
    """
    if before is None:
        return after
    total: float | None = None
    count, counts = after.count, after.bucket_counts
    if before.sum is not None and after.sum is not None:
        total = after.sum
    if before.definition is after.definition or shape_of(before.definition) == shape_of(after.definition):
        count += before.count
        counts = tuple(map(int.__add__, before.bucket_counts, counts))
        if total is not None and before.sum is not None:
            total += before.sum
            total = total if isfinite(total) else None
    return StatReading(
        after.definition,
        count,
        total,
        counts,
        last_sample=before.last_sample if after.last_sample is None else after.last_sample,
        rejected=added_counts(before.rejected, after.rejected),
        overflows=before.overflows + after.overflows,
        value=after.value,
    )


def added_counts(first: Mapping[str, int], second: Mapping[str, int]) -> Mapping[str, int]:
    """Add up by reason."""
    if not first or not second:
        return first or second
    return {reason: first.get(reason, 0) + second.get(reason, 0) for reason in {**first, **second}}


def _unchanged(old: StatReading, new: StatReading) -> bool:
    """Whether nothing has happened, so that what was made of the old one may stay."""
    return (
        old.count == new.count
        and old.last_sample == new.last_sample
        and old.sum == new.sum
        and old.value == new.value
        and old.overflows == new.overflows
        and old.rejected == new.rejected
        and old.definition is new.definition
    )


def _continues(old: StatReading, new: StatReading) -> bool:
    if new.count < old.count or new.overflows < old.overflows:
        return False
    if new.sum is not None and (old.sum is None or new.sum < old.sum):
        return False
    if old.rejected and any(new.rejected.get(reason, 0) < count for reason, count in old.rejected.items()):
        return False
    return (
        new.bucket_counts == old.bucket_counts
        or new.definition.buckets != old.definition.buckets
        or not any(map(lt, new.bucket_counts, old.bucket_counts))
    )
