"""Counting: which Stats of which processes count, and the moment at which they do.

Runs in the sidecar, on the ledger's collecting thread; no I/O. New snapshots are looked at, the settlement of
names is renewed when anybody's Stats have changed, and what was admitted is counted into the seats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import is_

from exporter.ledger.admission import Admission, Claimant, Plan
from exporter.ledger.ranks import Ranks
from exporter.ledger.seats import Moment, Part, Record
from exporter.ledger.views import GapRules


class Counting:
    """Counts new snapshots."""

    def __init__(self, admission: Admission, rules: GapRules) -> None:
        self._admission = admission
        self._rules = rules
        self._participants: list[object] = []
        self._leftovers: list[object] = []

    def count(self, ranks: Ranks, now: Moment) -> None:
        """Settle what counts, and count it."""
        participants = [record for record in ranks.records() if self._planned(record)]
        participants.sort(key=lambda record: (record.process.started, record.process.id))
        lists: list[object] = [record.plans for record in participants]
        changed = not _same(lists, self._participants)
        if changed:
            self._settle(participants, ())
            self._participants = lists
        for record in ranks.records():
            if record.snapshot is not None and record.snapshot is not record.taken:
                record.take(record.snapshot)
        # What the dead have left is known only now; it stands behind the living, and changes nothing for them.
        leftovers = [plans for part in self._lingering(ranks, now) if (plans := self._leftover(part))]
        if changed or not _same(leftovers, self._leftovers):
            self._settle(participants, leftovers)
            self._leftovers = list(leftovers)

    def _planned(self, record: Record) -> bool:
        """Bring a record's plans up to date; True when it has a say in the settlement."""
        snapshot = record.snapshot
        if snapshot is None:
            return False
        definitions = [reading.definition for reading in snapshot.recording.stats]
        first = record.definitions is None
        renewed = record.definitions is None or not _same(definitions, record.definitions)
        if renewed:
            record.definitions = definitions
            record.plans = self._admission.plans(definitions)
        if record.living:
            return True
        if first:
            # It died before anybody saw it: its totals are counted, and shown if they fit those of the living.
            record.admit(record.plans)
            return False
        return renewed

    def _settle(self, participants: Sequence[Record], leftovers: Sequence[list[Plan | None]]) -> None:
        settled = self._admission.settle(
            [Claimant(record.plans, record.admitted) for record in participants],
            [Claimant(plans) for plans in leftovers],
        )
        for record, admitted in zip(participants, settled, strict=True):
            if not _same(admitted, record.admitted):
                record.admit(admitted)

    def _lingering(self, ranks: Ranks, now: Moment) -> Iterator[Part]:
        for rank in ranks:
            for seat in rank.totals.seats.values():
                for part in seat.parts():
                    if self._rules.lingers(part, now):
                        yield part

    def _leftover(self, part: Part) -> list[Plan | None]:
        if part.lingering is None:
            definitions = [reading.definition for reading in part.readings.values()]
            part.lingering = self._admission.plans(definitions)
        return part.lingering


def _same(first: Sequence[object], second: Sequence[object]) -> bool:
    return len(first) == len(second) and all(map(is_, first, second))
