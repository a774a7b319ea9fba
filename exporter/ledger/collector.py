"""JobCollector: from the feed directory to families, by way of the ledger.

Runs in the sidecar; `collect` is called by the scheduler from one thread at a time. Feed files come in, a
block of families goes out; `loaded`, `living` and `generation` may be read from any thread.

One pass:

1. Read the feed. Bind every process to a rank and a seat; load the state of ranks that appear.
2. Settle which Stats are admitted, and count the new snapshots.
3. Save the state of every rank that has changed; count goodput from rank 0, and save that.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from exporter.collectors.family import Collected, Family, FamilySpec
from exporter.collectors.job import JobProcess
from exporter.errors import CollectError, FeedError
from exporter.ledger.admission import Admission
from exporter.ledger.counting import Counting
from exporter.ledger.event_families import SPECS as EVENT_SPECS
from exporter.ledger.event_families import EventBlock
from exporter.ledger.feed_families import SPECS, FeedBlock, SelfCounts, sample_names, self_families
from exporter.ledger.goodput_families import SPECS as GOODPUT_SPECS
from exporter.ledger.ranks import Ranks
from exporter.ledger.seats import Moment
from exporter.ledger.sessions import Sessions
from exporter.ledger.stat_families import StatBlock
from exporter.ledger.state import StateStore
from exporter.ledger.totals import Entry, RankKey
from exporter.ledger.training_info import SPECS as INFO_SPECS
from exporter.ledger.training_info import Gpus, RankDevices, TrainingInfoBlock
from exporter.ledger.views import GapRules, SeatView, view
from exporter.ledger.work_use import WorkUses

_log = logging.getLogger(__name__)

NO_FEED_SECONDS = 60.0
"""How long no feed is nothing to talk about."""


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


class JobCollector:
    """Publishes what the processes of the job have recorded.

    Attributes:
        loaded: True once the state has been loaded and one pass over the feed was made (or was not possible:
            then there is nothing of the job to publish, and the rest of the page need not wait).
        living: Living processes at the last pass.
        processes: Who records, and who did a short while ago; None while the feed cannot be read.
        sessions: Counts goodput.
        info: Says who trains what.
        work: Says what the processes do.
        gpus: What is known of GPUs; set by the composition root.
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
        sessions: Sessions | None = None,
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
            sessions: Counts goodput; None for one with the usual options.
        """
        self.loaded = False
        self.living = 0
        self.processes: tuple[JobProcess, ...] | None = None
        self.generation = 0
        self.info = TrainingInfoBlock()
        self.gpus = Gpus()
        self.work = WorkUses()
        self.sessions = sessions or Sessions(state, linger_seconds=linger_seconds)
        self._feed = reader
        self._directory = directory
        self._state = state
        self._rules = GapRules(stale_after_seconds, linger_seconds)
        self._clock = clock
        self._monotonic = monotonic
        self._admission = Admission(reserved=sample_names(self.specs) | frozenset(reserved))
        self._stats = StatBlock(self._admission, stale_after_seconds=stale_after_seconds)
        self._processes = FeedBlock()
        self._events = EventBlock()
        self._ranks = Ranks(state, stale_after_seconds=stale_after_seconds, linger_seconds=linger_seconds)
        self._counting = Counting(self._admission, self._rules)
        self._refused: frozenset[tuple[str, str]] = frozenset()
        self._refusals: Counter[str] = Counter()
        self._kept_files: set[str] = set()
        self._started: float | None = None
        self._told_of_no_feed = False

    @property
    def specs(self) -> Sequence[FamilySpec]:
        """Every family with a fixed name; those of Stats are named by the job."""
        return (*SPECS, *EVENT_SPECS, *GOODPUT_SPECS, *INFO_SPECS)

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
            self.processes = None
            raise CollectError(str(error), reason="directory") from error
        entries = _by_id(scan.entries)
        unreadable = {name.partition(".")[0] for name, _ in scan.refused}
        self._note_feed(now, entries)
        problems = self._ranks.observe(owner, entries, unreadable, now)
        self._note_refused([*scan.refused, *self._taken(entries)])
        self._counting.count(self._ranks, now)
        changed, failures = self._ranks.save()
        problems += failures
        problems += self.sessions.update(self._ranks, entries, now)
        views = list(self._views(now))
        families = self._families(views, entries, len(scan.refused), now)
        if owner:
            self._remove_dead(entries)
        self._ranks.forget({view.seat for view in views}, {*entries, *unreadable}, now)
        self.living = sum(entry.alive for entry in entries.values())
        self.processes = tuple(self._job_processes(views, entries))
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

    def _views(self, now: Moment) -> Iterator[SeatView]:
        for rank in sorted(self._ranks, key=lambda rank: (rank.key.run, rank.key.rank or 0, rank.key.role)):
            for _, seat in sorted(rank.totals.seats.items()):
                seen = view(rank.key, seat, self._rules, now, counted=rank.safe)
                if seen is not None:
                    yield seen

    def _families(
        self, views: Sequence[SeatView], entries: Mapping[str, Entry], refused: int, now: Moment
    ) -> list[Family]:
        state, devices = self._state, RankDevices(self.gpus)
        pids = {process_id: entry.pid for process_id, entry in entries.items() if entry.alive}
        self.work.update(views, pids, devices, self.gpus.readings(), self.sessions.flows())
        counts = SelfCounts(
            files=len(entries) + refused,
            refused=self._refusals,
            owner=self._ranks.owner,
            writes=state.writes,
            errors=state.errors,
            damaged=state.damaged,
            withheld=len(self._ranks.withheld),
            last_write=state.last_write,
            state_bytes=state.total_bytes,
        )
        return [
            *self._stats.families(views, now),
            *self._processes.families(views, lambda process_id: devices.of(pids.get(process_id))),
            *self.info.families(views, pids, devices),
            *self._events.families(views),
            *self.sessions.families(),
            *self_families(counts),
        ]

    def _job_processes(self, views: Sequence[SeatView], entries: Mapping[str, Entry]) -> Iterator[JobProcess]:
        """Every process that lives, and of each seat that is shown the last ones that did."""
        told = set(entries)
        for entry in entries.values():
            snapshot = entry.snapshot
            yield JobProcess(snapshot.process, entry.alive, entry.pid, snapshot.recording.final)
        for seen in views:
            for record in seen.seat.records:
                if record.process.id not in told:
                    final = record.snapshot is not None and record.snapshot.recording.final
                    yield JobProcess(record.process, alive=False, final=final)

    def _remove_dead(self, entries: Mapping[str, Entry]) -> None:
        """Remove the files of processes that are dead and counted."""
        for process_id, entry in entries.items():
            rank = self._ranks[RankKey.of(entry.snapshot.process)]
            if entry.alive or not (rank.kept and rank.safe) or self.sessions.holds(process_id):
                continue
            try:
                self._feed.remove(process_id)
            except (FeedError, OSError) as error:
                if process_id not in self._kept_files:
                    _log.warning("the files of dead process %s cannot be removed: %s", process_id, error)
                self._kept_files.add(process_id)
        self._kept_files &= entries.keys()


def _by_id(entries: Sequence[Entry]) -> dict[str, Entry]:
    """Drop what a listing shows twice since a file was replaced meanwhile."""
    found: dict[str, Entry] = {}
    for entry in entries:
        before = found.get(entry.snapshot.process.id)
        if before is None or before.snapshot.sequence <= entry.snapshot.sequence:
            found[entry.snapshot.process.id] = entry
    return found


def _told(problems: Sequence[str]) -> tuple[tuple[str, str], ...]:
    if not problems:
        return ()
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return (("state", f"totals are withheld: {problems[0]}{more}"),)
