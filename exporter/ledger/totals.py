"""Totals of one rank over all processes that ever were it: the arithmetic of the ledger.

Runs in the sidecar, on the ledger's collecting thread; no I/O, no clock of its own. What the feed shows of a
rank's processes comes in, pass by pass; what goes out are totals that never fall.

    rank (run, rank, role)
      └── seat 0, 1, …          a worker slot; has its own totals and its own series
            ├── base            the sum over processes that are long gone
            └── records         one for each process since, in the order in which they came

A process is known by its id and bound to a seat: the lowest that no living process of the rank has. A
seat's total is base + first record + … + last record, added in this order, always. A record moves into the
base only from the front and only when its feed file is gone, so the floating-point sum stays the same to
the bit. As long as there is a record, its process can be seen again, alive or dead, in this or a later life
of the sidecar, and is counted once. The last few of the dead keep their record even without a file, so that
a process whose files were deleted under it, and that writes them anew, is still the same process; the ids of
some more before them are remembered as taken, and are counted no more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from operator import lt
from typing import Protocol

from exporter.feed.snapshot import ProcessIdentity, Snapshot
from exporter.ledger.admission import Plan, SeriesKey, shape_of
from exporter.recording.values import StatDefinition, StatReading

KEPT_RECORDS = 2
"""Departed processes per seat whose record outlives their feed file."""
KEPT_IDS = 32
"""Ids per rank that are remembered after their record has become part of a base."""


class Entry(Protocol):
    """What the feed reader knows of one file; `exporter.feed.reader.FeedEntry`."""

    @property
    def snapshot(self) -> Snapshot:
        """The last complete one."""
        ...

    @property
    def alive(self) -> bool:
        """Whether the kernel holds the writer's lock."""
        ...

    @property
    def age_seconds(self) -> float:
        """Time since this reader saw the sequence change; at first sight, since the file was written."""
        ...


@dataclass(frozen=True, slots=True)
class RankKey:
    """Whose totals: a rank of a run, or the processes of one role that have no rank."""

    run: str
    rank: int | None
    role: str

    @classmethod
    def of(cls, process: ProcessIdentity) -> RankKey:
        """Tell which rank a process is."""
        if process.rank is not None:
            return cls(process.run, process.rank, "")
        return cls(process.run, None, "" if process.role == "trainer" else process.role)


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
        if later.dropped:
            self.dropped = added_counts(self.dropped, later.dropped)
        self.departed, self.departed_monotonic = later.departed, later.departed_monotonic


@dataclass(slots=True, eq=False)
class Record(Part):
    """One process.

    Attributes:
        process: Who.
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


class RankTotals:
    """All seats of a rank.

    Attributes:
        seats: By slot.
        taken: Ids of processes that are part of a base, oldest first.
        changed: Whether there is something that was not yet saved; set here, cleared by whoever saves.
    """

    __slots__ = ("changed", "seats", "taken")

    def __init__(self, seats: Mapping[int, Seat] | None = None, taken: Sequence[str] = ()) -> None:
        self.seats: dict[int, Seat] = dict(seats or {})
        self.taken: dict[str, None] = dict.fromkeys(taken)
        self.changed = False

    def records(self) -> Iterator[tuple[Seat, Record]]:
        """Every process that has a record."""
        for seat in self.seats.values():
            for record in seat.records:
                yield seat, record

    def resume(self, present: Collection[str], now: Moment) -> None:
        """Go on from a state file: whoever lived when it was saved and has no file now has died since."""
        for seat, record in self.records():
            record.seen_monotonic = now.monotonic
            if record.departed is not None:
                record.depart(record.departed, now)
            elif record.process.id not in present:
                record.depart(record.written, now)
                seat.unsettle()
                self.changed = True
        for seat in self.seats.values():
            if seat.base.departed is not None:
                seat.base.depart(seat.base.departed, now)

    def observe(
        self, entries: Sequence[Entry], unreadable: Collection[str], now: Moment, *, patience_seconds: float
    ) -> None:
        """Bind what the feed shows to seats: the known, then the dead, then the new ones.

        Args:
            entries: Every readable file of this rank, one per process.
            unreadable: Ids of files that are there, but were refused.
            now: The time of the pass.
            patience_seconds: How long a file may be unreadable before its process counts as gone.
        """
        known = {record.process.id: (seat, record) for seat, record in self.records()}
        new: list[Entry] = []
        seen: set[str] = set()
        for entry in entries:
            process_id = entry.snapshot.process.id
            seen.add(process_id)
            if process_id in known:
                self._see(*known[process_id], entry, now)
            elif process_id not in self.taken:
                new.append(entry)
        for process_id, (seat, record) in known.items():
            if process_id not in seen and record.living:
                record.unseen += 1
                # A listing made while a file is being replaced may miss it once.
                patience = patience_seconds if process_id in unreadable else 0.0
                if record.unseen > 1 and now.monotonic - record.seen_monotonic > patience:
                    record.depart(now.wall, now)
                    seat.unsettle()
                    self.changed = True
        # The dead first: their slots are free again for those that took their place.
        for entry in sorted(new, key=lambda each: (each.alive, each.snapshot.process.started)):
            self._bind(entry, now)
        present = {*seen, *unreadable}
        for seat in self.seats.values():
            for process_id in seat.fold(KEPT_RECORDS, present):
                self.taken[process_id] = None
                self.changed = True
        while len(self.taken) > KEPT_IDS and next(iter(self.taken)) not in present:
            del self.taken[next(iter(self.taken))]

    def _see(self, seat: Seat, record: Record, entry: Entry, now: Moment) -> None:
        record.unseen, record.seen_monotonic = 0, now.monotonic
        record.age_seconds = entry.age_seconds
        if record.snapshot is None or entry.snapshot.sequence > record.messages:
            record.snapshot = entry.snapshot
            self.changed = True
            if not record.living:
                seat.unsettle()
        if entry.alive and record.departed is not None:
            record.departed, record.totals_text = None, None  # its lock could not be seen for a while
            seat.unsettle()
            self.changed = True
        elif not entry.alive and record.living:
            # Known since the state file only: it died while no sidecar looked.
            record.depart(now.wall - (entry.age_seconds if record.definitions is None else 0.0), now)
            seat.unsettle()
            self.changed = True

    def _bind(self, entry: Entry, now: Moment) -> None:
        occupied = {seat.slot for seat, record in self.records() if record.living}
        slot = next(slot for slot in range(len(occupied) + 1) if slot not in occupied)
        seat = self.seats.setdefault(slot, Seat(slot))
        record = Record(process=entry.snapshot.process, snapshot=entry.snapshot)
        record.seen_monotonic = now.monotonic
        record.age_seconds = entry.age_seconds
        if not entry.alive:
            record.depart(now.wall - entry.age_seconds, now)
        seat.records.append(record)
        seat.unsettle()
        self.changed = True
