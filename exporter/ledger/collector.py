"""JobCollector: from the feed directory to families, by way of the ledger.

Runs in the sidecar; `collect` is called by the scheduler from one thread at a time. Feed files come in, a
block of families goes out; `loaded`, `living` and `generation` may be read from any thread.

One pass:

1. Read the feed. Bind every process to a rank and a seat; load the state of ranks that appear.
2. Settle which Stats are admitted, and count the new snapshots.
3. Save the state of every rank that has changed.
4. Make the families. A rank whose state could not be saved has its gauges, but no totals: a gap is honest,
   a total that a restart would take back is not.
5. Remove the feed files of the dead whose totals are now safe.

What holds when others die: a sidecar killed between any two of these steps counts nothing twice, since the
state knows the processes it has counted by their ids until their files are gone; a job killed at any instant
has lost at most one flush interval; a state directory that fails costs totals, never gauges.

A sidecar that does not own the feed directory looks on: it publishes what it sees, from the owner's state
files as they were when it first saw a rank, and removes and saves nothing. When the owner ends, it takes over
from the state files.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from pathlib import Path
from typing import Protocol

from exporter.collectors.family import Collected, Family, FamilySpec
from exporter.errors import CollectError, FeedError, StateError
from exporter.ledger.admission import Admission, Claimant, Plan
from exporter.ledger.encoding import decode, encode
from exporter.ledger.feed_families import SPECS, FeedBlock, SelfCounts, sample_names, self_families
from exporter.ledger.stat_families import StatBlock
from exporter.ledger.state import StateKey, StateStore
from exporter.ledger.totals import Entry, Moment, Part, RankKey, RankTotals, Record
from exporter.ledger.views import GapRules, SeatView, view

_log = logging.getLogger(__name__)

NO_FEED_SECONDS = 60.0
"""How long no feed is nothing to talk about."""
TIDY_SECONDS = 3600.0


class Feed(Protocol):
    """What the ledger needs of `exporter.feed.reader.FeedReader`."""

    def scan(self) -> Scanned:
        """Read every feed file."""
        ...

    def acquire_ownership(self) -> bool:
        """Become the owner of the directory; True while it is."""
        ...

    def remove(self, process_id: str) -> bool:
        """Remove the files of a dead process; False when they, or some, are still there."""
        ...


class Scanned(Protocol):
    """What a scan of the feed directory has found."""

    @property
    def entries(self) -> Sequence[Entry]:
        """The readable files."""
        ...

    @property
    def refused(self) -> Sequence[tuple[str, str]]:
        """The others: file name, reason."""
        ...


@dataclass(slots=True, eq=False)
class _Rank:
    """A rank in memory.

    Attributes:
        key: Which.
        totals: Its seats.
        kept: Whether its state was loaded, so that totals are complete and may be saved.
        safe: Whether the totals, as they are, may be shown.
        released: Whether it is over, and another sidecar may keep it.
    """

    key: RankKey
    totals: RankTotals = field(default_factory=RankTotals)
    kept: bool = False
    safe: bool = False
    released: bool = False


class JobCollector:
    """Publishes what the processes of the job have recorded.

    Attributes:
        loaded: True once the state has been loaded and one pass over the feed was made (or was not possible:
            then there is nothing of the job to publish, and the rest of the page need not wait).
        living: Living processes at the last pass.
        generation: Grows whenever published totals have changed, and never otherwise.
    """

    name = "feed"
    reasons = ("directory", "state")

    def __init__(
        self,
        reader: Feed,
        state: StateStore,
        *,
        stale_after_seconds: float = 10.0,
        linger_seconds: float = 900.0,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        directory: Path | None = None,
        reserved: Iterable[str] = (),
    ) -> None:
        """Touch nothing yet.

        Args:
            reader: The feed directory.
            state: Where totals are kept.
            stale_after_seconds: After so long without a new snapshot a living process has no window gauges.
            linger_seconds: How long the totals of the dead are shown.
            clock: Unix time.
            monotonic: A clock that is never set.
            directory: Where the reader looks, for the log.
            reserved: Names that no Stat may take, beside the generated list and this collector's own.
        """
        self.loaded = False
        self.living = 0
        self.generation = 0
        self._feed = reader
        self._directory = directory
        self._state = state
        self._rules = GapRules(stale_after_seconds, linger_seconds)
        self._clock = clock
        self._monotonic = monotonic
        self._admission = Admission(reserved=sample_names(SPECS) | frozenset(reserved))
        self._stats = StatBlock(self._admission, stale_after_seconds=stale_after_seconds)
        self._processes = FeedBlock()
        self._ranks: dict[RankKey, _Rank] = {}
        self._owner: bool | None = None
        self._resumed = False
        self._participants: list[object] = []
        self._leftovers: list[object] = []
        self._refused: frozenset[tuple[str, str]] = frozenset()
        self._refusals: Counter[str] = Counter()
        self._kept_files: set[str] = set()
        self._withheld: frozenset[RankKey] = frozenset()
        self._started: float | None = None
        self._told_of_no_feed = False
        self._tidied: float | None = None

    @property
    def specs(self) -> Sequence[FamilySpec]:
        """Every family with a fixed name; those of Stats are named by the job."""
        return SPECS

    def collect(self) -> Collected:
        """Make one pass.

        Raises:
            CollectError: `directory`: the feed directory cannot be read.
        """
        now = Moment(self._clock(), self._monotonic())
        try:
            owner = self._feed.acquire_ownership()
            scan = self._feed.scan()
        except (FeedError, OSError) as error:
            self.loaded = True
            raise CollectError(str(error), reason="directory") from error
        entries = _by_id(scan.entries)
        unreadable = {name.partition(".")[0] for name, _ in scan.refused}
        self._note_feed(now, entries)
        problems = self._open_ranks(owner, entries, unreadable, now)
        self._note_refused([*scan.refused, *self._taken(entries)])
        self._admit(now)
        changed, failures = self._save()
        problems += failures
        views = list(self._views(now))
        families = self._families(views, len(entries) + len(scan.refused), now)
        if owner:
            self._remove_dead(entries)
            self._tidy(now)
        self._forget(views, {*entries, *unreadable})
        self.living = sum(entry.alive for entry in entries.values())
        self.generation += changed
        self.loaded = True
        return Collected(families, _told(problems))

    def _note_feed(self, now: Moment, entries: Mapping[str, Entry]) -> None:
        if self._started is None:
            self._started = now.monotonic
        if entries:
            self._told_of_no_feed = True
        elif not self._told_of_no_feed and now.monotonic - self._started >= NO_FEED_SECONDS:
            self._told_of_no_feed = True
            _log.info(
                "no job has written to the feed directory%s yet: does the job's Python have training-exporter"
                " installed, does the job record anything, and has it the same EXPORTER_FEED_DIR (or user) as"
                " this sidecar? `python -m exporter check` looks at each",
                f" {self._directory}" if self._directory else "",
            )

    def _taken(self, entries: Mapping[str, Entry]) -> Iterator[tuple[str, str]]:
        """Living processes that were taken for dead so long ago that they cannot be told from a copy."""
        for process_id, entry in entries.items():
            rank = self._ranks[RankKey.of(entry.snapshot.process)]
            if entry.alive and process_id in rank.totals.taken:
                yield f"{process_id}.feed", "taken"

    def _note_refused(self, refused: Sequence[tuple[str, str]]) -> None:
        for name, reason in set(refused) - self._refused:
            self._refusals[reason] += 1
            _log.warning("feed file %r refused: %s", name, reason)
        self._refused = frozenset(refused)

    def _open_ranks(
        self, owner: bool, entries: Mapping[str, Entry], unreadable: Collection[str], now: Moment
    ) -> list[str]:
        """Bind all processes, and load the state of ranks that are new here."""
        problems: list[str] = []
        renewed = owner != self._owner
        if renewed:
            # What was only looked at may be behind the state files; what was owned is another's now.
            for rank in self._ranks.values():
                self._state.release(self._state_key(rank.key))
            self._ranks.clear()
        by_rank: dict[RankKey, list[Entry]] = {}
        for entry in entries.values():
            by_rank.setdefault(RankKey.of(entry.snapshot.process), []).append(entry)
        present = {*entries, *unreadable}
        self._owner = owner
        if renewed or not self._resumed:
            problems += self._resume_recent(by_rank, present, now)
        for key in by_rank:
            if key not in self._ranks or self._ranks[key].released:
                self._ranks[key] = _Rank(key)
        for key, rank in self._ranks.items():
            if rank.released:
                continue
            if not rank.kept:
                problems += self._load(rank, present, now)
            rank.totals.observe(
                by_rank.get(key, ()), unreadable, now, patience_seconds=self._rules.stale_after_seconds
            )
        return problems

    def _resume_recent(
        self, by_rank: Collection[RankKey], present: Collection[str], now: Moment
    ) -> list[str]:
        """Load the ranks of this sidecar whose processes ended a short while ago, files and all."""
        self._resumed = False
        try:
            keys = self._state.recent(self._rules.linger_seconds)
        except StateError as error:
            return [str(error)]
        self._resumed = True
        for state_key in keys:
            key = _rank_key(state_key)
            if key is None or key in by_rank or key in self._ranks:
                continue
            rank = _Rank(key)
            if not self._load(rank, present, now) and rank.totals.seats:
                self._ranks[key] = rank
            else:
                self._state.release(state_key)
        return []

    def _load(self, rank: _Rank, present: Collection[str], now: Moment) -> list[str]:
        """Make a rank complete; until that succeeds, its seats are provisional and its totals withheld."""
        state_key = self._state_key(rank.key)
        try:
            if self._owner and not self._state.claim(state_key):
                problem = (
                    f"another sidecar keeps the totals of {_shown(rank.key)} in {self._state.directory}: end it,"
                    " or give the runs different names with EXPORTER_RUN"
                )
                return [problem]
            loaded = self._state.load(state_key, decode)
        except StateError as error:
            if self._owner:
                return [str(error)]
            loaded = None  # the owner's file is not for everybody's eyes; what the feed has is
        rank.totals = RankTotals() if loaded is None else loaded
        rank.totals.resume(present, now)
        rank.kept = True
        return []

    def _admit(self, now: Moment) -> None:
        """Settle what counts, and count it."""
        participants: list[Record] = []
        for rank in self._ranks.values():
            for _, record in rank.totals.records():
                if self._planned(record):
                    participants.append(record)
        participants.sort(key=lambda record: (record.process.started, record.process.id))
        lists: list[object] = [record.plans for record in participants]
        changed = not _same(lists, self._participants)
        if changed:
            self._settle(participants, ())
            self._participants = lists
        for rank in self._ranks.values():
            for _, record in rank.totals.records():
                if record.snapshot is not None and record.snapshot is not record.taken:
                    record.take(record.snapshot)
        leftovers = [plans for part in self._lingering(now) if (plans := self._leftover(part))]
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

    def _lingering(self, now: Moment) -> Iterator[Part]:
        for rank in self._ranks.values():
            for seat in rank.totals.seats.values():
                for part in seat.parts():
                    if self._rules.lingers(part, now):
                        yield part

    def _leftover(self, part: Part) -> list[Plan | None]:
        if part.lingering is None:
            definitions = [reading.definition for reading in part.readings.values()]
            part.lingering = self._admission.plans(definitions)
        return part.lingering

    def _save(self) -> tuple[bool, list[str]]:
        """Write what has changed; what cannot be written is withheld."""
        changed = False
        problems: list[str] = []
        for rank in self._ranks.values():
            fresh = rank.totals.changed
            if not self._owner:
                rank.totals.changed, rank.safe = False, True
            elif not rank.kept:
                rank.safe = False
            elif rank.totals.changed or not (rank.safe or rank.released):
                try:
                    self._state.save(self._state_key(rank.key), encode(rank.totals))
                except StateError as error:
                    rank.safe = False
                    problems.append(str(error))
                else:
                    rank.totals.changed, rank.safe = False, True
            changed = changed or (fresh and rank.safe)
        withheld = frozenset(key for key, rank in self._ranks.items() if not rank.safe)
        changed = changed or withheld != self._withheld
        self._withheld = withheld
        return changed, problems

    def _views(self, now: Moment) -> Iterator[SeatView]:
        ranks = sorted(self._ranks.items(), key=lambda item: (item[0].run, item[0].rank or 0, item[0].role))
        for key, rank in ranks:
            for _, seat in sorted(rank.totals.seats.items()):
                seen = view(key, seat, self._rules, now, counted=rank.safe)
                if seen is not None:
                    yield seen

    def _families(self, views: Sequence[SeatView], files: int, now: Moment) -> list[Family]:
        state = self._state
        counts = SelfCounts(
            files=files,
            refused=self._refusals,
            owner=bool(self._owner),
            writes=state.writes,
            errors=state.errors,
            damaged=state.damaged,
            withheld=len(self._withheld),
            last_write=state.last_write,
            state_bytes=state.total_bytes,
        )
        return [*self._stats.families(views, now), *self._processes.families(views), *self_families(counts)]

    def _remove_dead(self, entries: Mapping[str, Entry]) -> None:
        """Remove the files of processes that are dead and counted."""
        for process_id, entry in entries.items():
            rank = self._ranks[RankKey.of(entry.snapshot.process)]
            if entry.alive or not (rank.kept and rank.safe):
                continue
            try:
                self._feed.remove(process_id)
            except (FeedError, OSError) as error:
                if process_id not in self._kept_files:
                    _log.warning("the files of dead process %s cannot be removed: %s", process_id, error)
                self._kept_files.add(process_id)
        self._kept_files &= entries.keys()

    def _tidy(self, now: Moment) -> None:
        if self._tidied is None or now.monotonic - self._tidied >= TIDY_SECONDS:
            self._tidied = now.monotonic
            self._state.tidy()

    def _forget(self, views: Sequence[SeatView], present: Collection[str]) -> None:
        """Let go of ranks that are over: of their lock at once, of the memory when they no longer linger."""
        shown = {view.seat for view in views}
        for key, rank in list(self._ranks.items()):
            totals = rank.totals
            ids = {record.process.id for _, record in totals.records()}.union(totals.taken)
            over = ids.isdisjoint(present) and not any(record.living for _, record in totals.records())
            if over and (rank.safe or not rank.kept) and not rank.released:
                self._state.release(self._state_key(key))
                rank.released = True
            if rank.released and shown.isdisjoint(totals.seats.values()):
                del self._ranks[key]

    def _state_key(self, key: RankKey) -> StateKey:
        if key.rank is not None:
            return (key.run, str(key.rank), "", "")
        # Processes without a rank are told apart by node: every node of a run has its own agent.
        return (key.run, "", key.role, self._state.keeper)


def _rank_key(state_key: StateKey) -> RankKey | None:
    if len(state_key) != 4:
        return None
    run, rank, role, _ = state_key
    return RankKey(run, int(rank) if rank.isdecimal() else None, role)


def _by_id(entries: Sequence[Entry]) -> dict[str, Entry]:
    """Drop what a listing shows twice since a file was replaced meanwhile."""
    found: dict[str, Entry] = {}
    for entry in entries:
        before = found.get(entry.snapshot.process.id)
        if before is None or before.snapshot.sequence <= entry.snapshot.sequence:
            found[entry.snapshot.process.id] = entry
    return found


def _same(first: Sequence[object], second: Sequence[object]) -> bool:
    return len(first) == len(second) and all(map(is_, first, second))


def _shown(key: RankKey) -> str:
    return f"run {key.run!r}, " + (f"rank {key.rank}" if key.rank is not None else f"role {key.role!r}")


def _told(problems: Sequence[str]) -> tuple[tuple[str, str], ...]:
    if not problems:
        return ()
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return (("state", f"totals are withheld: {problems[0]}{more}"),)
