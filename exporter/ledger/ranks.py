"""Ranks: the ranks in memory, and the state files that stand behind them.

Runs in the sidecar, on the ledger's collecting thread. What the feed shows of all processes comes in; ranks whose
totals are complete and saved go out. A rank is loaded when the first of its processes appears, or at start when the
last one ended a short while ago; it is let go when it is over: its state file at once, so that another sidecar may keep
it, the memory when there is nothing left to show.

A sidecar that does not own the feed directory loads the owner's files and saves nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from exporter.errors import StateError
from exporter.feed.reader import FeedEntry
from exporter.ledger.rank import Rank, RankKey, decode
from exporter.ledger.store import StateKey, StateStore
from exporter.ledger.totals import Moment, Process, Slot

KIND = "rank"


class Ranks:
    """All ranks of one feed directory.

    Args:
        stale_after_seconds: How long an unreadable file may be a living process.
        linger_seconds: How long the totals of the dead are shown, also over a restart.

    Attributes:
        owner: Whether this sidecar keeps the totals, or only looks on.
    """

    def __init__(self, state: StateStore, *, stale_after_seconds: float, linger_seconds: float) -> None:
        self.owner = False
        self._state = state
        self._stale_after_seconds = stale_after_seconds
        self._linger_seconds = linger_seconds
        self._ranks: dict[RankKey, Rank] = {}
        self._rank_of: dict[str, RankKey] = {}
        self._resumed = False

    def __getitem__(self, key: RankKey) -> Rank:
        return self._ranks[key]

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._ranks.values())

    @property
    def withheld(self) -> int:
        """Ranks whose totals may not be shown since the last `save`."""
        return sum(not rank.safe for rank in self)

    def processes(self) -> Iterator[Process]:
        """Every process that has a record."""
        return (process for rank in self for _, process in rank.processes())

    def observe(
        self, owner: bool, entries: Mapping[str, FeedEntry], unreadable: Collection[str], now: Moment
    ) -> list[str]:
        """Bind all processes, and load the state of ranks that are new here; give why totals will be withheld.

        `entries` are the readable files by process id; those whose id is `unreadable` are there, but were refused.
        """
        renewed = owner != self.owner
        if renewed:
            # What was only looked at may be behind the state files; what was owned is another's now.
            for key in self._ranks:
                self._state.release(self._state_key(key))
            self._ranks.clear()
        self.owner = owner
        by_rank: dict[RankKey, list[FeedEntry]] = {}
        for entry in entries.values():
            by_rank.setdefault(RankKey.of(entry.snapshot.process), []).append(entry)
        self._follow_claims(entries)
        present = {*entries, *unreadable}
        problems = self._resume_recent(by_rank, present, now) if renewed or not self._resumed else []
        for key in by_rank:
            rank = self._ranks.get(key)
            if rank is None:
                self._ranks[key] = Rank(key)
            elif rank.released:
                # Another sidecar may have kept it meanwhile; where its file is damaged, memory is right.
                self._ranks[key] = Rank(key, rank.slots, rank.taken)
        for key, rank in self._ranks.items():
            if not rank.released:
                problems += [] if rank.kept else self._load(rank, present, now)
                patience = self._stale_after_seconds
                rank.observe(by_rank.get(key, ()), unreadable, now, patience_seconds=patience)
        return problems

    def _follow_claims(self, entries: Mapping[str, FeedEntry]) -> None:
        """Take a process that has claimed a rank, or changed its run, from where it was counted until then."""
        found = {process_id: RankKey.of(entry.snapshot.process) for process_id, entry in entries.items()}
        for process_id, key in found.items():
            before = self._rank_of.get(process_id, key)
            if before != key and before in self._ranks:
                self._ranks[before].drop(process_id)
        self._rank_of = found

    def _resume_recent(
        self, by_rank: Collection[RankKey], present: Collection[str], now: Moment
    ) -> list[str]:
        """Load the ranks of this sidecar whose processes ended a short while ago, files and all."""
        self._resumed = False
        try:
            keys = self._state.recent(KIND, self._linger_seconds)
        except StateError as error:
            return [str(error)]
        self._resumed = True
        for state_key in keys:
            _, run, number, role, _ = state_key
            key = RankKey(run, int(number) if number.isdecimal() else None, role)
            if key in by_rank or key in self._ranks:
                continue
            rank = Rank(key)
            if not self._load(rank, present, now) and rank.slots:
                self._ranks[key] = rank
            else:
                self._state.release(state_key)
        return []

    def _load(self, rank: Rank, present: Collection[str], now: Moment) -> list[str]:
        """Make a rank complete; until that succeeds, its slots are provisional and its totals withheld."""
        key, state_key = rank.key, self._state_key(rank.key)
        try:
            if self.owner and not self._state.claim(state_key):
                shown = f"rank {key.rank}" if key.rank is not None else f"role {key.role!r}"
                where = f"run {key.run!r}, {shown}, in {self._state.directory}"
                remedy = "end it, or give the runs different names with EXPORTER_RUN"
                return [f"another sidecar keeps the totals of {where}: {remedy}"]
            loaded = self._state.load(state_key, decode)
        except StateError as error:
            if self.owner:
                return [str(error)]
            loaded = None  # the owner's file is not for everybody's eyes; what the feed has is
        rank.kept = True
        if loaded is None:  # nothing was saved, or it is damaged: memory knows all there is
            rank.changed = True
        else:
            rank.slots, rank.taken = loaded
            rank.resume(present, now)
        return []

    def save(self) -> list[str]:
        """Write what has changed; what cannot be written is withheld, and why is returned."""
        problems: list[str] = []
        for rank in self:
            if not self.owner:
                rank.changed, rank.safe = False, True
            elif not rank.kept:
                rank.safe = False
            elif rank.changed or not (rank.safe or rank.released):
                try:
                    self._state.save(self._state_key(rank.key), rank.encode())
                    rank.changed, rank.safe = False, True
                except StateError as error:
                    problems.append(str(error))
                    rank.safe = False
        return problems

    def forget(self, shown: Collection[Slot], present: Collection[str]) -> None:
        """Let go of ranks that are over: of their lock at once, of the memory when none of their slots is shown."""
        for key, rank in list(self._ranks.items()):
            processes = [process for _, process in rank.processes()]
            ids = {process.identity.id for process in processes}.union(rank.taken)
            over = ids.isdisjoint(present) and not any(process.living for process in processes)
            lingers = any(slot in shown for slot in rank.slots.values())
            # One that could not be loaded yet is not given up before that.
            if over and not rank.released and (rank.safe or not (rank.kept or lingers)):
                self._state.release(self._state_key(key))
                rank.released = True
            if rank.released and not lingers:
                del self._ranks[key]
        if self.owner:
            self._state.tidy()

    def _state_key(self, key: RankKey) -> StateKey:
        if key.rank is not None:
            return (KIND, key.run, str(key.rank), "", "")
        # Processes without a rank are told apart by node: every node of a run has its own agent.
        return (KIND, key.run, "", key.role, self._state.keeper)
