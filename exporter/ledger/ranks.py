"""Ranks: totals over all processes of each rank, and their state files.

    rank (run, rank, role)
      └── slot 0, 1, …           a worker slot with separate totals and series
            ├── base             sum over processes that exited earlier
            └── processes        a record for each later process, in order of arrival

A process is bound to the lowest slot without a running process; slot 0 prefers a process that trains. A process with a record is
counted once, even after a restart of the sidecar. After the removal of the feed file, the record is added to the base. The last
`MAX_EXITED_PROCESSES` exited processes keep their records, because a process may recreate deleted files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from exporter.errors import StateError
from exporter.feed.reader import FeedEntry
from exporter.feed.snapshot import ProcessIdentity
from exporter.ledger.goodput.endings import Endings
from exporter.ledger.rank_record import decode_rank, encode_rank
from exporter.ledger.state.files import StateKey
from exporter.ledger.state.store import StateStore
from exporter.ledger.totals import GapRules, Moment, ProcessTotals, RankKey, WorkerSlot

STATE_KIND = "rank"
MAX_EXITED_PROCESSES = 2
"""Number of the last exited processes of a slot that keep a record. The last process that trained keeps its record too."""
MAX_FOLDED_IDS = 32
"""Number of ids of processes in a base, per rank, above which the oldest ids are removed. The oldest id that has a feed file stays, and
so do all later ids."""
RETENTION_SECONDS = 60.0
"""Minimum time between the exit of a rank and its removal from memory, whether or not its totals are still shown."""


@dataclass(slots=True, eq=False)
class RankTotals:
    """Totals of a rank: worker slots, and the status of the saved state."""

    key: RankKey
    slots: dict[int, WorkerSlot] = field(default_factory=dict)
    # ids of processes that are part of a base, oldest first
    folded_ids: dict[str, None] = field(default_factory=dict)
    saved_hash: int = 0  # hash of the last saved content
    is_loaded: bool = False  # the state was loaded: totals are complete and may be saved
    is_saved: bool = False  # the totals may be shown: they are saved, or another sidecar saves them
    is_released: bool = False  # True after the rank exited: other sidecars may claim the state

    def processes(self) -> Iterator[tuple[WorkerSlot, ProcessTotals]]:
        """Yield every process that has a record, with the slot."""
        for slot in self.slots.values():
            for process in slot.processes:
                yield slot, process

    def resume(self, present_ids: Collection[str], now: Moment) -> None:
        """Continue from a loaded state. A process that was running at the last save and has no feed file now counts as exited."""
        for _, process in self.processes():
            process.last_seen_monotonic = process.first_seen_monotonic = now.monotonic
            if process.exited_at is not None:
                process.record_exit(process.exited_at, now)
            elif process.identity.id not in present_ids:
                process.record_exit(process.written_at, now)
        for slot in self.slots.values():
            if slot.base.exited_at is not None:
                slot.base.record_exit(slot.base.exited_at, now)

    def update(
        self,
        entries: Sequence[FeedEntry],
        unreadable_ids: Collection[str],
        now: Moment,
        *,
        patience_seconds: float,
    ) -> None:
        """Update the known processes from the feed, and bind new processes to slots, exited processes first.

        A process without a file counts as exited from the second pass on, and a process with an unreadable file after
        *patience_seconds*. *unreadable_ids* contains process ids.
        """
        known_processes = {process.identity.id: process for _, process in self.processes()}
        present_entries = {entry.snapshot.process.id: entry for entry in entries}
        new_processes = [
            ProcessTotals(identity=entry.snapshot.process)
            for process_id, entry in present_entries.items()
            if process_id not in known_processes and process_id not in self.folded_ids
        ]
        for process in new_processes:
            process.first_seen_monotonic = now.monotonic
        for process in (*known_processes.values(), *new_processes):
            if process.identity.id in present_entries:
                _update_process(process, present_entries[process.identity.id], now)
        for process_id, process in known_processes.items():
            if process_id not in present_entries and process.is_alive:
                process.missed_passes += 1
                # A listing during a rename may lack the file once.
                patience = patience_seconds if process_id in unreadable_ids else 0.0
                if process.missed_passes > 1 and now.monotonic - process.last_seen_monotonic > patience:
                    process.record_exit(now.wall, now)
        # Exited processes are bound first, so that their successors can use the same slots.
        for process in sorted(
            new_processes,
            key=lambda process: (process.is_alive, not process.trains, process.identity.started),
        ):
            self._free_slot().processes.append(process)
        self._prefer_training()
        present_ids = {*present_entries, *unreadable_ids}
        for slot in self.slots.values():
            for process_id in slot.fold(MAX_EXITED_PROCESSES, present_ids):
                self.folded_ids[process_id] = None
        while len(self.folded_ids) > MAX_FOLDED_IDS and next(iter(self.folded_ids)) not in present_ids:
            del self.folded_ids[next(iter(self.folded_ids))]

    def _prefer_training(self) -> None:
        """If the running process of slot 0 does not train, exchange it with a running process of another slot that trains."""
        first_slot = self.slots.get(0)
        non_trainer = None if first_slot is None else first_slot.running_process()
        if first_slot is None or non_trainer is None or non_trainer.trains:
            return
        for slot in self.slots.values():
            trainer = slot.running_process()
            if trainer is not None and trainer.trains:
                first_slot.processes.remove(non_trainer)
                first_slot.processes.append(trainer)
                slot.processes.remove(trainer)
                slot.processes.append(non_trainer)
                return

    def _free_slot(self) -> WorkerSlot:
        """Return the lowest slot without a running process, created if necessary."""
        occupied_numbers = {slot.number for slot, process in self.processes() if process.is_alive}
        number = next(number for number in range(len(occupied_numbers) + 1) if number not in occupied_numbers)
        return self.slots.setdefault(number, WorkerSlot(number))


def _update_process(process: ProcessTotals, entry: FeedEntry, now: Moment) -> None:
    """Update a process from its feed file, and record the exit if the process no longer holds its lock."""
    is_first_read = process.snapshot is None
    seconds_since_last_pass = now.monotonic - process.last_seen_monotonic
    process.missed_passes, process.last_seen_monotonic = 0, now.monotonic
    process.age_seconds = entry.age_seconds
    process.is_outdated = entry.is_outdated
    process.identity = entry.snapshot.process  # rank and role may have changed
    if is_first_read or entry.snapshot.sequence > process.sequence:
        process.snapshot = entry.snapshot
    if entry.is_alive:
        process.exited_at = process.outcome = None  # the lock was temporarily invisible
    elif process.is_alive:
        if is_first_read:
            # The exit time is unknown; use the time of the file's last change.
            process.record_exit(now.wall - entry.age_seconds, now)
        else:
            process.record_exit(now.wall - min(_silent_seconds(entry, now), seconds_since_last_pass), now)
            # Reports of other processes and of the launch may arrive after this pass, not after the estimated exit.
            process.exited_monotonic = now.monotonic
    process.update_step_times(now, seconds_since_last_pass)


def _silent_seconds(entry: FeedEntry, now: Moment) -> float:
    """Return the time since the last sign of life of an exited process.

    A process that wrote no final snapshot probably exited half a flush interval after its last snapshot.
    """
    snapshot = entry.snapshot
    delay_seconds = 0.0 if snapshot.recording.final else snapshot.flush_seconds / 2
    return max(0.0, now.wall - snapshot.written - delay_seconds)


class Ranks:
    """Totals of all ranks of a feed directory. Only the owner of the directory saves totals."""

    def __init__(self, state: StateStore) -> None:
        self.is_owner = False
        self._state = state
        self._ranks: dict[RankKey, RankTotals] = {}
        self._key_by_process: dict[str, RankKey] = {}
        self._is_resumed = False

    def __getitem__(self, process: ProcessIdentity) -> RankTotals:
        return self._ranks[RankKey.of_process(process)]

    def __iter__(self) -> Iterator[RankTotals]:
        return iter(self._ranks.values())

    @property
    def suppressed_count(self) -> int:
        """Number of ranks whose totals are suppressed, because they are not saved."""
        return sum(not rank.is_saved for rank in self)

    def processes(self) -> Iterator[ProcessTotals]:
        """Yield every process that has a record."""
        return (process for rank in self for _, process in rank.processes())

    def observe(
        self,
        is_owner: bool,
        entries: Mapping[str, FeedEntry],
        unreadable_ids: Collection[str],
        rules: GapRules,
        now: Moment,
    ) -> None:
        """Bind all processes, and load the state of new ranks.

        *entries* contains the readable files by process id, and *unreadable_ids* the process ids of all other files.
        """
        if is_owner != self.is_owner:
            # The state files may be newer than memory, or belong to a new owner.
            for key in self._ranks:
                self._state.release(self._state_key(key))
            self._ranks.clear()
            self._is_resumed = False
        self.is_owner = is_owner
        entries_by_rank: dict[RankKey, list[FeedEntry]] = {}
        for entry in entries.values():
            entries_by_rank.setdefault(RankKey.of_process(entry.snapshot.process), []).append(entry)
        self._update_keys(entries)
        present_ids = {*entries, *unreadable_ids}
        if not self._is_resumed:
            self._resume_recent(entries_by_rank, present_ids, rules, now)
        for key in entries_by_rank:
            rank = self._ranks.get(key)
            if rank is None:
                self._ranks[key] = RankTotals(key)
            elif rank.is_released:
                # Another sidecar may have saved the rank in the meantime; memory is used if the file is damaged.
                self._ranks[key] = RankTotals(key, rank.slots, rank.folded_ids)
        for key, rank in self._ranks.items():
            if not rank.is_released:
                if not rank.is_loaded:
                    self._load(rank, present_ids, now)
                patience = rules.stale_after_seconds
                rank.update(entries_by_rank.get(key, ()), unreadable_ids, now, patience_seconds=patience)

    def _update_keys(self, entries: Mapping[str, FeedEntry]) -> None:
        """Update the keys of the processes, and remove each process with a changed run, rank or role from its former rank."""
        previous_key_by_process = self._key_by_process
        self._key_by_process = {
            process_id: RankKey.of_process(entry.snapshot.process) for process_id, entry in entries.items()
        }
        for process_id, previous_key in previous_key_by_process.items():
            has_moved = self._key_by_process.get(process_id, previous_key) != previous_key
            if has_moved and previous_key in self._ranks:
                self._remove_moved_processes(self._ranks[previous_key])

    def _remove_moved_processes(self, rank: RankTotals) -> None:
        """Remove the processes of a rank whose feed files name a different run, rank or role."""
        for slot in rank.slots.values():
            slot.processes = [
                process
                for process in slot.processes
                if self._key_by_process.get(process.identity.id, rank.key) == rank.key
            ]

    def _resume_recent(
        self,
        ranks_with_entries: Collection[RankKey],
        present_ids: Collection[str],
        rules: GapRules,
        now: Moment,
    ) -> None:
        """Load the ranks without feed files that this sidecar saved within the retention time."""
        try:
            keys = self._state.recent(STATE_KIND, rules.linger_seconds)
        except StateError as error:
            self._state.report(str(error))
            return
        self._is_resumed = True
        for state_key in keys:
            _, run, rank_text, role, _ = state_key
            key = RankKey(run, int(rank_text) if rank_text.isdecimal() else None, role)
            if key in ranks_with_entries or key in self._ranks:
                continue
            rank = self._ranks[key] = RankTotals(key)
            self._load(rank, present_ids, now)
            if not rank.slots:
                self._state.release(state_key)
                del self._ranks[key]

    def _load(self, rank: RankTotals, present_ids: Collection[str], now: Moment) -> None:
        """Load the state of a rank. The owner suppresses the totals until the load succeeds."""
        state_key = self._state_key(rank.key)
        try:
            if self.is_owner and not self._state.claim(state_key):
                location = f"{rank.key}, in {self._state.directory}"
                remedy = "stop that sidecar, or set EXPORTER_RUN to different run names"
                self._state.report(f"a different sidecar holds the totals of {location}: {remedy}")
                return
            record = self._state.load(state_key, decode_rank)
        except StateError as error:
            if self.is_owner:
                self._state.report(str(error))
                return
            record = None  # this user may not read the owner's state; the feed is published without it
        rank.is_loaded = True
        if record is not None:  # otherwise there is no saved state, and the totals in memory are used
            rank.slots, rank.folded_ids = record.slots, record.folded_ids
            self._remove_moved_processes(rank)  # a process may have moved since the last save
            rank.resume(present_ids, now)

    def decide_outcomes(self, endings: Endings) -> None:
        """Decide the outcomes of exited processes for which no further evidence is expected."""
        for rank in self:
            for slot in rank.slots.values():
                for position, process in enumerate(slot.processes):
                    if process.exited_at is not None and process.outcome is None:
                        successor = endings.find_successor(process, slot.processes[position + 1 :])
                        endings.decide_outcome(process, successor=successor)

    def save(self) -> None:
        """Save changed ranks. Totals that the owner of the directory cannot save are not published."""
        for rank in self:
            if not (self.is_owner and rank.is_loaded):
                rank.is_saved = not self.is_owner
            elif not rank.is_released:
                content = encode_rank(rank.slots, rank.folded_ids)
                try:
                    if not rank.is_saved or rank.saved_hash != hash(content):
                        self._state.save(self._state_key(rank.key), content)
                    rank.saved_hash, rank.is_saved = hash(content), True
                except StateError as error:
                    self._state.report(str(error))
                    rank.is_saved = False

    def release_exited(
        self, visible_slots: Collection[WorkerSlot], present_ids: Collection[str], now: Moment
    ) -> None:
        """Release exited ranks for other sidecars.

        A released rank is removed from memory after `RETENTION_SECONDS`, once none of its slots is shown.
        """
        for key, rank in list(self._ranks.items()):
            processes = [process for _, process in rank.processes()]
            ids = {process.identity.id for process in processes}.union(rank.folded_ids)
            is_over = ids.isdisjoint(present_ids) and all(
                process.outcome is not None for process in processes
            )
            lingers = any(slot in visible_slots for slot in rank.slots.values())
            # A rank whose state is not loaded yet stays claimed.
            if is_over and not rank.is_released and (rank.is_saved or not (rank.is_loaded or lingers)):
                self._state.release(self._state_key(key))
                rank.is_released = True
            exited_monotonic = max((process.exited_monotonic for process in processes), default=0.0)
            if rank.is_released and not lingers and now.monotonic - exited_monotonic > RETENTION_SECONDS:
                del self._ranks[key]
        if self.is_owner:
            self._state.tidy()

    def _state_key(self, key: RankKey) -> StateKey:
        """Return the key of a rank's state file."""
        if key.rank is not None:
            return (STATE_KIND, key.run, str(key.rank), "", "")
        # Processes without a rank are counted per node, because each node of a run may have an agent.
        return (STATE_KIND, key.run, "", key.role, self._state.sidecar)
