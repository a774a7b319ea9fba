"""Totals of one rank over all processes that ever were it.

Runs in the sidecar, on the ledger's collecting thread; no I/O, no clock of its own. What the feed shows of a rank's
processes comes in, pass by pass; what goes out are totals that never fall.

    rank (run, rank, role)
      └── slot 0, 1, …           a worker slot; has its own totals and its own series
            ├── base             the sum over processes that are long gone
            └── processes        one record for each since, in the order in which they came

A process is known by its id and bound to a slot: the lowest that no living process of the rank has, but slot 0 belongs
to a process that trains as soon as there is one. As long as there is a record, its process can be seen again, alive or
dead, in this or a later life of the sidecar, and is counted once; a record becomes part of the base only when its feed
file is gone. The last few of the dead keep theirs even without a file, so that a process whose files were deleted under
it, and that writes them anew, is still the same process; the ids of some more before them are remembered.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from exporter.feed.reader import FeedEntry
from exporter.feed.snapshot import ProcessIdentity
from exporter.ledger import codec
from exporter.ledger.totals import Moment, Process, Slot, Totals
from exporter.recording.values import (
    NOTHING,
    Aggregation,
    EventsReading,
    StatDefinition,
    StatReading,
    families_of,
)

KEPT_PROCESSES = 2
"""Departed processes per slot whose record outlives their feed file."""
KEPT_IDS = 32
"""Ids per rank that are remembered after their record has become part of a base."""


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


@dataclass(slots=True, eq=False)
class Rank:
    """A rank in memory."""

    key: RankKey
    slots: dict[int, Slot] = field(default_factory=dict)
    taken: dict[str, None] = field(default_factory=dict)  # ids of what is part of a base, oldest first
    changed: bool = False  # since it was saved
    kept: bool = False  # its state was loaded, so that totals are complete and may be saved
    safe: bool = False  # the totals, as they are, may be shown
    released: bool = False  # it is over, and another sidecar may keep it

    def processes(self) -> Iterator[tuple[Slot, Process]]:
        """Every process that has a record."""
        for slot in self.slots.values():
            for process in slot.processes:
                yield slot, process

    def resume(self, present: Collection[str], now: Moment) -> None:
        """Go on from a state file: whoever lived when it was saved and has no file now has died since."""
        for _, process in self.processes():
            process.seen_monotonic = process.first_seen = now.monotonic
            if process.departed is not None:
                process.depart(process.departed, now)
            elif process.identity.id not in present:
                process.depart(process.written, now)
                self.changed = True
        for slot in self.slots.values():
            if slot.base.departed is not None:
                slot.base.depart(slot.base.departed, now)

    def drop(self, process_id: str) -> None:
        """Forget a process that turned out to be another rank's."""
        for slot in self.slots.values():
            slot.processes = [each for each in slot.processes if each.identity.id != process_id]
        self.changed = True

    def observe(
        self,
        entries: Sequence[FeedEntry],
        unreadable: Collection[str],
        now: Moment,
        *,
        patience_seconds: float,
    ) -> None:
        """Bind what the feed shows of this rank to slots: the known, then the dead, then the new ones.

        A file whose id is `unreadable` is there, but was refused; after `patience_seconds` its process counts as gone.
        """
        known = {process.identity.id: process for _, process in self.processes()}
        new: list[Process] = []
        seen: set[str] = set()
        for entry in entries:
            process_id = entry.snapshot.process.id
            seen.add(process_id)
            if process_id in known:
                self._see(known[process_id], entry, now)
            elif process_id not in self.taken:
                new.append(_made(entry, now))
        for process_id, process in known.items():
            if process_id not in seen and process.living:
                process.unseen += 1
                # A listing made while a file is being replaced may miss it once.
                patience = patience_seconds if process_id in unreadable else 0.0
                if process.unseen > 1 and now.monotonic - process.seen_monotonic > patience:
                    process.depart(now.wall, now)
                    self.changed = True
        # The dead first: their slots are free again for those that took their place.
        for process in sorted(new, key=lambda each: (each.living, not each.trains, each.identity.started)):
            self._free_slot().processes.append(process)
            self.changed = True
        self._prefer_training()
        present = {*seen, *unreadable}
        for slot in self.slots.values():
            for process_id in slot.fold(KEPT_PROCESSES, present):
                self.taken[process_id] = None
                self.changed = True
        while len(self.taken) > KEPT_IDS and next(iter(self.taken)) not in present:
            del self.taken[next(iter(self.taken))]

    def _prefer_training(self) -> None:
        """Give slot 0 to a process that trains where one that does not has come first."""
        first = self.slots.get(0)
        holder = None if first is None else first.living()
        if first is None or holder is None or holder.trains:
            return
        for slot in self.slots.values():
            other = slot.living()
            if other is not None and other.trains:
                for here, goes, comes in ((first, holder, other), (slot, other, holder)):
                    here.processes.remove(goes)
                    here.processes.append(comes)
                self.changed = True
                return

    def _see(self, process: Process, entry: FeedEntry, now: Moment) -> None:
        process.unseen, process.seen_monotonic = 0, now.monotonic
        process.age_seconds = entry.age_seconds
        process.identity = entry.snapshot.process  # what it says of itself may have changed
        known_from_file_only = process.snapshot is None
        if process.snapshot is None or entry.snapshot.sequence > process.sequence:
            process.snapshot = entry.snapshot
            self.changed = True
        if entry.alive and process.departed is not None:
            process.departed = None  # its lock could not be seen for a while
            self.changed = True
        elif not entry.alive and process.living:
            # Known since the state file only: it died while no sidecar looked.
            process.depart(now.wall - (entry.age_seconds if known_from_file_only else 0.0), now)
            self.changed = True
        process.note_progress(now)

    def _free_slot(self) -> Slot:
        occupied = {slot.number for slot, process in self.processes() if process.living}
        number = next(number for number in range(len(occupied) + 1) if number not in occupied)
        return self.slots.setdefault(number, Slot(number))

    # The content of its state file: the definitions of the Stats once each, and the numbers ------------

    def encode(self) -> bytes:
        """Write everything."""
        stats: dict[int, tuple[int, StatDefinition]] = {}

        def written(totals: Totals) -> dict[str, object]:
            return {
                "departed": totals.departed,
                "refused": totals.refused,
                "dropped": totals.dropped,
                "events": codec.to_json(totals.events) if totals.events else None,
                "series": [
                    (
                        stats.setdefault(id(each.definition), (len(stats), each.definition))[0],
                        *(each.count, each.sum, each.bucket_counts, each.last_sample),
                        *(each.rejected, each.overflows),
                    )
                    for each in totals.series.values()
                ],
            }

        slots = [
            {
                "slot": slot.number,
                "base": written(slot.base),
                "processes": [
                    {
                        "identity": codec.to_json(each.identity),
                        "written": each.written,
                        "sequence": each.sequence,
                        "totals": written(each),
                    }
                    for each in slot.processes
                ],
            }
            for slot in self.slots.values()
        ]
        definitions = [
            (
                each.name,
                each.unit,
                each.help,
                each.labels,
                Aggregation.HISTOGRAM in each.aggregations,
                each.buckets,
                each.kind,
            )
            for _, each in stats.values()
        ]
        body = {"stats": definitions, "totals": {"taken": list(self.taken), "slots": slots}}
        return json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def decode(content: bytes) -> tuple[dict[int, Slot], dict[str, None]]:
    """Read slots and ids that are taken back.

    Raises:
        ValueError: It is not what `Rank.encode` writes.
    """
    slots: dict[int, Slot] = {}
    try:
        body = json.loads(content)
        definitions = [_definition(*each) for each in body["stats"]]
        for each in body["totals"]["slots"]:
            slot = slots[each["slot"]] = Slot(each["slot"])
            _fill(slot.base, each["base"], definitions)
            for found in each["processes"]:
                identity: ProcessIdentity = codec.from_json(ProcessIdentity, found["identity"])
                process = Process(identity=identity, written=found["written"], sequence=found["sequence"])
                _fill(process, found["totals"], definitions)
                slot.processes.append(process)
        return slots, dict.fromkeys(body["totals"]["taken"])
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _made(entry: FeedEntry, now: Moment) -> Process:
    process = Process(identity=entry.snapshot.process, snapshot=entry.snapshot)
    process.seen_monotonic = process.first_seen = now.monotonic
    process.age_seconds = entry.age_seconds
    if not entry.alive:
        process.depart(now.wall - entry.age_seconds, now)
    process.note_progress(now)
    return process


def _definition(
    name: str, unit: str | None, text: str, labels: Any, histogram: bool, buckets: Any, kind: str
) -> StatDefinition:
    return StatDefinition(
        name,
        frozenset({Aggregation.HISTOGRAM} if histogram else ()),
        unit=unit,
        help=text,
        labels=tuple([(label, value) for label, value in labels]),
        buckets=tuple(buckets),
        kind=kind,
    )


def _fill(totals: Totals, body: Mapping[str, Any], definitions: Sequence[StatDefinition]) -> None:
    totals.departed, totals.refused, totals.dropped = body["departed"], body["refused"], body["dropped"]
    if body["events"] is not None:
        totals.events = codec.from_json(EventsReading, body["events"])
    for of, count, total, buckets, last_sample, rejected, overflows in body["series"]:
        definition = definitions[of]
        totals.series[families_of(definition).main, definition.labels] = StatReading(
            definition,
            count,
            total,
            tuple(buckets),
            last_sample=last_sample,
            rejected=rejected or NOTHING,
            overflows=overflows,
        )
