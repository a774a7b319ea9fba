"""Totals of one rank over all processes that ever were it.

Runs in the sidecar, on the ledger's collecting thread; no I/O, no clock of its own. What the feed shows of a
rank's processes comes in, pass by pass; what goes out are totals that never fall.

    rank (run, rank, role)
      └── seat 0, 1, …          a worker slot; has its own totals and its own series
            ├── base            the sum over processes that are long gone
            └── records         one for each process since, in the order in which they came

A process is known by its id and bound to a seat: the lowest that no living process of the rank has. As long
as there is a record, its process can be seen again, alive or dead, in this or a later life of the sidecar,
and is counted once; a record becomes part of the base only when its feed file is gone. The last few of the
dead keep their record even without a file, so that a process whose files were deleted under it, and that
writes them anew, is still the same process. The ids of some more before them are remembered as taken, and
are counted no more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from exporter.feed.snapshot import ProcessIdentity, Snapshot
from exporter.ledger.seats import Moment, Record, Seat

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

    @property
    def pid(self) -> int | None:
        """The process as seen from here, None when it is dead or cannot be seen."""
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

    def adopt(self, provisional: RankTotals, present: Collection[str]) -> None:
        """Take over what was seen while the state could not be read, of processes whose files are gone since."""
        known = {record.process.id: (seat, record) for seat, record in self.records()}
        for _, record in provisional.records():
            process_id = record.process.id
            if process_id in present or process_id in self.taken:
                continue
            if process_id in known:
                seat, before = known[process_id]
                before.snapshot, before.departed = record.snapshot, record.departed
                before.totals_text = None
            else:
                seat = self._free_seat()
                seat.records.append(record)
            seat.unsettle()
            self.changed = True

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
        record.process = entry.snapshot.process  # what it says of itself may have changed
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
        seat = self._free_seat()
        record = Record(process=entry.snapshot.process, snapshot=entry.snapshot)
        record.seen_monotonic = now.monotonic
        record.age_seconds = entry.age_seconds
        if not entry.alive:
            record.depart(now.wall - entry.age_seconds, now)
        seat.records.append(record)
        seat.unsettle()
        self.changed = True

    def _free_seat(self) -> Seat:
        occupied = {seat.slot for seat, record in self.records() if record.living}
        slot = next(slot for slot in range(len(occupied) + 1) if slot not in occupied)
        return self.seats.setdefault(slot, Seat(slot))
