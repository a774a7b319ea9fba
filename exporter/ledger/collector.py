"""JobCollector: from the feed directory to families, by way of the ledger; `collect` is one pass, on one thread at a time.

A rank whose state could not be saved has its gauges, but no totals: a gap is honest, a total that a restart would take
back is not. The state knows the processes that it has counted by their ids until their files are gone, so that a sidecar
killed at any step counts nothing twice. One that does not own the feed directory looks on: it publishes what it sees, from
the owner's state files as they were when it first saw a rank, and takes over when the owner ends.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path

from exporter.collectors.job import JobProcess
from exporter.errors import CollectError, FeedError
from exporter.families import Collected
from exporter.feed.reader import FeedEntry, FeedReader
from exporter.ledger.admission import Admission, StatMetrics
from exporter.ledger.energy.attribution import ProcessWork, WorkUse, gone_on
from exporter.ledger.families import feed, run_info
from exporter.ledger.families.run_info import Gpus, RankDevices, tell_runs
from exporter.ledger.goodput import families as goodput_families
from exporter.ledger.goodput import run_state
from exporter.ledger.goodput.run_state import RunStates
from exporter.ledger.goodput.sessions import Sessions
from exporter.ledger.ranks import Ranks
from exporter.ledger.store import StateStore
from exporter.ledger.totals import GapRules, Moment, VisibleSlot, visible

_log = logging.getLogger(__name__)

NO_FEED_SECONDS = 60.0
"""How long no feed is nothing to talk about."""
CONFLICT_SECONDS = 15.0
"""Two processes of one rank that live together for so long are no restart."""


class JobCollector:
    """Publishes what the processes of the job have recorded.

    Attributes:
        loaded: True once a pass has loaded the state and seen the feed, or could not read it: the page need not wait.
        processes: Who records, and who did a short while ago; None while the feed cannot be read.
        work: What the processes do, as of the last pass.
        gpus: What is known of GPUs; set by the composition root.
    """

    name = "feed"
    reasons = ("directory", "state")
    specs = feed.SPECS + goodput_families.SPECS + run_state.SPECS + run_info.SPECS
    """Every family with a fixed name; those of Stats are named by the job."""

    def __init__(
        self,
        reader: FeedReader,
        state: StateStore,
        *,
        stale_after_seconds: float = 10.0,
        linger_seconds: float = 900.0,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        directory: Path | None = None,
        shared: bool = False,
    ) -> None:
        self.loaded = False
        self.processes: tuple[JobProcess, ...] | None = None
        self.gpus = Gpus()
        self.work = WorkUse()
        self.sessions = Sessions(state, shared=shared)
        self._feed = reader
        self._directory = directory
        self._state = state
        self._stale_after_seconds = stale_after_seconds
        self._linger_seconds = linger_seconds
        self._clock = clock
        self._monotonic = monotonic
        self._admission = Admission()
        self._stats = StatMetrics(self._admission)
        self._ranks = Ranks(state)
        self._states = RunStates()
        self._refused: frozenset[tuple[str, str]] = frozenset()
        self._refusals: Counter[str] = Counter(dict.fromkeys(feed.REFUSAL_REASONS, 0))
        self._kept_files: set[str] = set()
        self._quiet_since: float | None = None

    def collect(self) -> Collected:
        """Make one pass; raises a CollectError where the feed directory cannot be read."""
        now = Moment(self._clock(), self._monotonic())
        try:
            owner = self._feed.acquire_ownership()
            scan = self._feed.scan()
        except (FeedError, OSError) as error:
            self.loaded = True
            self.processes = None
            raise CollectError(str(error), reason="directory") from error
        options = self.sessions.options
        rules = GapRules(
            self._stale_after_seconds, self._linger_seconds, options.hang_after, options.hang_steps
        )
        # A listing shows twice what was replaced meanwhile: the later one is the last.
        in_order = sorted(scan.entries, key=lambda entry: entry.snapshot.sequence)
        entries = {entry.snapshot.process.id: entry for entry in in_order}
        unreadable = {name.partition(".")[0] for name, _ in scan.refused}
        self._look_for_job(now, found=bool(entries))
        self._ranks.observe(owner, entries, unreadable, rules, now)
        # Living processes that were taken for dead so long ago that they cannot be told from a copy.
        taken = [
            (f"{process_id}.feed", "taken")
            for process_id, entry in entries.items()
            if entry.alive and process_id in self._ranks[entry.snapshot.process].taken
        ]
        self._tell_refused([*scan.refused, *taken])
        self._admission.count(list(self._ranks.processes()))
        self._ranks.save()
        self.sessions.update(self._ranks, entries, rules.linger_seconds, now)
        ranks = sorted(self._ranks, key=lambda rank: (rank.key.run, rank.key.rank or 0, rank.key.role))
        seen = [
            visible(rank.key, slot, rules, now, counted=rank.safe)
            for rank in ranks
            for _, slot in sorted(rank.slots.items())
        ]
        slots = [slot for slot in seen if slot is not None]
        collected = self._families(slots, entries, rules, now)
        if owner:
            self._remove_dead(entries)
        self._ranks.forget({each.slot for each in slots}, {*entries, *unreadable}, now)
        # Every process that lives, and of each slot that is shown the last ones that did.
        living = [JobProcess(it.snapshot.process, it.alive, it.pid) for it in entries.values()]
        dead = [
            each.identity for seen in slots for each in seen.slot.processes if each.identity.id not in entries
        ]
        self.processes = (*living, *[JobProcess(identity, alive=False) for identity in dead])
        self.loaded = True
        problems, self._state.problems = self._state.problems, []
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            collected.problems.append(("state", f"totals are withheld: {problems[0]}{more}"))
        return collected

    def _look_for_job(self, now: Moment, *, found: bool) -> None:
        """Ask once, after a while without any feed, whether the job has what it needs."""
        if self._quiet_since is None:
            self._quiet_since = now.monotonic
        quiet = not found and now.monotonic - self._quiet_since >= NO_FEED_SECONDS
        if quiet:
            _log.info(
                "no job has written to the feed directory%s yet: does the job's Python have training-exporter"
                " installed, does the job record anything, and does it have the same EXPORTER_FEED_DIR (or user)"
                " as this sidecar? `training-exporter check` looks at each",
                f" {self._directory}" if self._directory else "",
            )
        if quiet or found:
            self._quiet_since = inf

    def _tell_refused(self, refused: Sequence[tuple[str, str]]) -> None:
        fresh = Counter(reason for _, reason in set(refused) - self._refused)
        self._refusals.update(fresh)
        # A line when the first of a reason comes, not one for each of a hundred thousand.
        for reason in fresh.keys() - {reason for _, reason in self._refused}:
            names = sorted(name for name, why in refused if why == reason)
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            _log.warning("feed file %r%s refused: %s", names[0], more, reason)
        self._refused = frozenset(refused)

    def _families(
        self, slots: Sequence[VisibleSlot], entries: Mapping[str, FeedEntry], rules: GapRules, now: Moment
    ) -> Collected:
        devices = RankDevices(self.gpus)
        pids = {process_id: entry.pid for process_id, entry in entries.items() if entry.alive}
        self.work = self._work(slots, pids, devices)
        collected = Collected()
        collected += self._stats.fill(slots, rules, now)
        feed.tell_processes(collected, slots, lambda process_id: devices.of(pids.get(process_id)))
        tell_runs(collected, slots, pids, devices, self.sessions.options.peak_flops)
        self.sessions.tell(collected)
        runs = {each.labels[0] for each in slots}
        self._states.tell(collected, self._ranks.processes(), runs, self.sessions.witnesses, rules, now)
        self._tell_conflicts(collected, now)
        ours, state = feed.OF, self._state
        for reason, count in self._refusals.items():
            collected.add(ours["exporter_feed_refused_total"], count, reason)
        collected.add(ours["exporter_feed_owner"], int(self._ranks.owner))
        collected.add(ours["exporter_ledger_state_errors_total"], state.errors, "failed")
        collected.add(ours["exporter_ledger_state_errors_total"], state.damaged, "damaged")
        collected.add(ours["exporter_ledger_withheld_ranks"], self._ranks.withheld)
        if self._feed.not_owned:
            collected.unsupported.append(
                f"{self._feed.not_owned}: this exporter cannot own the feed directory, so it removes no files of the dead;"
                " where it should, remove that file"
            )
        return collected

    def _work(
        self, slots: Sequence[VisibleSlot], pids: Mapping[str, int | None], devices: RankDevices
    ) -> WorkUse:
        """Tell what the processes do, for whoever divides energy by it."""
        before = {each.process: each.stays for each in self.work.processes}
        processes = []
        for each in slots:
            who, training = each.process.identity, each.process.training
            if training is not None and each.process.living and who.rank is not None:
                stays = gone_on(before.get(who.id, ()), training)
                _, device = devices.of(pids.get(who.id)) or ("", "")
                processes.append(ProcessWork(who.run, who.rank, who.id, training.phases, device, stays))
        processes.sort(key=lambda each: (each.run, each.rank))
        return WorkUse(tuple(processes), self.sessions.flows())

    def _tell_conflicts(self, collected: Collected, now: Moment) -> None:
        """Count who trains as a rank that another living process of a run with a given name already is."""
        for rank in self._ranks:
            together = [
                process
                for _, process in rank.processes()
                if process.living
                and process.trains
                and process.identity.run_given
                and now.monotonic - process.first_seen >= CONFLICT_SECONDS
            ]
            if rank.key.rank is not None and len(together) > 1:
                spec = feed.OF["training_rank_conflicts"]
                collected.add(spec, len(together) - 1, rank.key.run, str(rank.key.rank))

    def _remove_dead(self, entries: Mapping[str, FeedEntry]) -> None:
        """Remove the files of processes that are dead and counted."""
        for process_id, entry in entries.items():
            rank = self._ranks[entry.snapshot.process]
            if entry.alive or not (rank.kept and rank.safe) or self.sessions.holds(process_id):
                continue
            try:
                self._feed.remove(process_id)
            except (FeedError, OSError) as error:
                if process_id not in self._kept_files:
                    _log.warning("the files of dead process %s cannot be removed: %s", process_id, error)
                self._kept_files.add(process_id)
        self._kept_files &= entries.keys()
