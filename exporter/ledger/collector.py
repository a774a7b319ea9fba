"""Collector of the job's families from the feed directory.

Totals that cannot be saved are not published, because they would decrease after a restart, and a gap is better. A process is counted
once even if the sidecar is killed: the state contains the ids of the counted processes until their feed files are removed.

A sidecar that does not own the feed directory saves nothing. When it first reads a rank, it loads the state that the owner has saved, and
adds the values of the feed to that state. After the owner has exited, the sidecar becomes the owner.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Literal

from exporter.collectors.job import MAX_EXITED_RUNS, InspectedRank, InspectedRun, JobProcess
from exporter.diagnoses import FOREIGN_ENTRY, NO_FEED, REFUSED_FILES
from exporter.errors import CollectError, FeedError
from exporter.families import Collected
from exporter.feed.reader import FeedEntry, FeedReader
from exporter.feed.snapshot import Snapshot
from exporter.ledger.energy.work import RETENTION_SECONDS, ProcessWork, WorkSnapshot, extend_intervals
from exporter.ledger.families import feed, run_info
from exporter.ledger.families.run_info import Gpus, GpusByPid, add_runs
from exporter.ledger.family_owners import FamilyOwners
from exporter.ledger.goodput import families as goodput_families
from exporter.ledger.goodput import run_state
from exporter.ledger.goodput.endings import Endings, ExitEvidence
from exporter.ledger.goodput.run_state import RunStates
from exporter.ledger.goodput.sessions import Sessions
from exporter.ledger.ranks import Ranks
from exporter.ledger.stat_families import StatMetrics
from exporter.ledger.state.store import StateStore
from exporter.ledger.totals import GapRules, Moment, VisibleSlot, visible_slot

_log = logging.getLogger(__name__)

NO_FEED_SECONDS = 60.0
"""Time without a feed file before the missing feed is logged."""
CONFLICT_SECONDS = 15.0
"""Time for which two running processes must have been read before they are in conflict. After a restart, the old and the new process
overlap for less time."""


@dataclass(frozen=True, slots=True)
class FeedPass:
    """Time, rules and content of the feed directory in a pass."""

    moment: Moment
    rules: GapRules
    is_owner: bool  # this sidecar owns the directory
    entries: Mapping[str, FeedEntry]  # readable files by process id
    refused_files: Sequence[tuple[str, str]]  # file name and reason
    unread_files: Sequence[str]  # names of files that a later pass reads

    @property
    def unreadable_ids(self) -> set[str]:
        """Ids of processes with files that are refused or not read yet."""
        return {
            name.partition(".")[0] for name in (*self.unread_files, *(name for name, _ in self.refused_files))
        }

    @property
    def present_ids(self) -> set[str]:
        """Ids of processes that have a file."""
        return {*self.entries, *self.unreadable_ids}


class JobCollector:
    """Collector of the data that the processes of the job record; `collect` is not reentrant.

    Attributes:
        is_loaded: True once a pass has loaded the state and read the feed, or has failed to read the feed.
        processes: Processes with a feed and recently exited processes; None before the first pass, and if the feed is unreadable.
        overdue_runs: Hung and stalled runs of the last pass.
        work: Phases of the processes as of the last pass.
        gpus: GPU data, set by the composition root.
        endings: Outcomes of exited processes; the composition root sets `endings.evidence`.
        sessions: Goodput of all runs.
    """

    name = "feed"
    reasons = ("directory", "state")
    specs = feed.SPECS + goodput_families.SPECS + run_state.SPECS + run_info.SPECS
    """Families with fixed names. The families of Stats are named by the job."""

    def __init__(
        self,
        reader: FeedReader,
        state: StateStore,
        *,
        stale_after_seconds: float = 10.0,
        linger_seconds: float = 900.0,
        max_exited_runs: int = MAX_EXITED_RUNS,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        directory: Path | None = None,
        is_shared: bool = False,
    ) -> None:
        self.is_loaded = False
        self.processes: tuple[JobProcess, ...] | None = None
        self.gpus = Gpus()
        self.overdue_runs: tuple[InspectedRun, ...] = ()
        self.work = WorkSnapshot()
        self.endings = Endings()
        self.sessions = Sessions(state, is_shared=is_shared)
        self._feed = reader
        self._directory = directory
        self._state = state
        self._stale_after_seconds = stale_after_seconds
        self._linger_seconds = linger_seconds
        self._max_exited_runs = max_exited_runs
        self._clock = clock
        self._monotonic = monotonic
        self._owners = FamilyOwners()
        self._stats = StatMetrics(self._owners)
        self._ranks = Ranks(state)
        self._states = RunStates(state)
        self._logged_refusals: frozenset[tuple[str, str]] = frozenset()
        self._logged_foreign_paths: set[str] = set()
        self._refusal_counts: Counter[str] = Counter(dict.fromkeys(feed.REFUSAL_REASONS, 0))
        self._undeletable_ids: set[str] = set()  # of processes whose files could not be removed
        # monotonic time of the first pass, infinite after a feed was read or the missing feed was logged
        self._no_feed_since: float | None = None

    def collect(self) -> Collected:
        """Read the feed, count and save the totals, and return the families of the pass.

        Raises:
            CollectError: The feed directory is unreadable.
        """
        feed_pass = self._observe()
        evidence = self._count(feed_pass)
        self._save(feed_pass, evidence)
        slots = self._visible_slots(feed_pass)
        collected = self._publish(slots, feed_pass)
        self._clean_up(slots, feed_pass)
        self._update_attributes(slots, feed_pass)
        return collected

    # Observe --------------------------------------------------------------------------------------------

    def _observe(self) -> FeedPass:
        """Read the feed directory, and bind the processes to ranks.

        Raises:
            CollectError: The feed directory is unreadable.
        """
        now = Moment(self._clock(), self._monotonic())
        try:
            is_owner = self._feed.ownership.acquire()
            scan = self._feed.scan()
        except (FeedError, OSError) as error:
            self.is_loaded = True
            self.processes = None
            raise CollectError(str(error), reason="directory") from error
        rules = GapRules(self._stale_after_seconds, self._linger_seconds, self.sessions.options.hang_rule)
        # A listing may contain a file and its replacement: the higher sequence is used.
        by_sequence = sorted(scan.entries, key=lambda entry: entry.snapshot.sequence)
        entries = {entry.snapshot.process.id: entry for entry in by_sequence}
        feed_pass = FeedPass(now, rules, is_owner, entries, scan.refused_files, scan.unread_files)
        self._log_missing_feed(now, has_feed=bool(entries))
        self._ranks.observe(is_owner, entries, feed_pass.unreadable_ids, rules, now)
        self._log_refused([*scan.refused_files, *self._already_counted(entries)])
        return feed_pass

    def _already_counted(self, entries: Mapping[str, FeedEntry]) -> list[tuple[str, str]]:
        """Return the feed files of running processes whose totals were already added to the base of a rank, with the reason `taken`.

        A copy of an old feed file is such a file.
        """
        return [
            (f"{process_id}.feed", "taken")
            for process_id, entry in entries.items()
            if entry.is_alive and process_id in self._ranks[entry.snapshot.process].folded_ids
        ]

    def _log_missing_feed(self, now: Moment, *, has_feed: bool) -> None:
        """Log once if there is no feed for `NO_FEED_SECONDS` after the first pass."""
        if self._no_feed_since is None:
            self._no_feed_since = now.monotonic
        is_missing = not has_feed and now.monotonic - self._no_feed_since >= NO_FEED_SECONDS
        if is_missing:
            statement = NO_FEED.describe(directory=self._directory or "")
            _log.info("%s", statement.sentence, extra={"remedy": statement.remedy})
        if is_missing or has_feed:
            self._no_feed_since = inf

    def _log_refused(self, refused_files: Sequence[tuple[str, str]]) -> None:
        """Count each file once while it is refused for the same reason, and log each new reason."""
        new_reasons = Counter(reason for _, reason in set(refused_files) - self._logged_refusals)
        self._refusal_counts.update(new_reasons)
        # A reason is logged once, until a pass in which no file is refused for this reason.
        for reason in new_reasons.keys() - {reason for _, reason in self._logged_refusals}:
            names = sorted(name for name, file_reason in refused_files if file_reason == reason)
            suffix = f" and {len(names) - 1} more" if len(names) > 1 else ""
            statement = REFUSED_FILES[reason].describe(name=f"feed file {names[0]!r}{suffix}")
            _log.warning(
                "refused: %s", statement.sentence, extra={"reason": reason, "remedy": statement.remedy}
            )
        self._logged_refusals = frozenset(refused_files)

    # Count and save -------------------------------------------------------------------------------------

    def _count(self, feed_pass: FeedPass) -> ExitEvidence:
        """Count the new snapshots of all processes. Return the exit evidence of the pass."""
        processes = list(self._ranks.processes())
        self._owners.count(processes)
        return self.endings.begin_pass(processes, feed_pass.moment)

    def _save(self, feed_pass: FeedPass, evidence: ExitEvidence) -> None:
        """Decide the outcomes of exited processes, save the ranks, then count and save the sessions."""
        self._ranks.decide_outcomes(self.endings)
        self._ranks.save()
        self.sessions.update(
            self._ranks, feed_pass.entries, self.endings, evidence, feed_pass.rules, feed_pass.moment
        )

    # Publish --------------------------------------------------------------------------------------------

    def _visible_slots(self, feed_pass: FeedPass) -> list[VisibleSlot]:
        """Return the slots that this pass publishes, sorted by run, rank, role and number."""
        ranks = sorted(self._ranks, key=lambda rank: (rank.key.run, rank.key.rank or 0, rank.key.role))
        slots = [
            visible_slot(rank.key, slot, feed_pass.rules, feed_pass.moment, is_saved=rank.is_saved)
            for rank in ranks
            for _, slot in sorted(rank.slots.items())
        ]
        return _limit_exited_runs([slot for slot in slots if slot is not None], self._max_exited_runs)

    def _publish(self, slots: Sequence[VisibleSlot], feed_pass: FeedPass) -> Collected:
        """Return the families of the pass, and update the phases for the attribution of energy."""
        gpus_by_pid = GpusByPid(self.gpus)
        pids = {process_id: entry.pid for process_id, entry in feed_pass.entries.items() if entry.is_alive}
        self.work = self._work_snapshot(slots, pids, gpus_by_pid)
        collected = Collected()
        collected += self._stats.build(slots, feed_pass.rules, feed_pass.moment)
        feed.add_processes(collected, slots, lambda process_id: gpus_by_pid.find_gpu(pids.get(process_id)))
        add_runs(collected, slots, pids, gpus_by_pid, self.sessions.options.peak_flops)
        runs = {slot.key.run for slot in slots}
        self.sessions.add_families(collected, runs)
        self._states.add_families(
            collected,
            self._ranks.processes(),
            runs,
            self.endings,
            feed_pass.rules,
            feed_pass.moment,
            is_owner=feed_pass.is_owner,
        )
        run_state.add_rank_exits(collected, slots)
        self._add_conflicts(collected, feed_pass.moment)
        self._add_own_state(collected)
        return collected

    def _add_own_state(self, collected: Collected) -> None:
        """Add the families about the feed directory and the state directory, and log new problems once."""
        for reason, count in self._refusal_counts.items():
            collected.add(feed.REFUSED, count, reason)
        collected.add(feed.OWNER, int(self._ranks.is_owner))
        collected.add(feed.STATE_ERRORS, self._state.errors, "failed")
        collected.add(feed.STATE_ERRORS, self._state.damaged_files, "damaged")
        collected.add(feed.SUPPRESSED, self._ranks.suppressed_count)
        for entry in filter(None, (*self._feed.foreign_entries, self._state.foreign_directory)):
            collected.add(feed.FOREIGN, 1, Path(entry.path).name)
            if entry.path not in self._logged_foreign_paths:
                self._logged_foreign_paths.add(entry.path)
                statement = FOREIGN_ENTRY.describe(path=entry.path, uid=entry.uid, used=entry.replacement)
                _log.warning("%s", statement)
        if self._feed.ownership.problem:
            collected.unsupported.append(
                f"{self._feed.ownership.problem}: this sidecar cannot own the feed directory and does not remove files of exited"
                " processes; remove that lock file if this sidecar should own the directory"
            )
        problems = self._state.take_problems()
        if problems:
            suffix = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            collected.problems.append(("state", f"totals are suppressed: {problems[0]}{suffix}"))

    def _work_snapshot(
        self, slots: Sequence[VisibleSlot], pids: Mapping[str, int | None], gpus_by_pid: GpusByPid
    ) -> WorkSnapshot:
        """Return the phases of running ranks, and of ranks that exited within `RETENTION_SECONDS`, for the attribution of energy."""
        intervals_by_process = {work.process_id: work.intervals for work in self.work.processes}
        processes = []
        now = self._monotonic()
        # Exited processes are included, because the energy of a crashed attempt may be divided after the next attempt has started.
        for process in (totals for slot in slots for totals in slot.worker_slot.processes):
            identity, training, is_alive = process.identity, process.training, process.is_alive
            if training is None or identity.rank is None:
                continue
            intervals_before = intervals_by_process.get(identity.id, ())
            if not is_alive and not intervals_before and training.history_until < now - RETENTION_SECONDS:
                continue
            intervals = extend_intervals(intervals_before, training)
            if not is_alive and (not intervals or intervals[-1].end < now - RETENTION_SECONDS):
                continue
            _, device = gpus_by_pid.find_gpu(pids.get(identity.id)) or ("", "")
            processes.append(
                ProcessWork(
                    identity.run, identity.rank, identity.id, training.phases, device, intervals, is_alive
                )
            )
        processes.sort(key=lambda work: (work.run, work.rank))
        return WorkSnapshot(tuple(processes), self.sessions.work_accounts())

    def _add_conflicts(self, collected: Collected, now: Moment) -> None:
        """Add the number of extra running processes that train as the same rank of a run with a configured name."""
        for rank in self._ranks:
            if rank.key.rank is None or sum(process.is_alive for _, process in rank.processes()) < 2:
                continue
            conflicting_processes = [
                process
                for _, process in rank.processes()
                if process.is_alive
                and process.trains
                and process.identity.run_given
                and now.monotonic - process.first_seen_monotonic >= CONFLICT_SECONDS
            ]
            if len(conflicting_processes) > 1:
                collected.add(
                    feed.CONFLICTS, len(conflicting_processes) - 1, rank.key.run, str(rank.key.rank)
                )

    # Clean up -------------------------------------------------------------------------------------------

    def _clean_up(self, slots: Sequence[VisibleSlot], feed_pass: FeedPass) -> None:
        """Remove the files of exited processes whose totals are saved, and release exited ranks."""
        if feed_pass.is_owner:
            for process_id, entry in feed_pass.entries.items():
                rank = self._ranks[entry.snapshot.process]
                if (
                    not entry.is_alive
                    and rank.is_loaded
                    and rank.is_saved
                    and not self.sessions.holds(process_id)
                ):
                    self._remove(process_id)
            self._undeletable_ids &= feed_pass.entries.keys()
        self._ranks.release_exited(
            {slot.worker_slot for slot in slots}, feed_pass.present_ids, feed_pass.moment
        )

    def _remove(self, process_id: str) -> None:
        """Remove the files of a process. A failure is logged once, and the next pass tries again."""
        try:
            self._feed.remove(process_id)
        except (FeedError, OSError) as error:
            if process_id not in self._undeletable_ids:
                _log.warning("cannot remove the files of the exited process %s: %s", process_id, error)
            self._undeletable_ids.add(process_id)

    def _update_attributes(self, slots: Sequence[VisibleSlot], feed_pass: FeedPass) -> None:
        """Update the attributes that other collectors read: `processes`, `overdue_runs` and `is_loaded`."""
        processes_with_feed = [
            _job_process(entry.snapshot, entry.pid, is_alive=entry.is_alive)
            for entry in feed_pass.entries.values()
        ]
        exited_processes = [
            JobProcess(process.identity, is_alive=False)
            if process.snapshot is None
            else _job_process(process.snapshot, None, is_alive=False)
            for slot in slots
            for process in slot.worker_slot.processes
            if process.identity.id not in feed_pass.entries
        ]
        self.processes = (*processes_with_feed, *exited_processes)
        self.overdue_runs = tuple(self._overdue_runs(slots, feed_pass))
        self.is_loaded = True

    def _overdue_runs(self, slots: Sequence[VisibleSlot], feed_pass: FeedPass) -> Iterator[InspectedRun]:
        """Yield the hung and stalled runs with their running ranks and their step."""
        for run, state in self._states.overdue().items():
            running_processes = [
                slot.process for slot in slots if slot.key.run == run and slot.process.is_alive
            ]
            ranks = [
                InspectedRank(
                    process.identity.rank, process.identity.id, feed_pass.entries[process.identity.id].pid
                )
                for process in running_processes
                if process.identity.rank is not None and process.identity.id in feed_pass.entries
            ]
            steps = [process.training.step for process in running_processes if process.training is not None]
            step = next((candidate for candidate in steps if candidate is not None), None)
            state_name: Literal["hung", "stalled"] = "hung" if state.state == "hung" else "stalled"
            yield InspectedRun(
                run=run,
                state=state_name,
                since_timestamp=state.since_timestamp,
                step=step,
                ranks=tuple(ranks),
            )


def _limit_exited_runs(slots: Sequence[VisibleSlot], max_exited_runs: int) -> list[VisibleSlot]:
    """Return the slots of the runs with a running process, and of the *max_exited_runs* runs that exited last."""
    running_runs = {slot.key.run for slot in slots if slot.process.is_alive}
    exit_by_run: dict[str, float] = {}
    for slot in slots:
        if slot.key.run not in running_runs:
            exited_at = slot.process.exited_monotonic
            exit_by_run[slot.key.run] = max(exited_at, exit_by_run.get(slot.key.run, exited_at))
    latest_runs = sorted(exit_by_run, key=lambda run: exit_by_run[run])[-max_exited_runs:]
    shown_runs = running_runs.union(latest_runs)
    return [slot for slot in slots if slot.key.run in shown_runs]


def _job_process(snapshot: Snapshot, pid: int | None, *, is_alive: bool) -> JobProcess:
    """Return the process of a snapshot.

    If an exited process wrote no final snapshot, the exit is estimated half a flush interval after the last snapshot.
    """
    exited_at = (
        snapshot.written if snapshot.recording.final else snapshot.written + snapshot.flush_seconds / 2
    )
    gpus = snapshot.recording.gpus
    return JobProcess(snapshot.process, is_alive, pid, gpus, None if is_alive else exited_at)
