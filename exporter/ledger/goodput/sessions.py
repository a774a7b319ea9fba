"""Goodput sessions of all runs, and their state files.

A session consists of the processes of rank 0 with the same session tag. Without a tag, it consists of the processes of rank 0 of a run.

A process is bound to a session when it reports a tag or the end of the application, when it starts to train, when it exits, and after
30 s at the latest. Reports are cumulative, so the time before the binding is counted too. Two kinds of processes have no session: a
process that exits normally without training, and an evaluation without a tag that follows the training of its launch.

On a node without rank 0, the lowest rank has the session. It publishes no family, but its work is used to divide the energy of the node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial

from exporter.errors import StateError
from exporter.families import Collected
from exporter.feed.reader import FeedEntry
from exporter.ledger.energy.work import WorkAccount
from exporter.ledger.goodput.accounting import Goodput
from exporter.ledger.goodput.endings import Endings, ExitEvidence, follows
from exporter.ledger.goodput.families import add_goodput
from exporter.ledger.goodput.options import GoodputOptions
from exporter.ledger.goodput.session import Session, SessionPass
from exporter.ledger.ranks import RETENTION_SECONDS, Ranks
from exporter.ledger.state.codec import from_line, to_line
from exporter.ledger.state.files import StateKey, file_name
from exporter.ledger.state.store import StateStore
from exporter.ledger.totals import GapRules, Moment, ProcessTotals

TAG_SECONDS = 30.0
"""Time for a process that does not train to report a session tag."""
LOCKED_RETENTION_SECONDS = 60.0
"""Maximum time for which the feed file of an exited process is kept because a different sidecar holds the session."""


class Sessions:
    """All sessions of this sidecar.

    If the state directory is shared with other sidecars (*is_shared*), a session is released when its last attempt ends.

    Attributes:
        options: Options, which any thread may replace.
    """

    def __init__(self, state: StateStore, *, is_shared: bool = False) -> None:
        self.options = GoodputOptions()
        self._state = state
        self._linger_seconds = 0.0
        self._is_shared = is_shared
        self._sessions: dict[StateKey, Session] = {}
        self._key_by_process: dict[str, StateKey] = {}
        self._first_seen_monotonic: dict[str, float] = {}
        self._held_ids: frozenset[str] = frozenset()
        self._shown_runs: Collection[str] | None = None  # in the last pass; None before the first
        self._is_resumed = False

    def holds(self, process_id: str) -> bool:
        """Return True if the feed file of a process must not be removed yet."""
        return process_id in self._held_ids

    def work_accounts(self) -> Mapping[str, WorkAccount]:
        """Return the outcome of the work by run, for the attribution of energy."""
        accounts = {}
        for session in self._latest_sessions():
            goodput = session.goodput
            accounts[goodput.latest.run] = WorkAccount(
                session=file_name(session.key),
                productive_seconds=goodput.productive_seconds - goodput.validation_seconds,
                lost_seconds=goodput.badput["lost_progress"],
                hung_seconds=goodput.badput["hang"],
                uncommitted_seconds=goodput.uncommitted_seconds,
                is_validation_productive=goodput.latest.is_validation_productive,
            )
        return accounts

    def update(
        self,
        ranks: Ranks,
        entries: Mapping[str, FeedEntry],
        endings: Endings,
        evidence: ExitEvidence,
        rules: GapRules,
        now: Moment,
    ) -> None:
        """Count the snapshots of the lowest rank of each run, and save the sessions."""
        self._linger_seconds = rules.linger_seconds
        if not ranks.is_owner:
            self._release_all()
            return
        if not self._is_resumed:
            self._resume_recent(now)
        leading_processes = {process.identity.id: process for process in _leading_processes(ranks)}
        pids = {process_id: entry.pid for process_id, entry in entries.items()}
        session_pass = SessionPass(
            moment=now,
            rules=rules,
            options=self.options,
            endings=endings,
            evidence=evidence,
            processes=list(ranks.processes()),
            leading_processes=leading_processes,
            pids=pids,
        )
        self._release_higher_ranks(leading_processes.values())
        self._bind_processes(leading_processes, endings, now)
        self._count_snapshots(session_pass)
        for session in self._sessions.values():
            if session.is_loaded and not session.is_released:
                session.count_end(session_pass, linger_seconds=rules.linger_seconds)
                self._save(session)
        self._held_ids = frozenset(self._needed_ids(leading_processes, now))
        self._release_ended(now)

    def _release_higher_ranks(self, leading_processes: Iterable[ProcessTotals]) -> None:
        """Discard each session of a rank that was read before a lower rank of the same run."""
        rank_by_run = {process.identity.run: process.identity.rank or 0 for process in leading_processes}
        for key, session in list(self._sessions.items()):
            attempt = session.goodput.attempt
            if attempt is not None and session.rank > rank_by_run.get(attempt.run, session.rank):
                self._release(key)

    def _bind_processes(
        self, leading_processes: Mapping[str, ProcessTotals], endings: Endings, now: Moment
    ) -> None:
        """Bind the leading processes to sessions, and discard the bindings of other processes."""
        for process in leading_processes.values():
            self._bind(process, endings, now)
        self._first_seen_monotonic = {
            process_id: first_seen
            for process_id, first_seen in self._first_seen_monotonic.items()
            if process_id in leading_processes
        }
        self._key_by_process = {
            process_id: self._key_by_process[process_id]
            for process_id in leading_processes
            if process_id in self._key_by_process
        }

    def _count_snapshots(self, session_pass: SessionPass) -> None:
        """Count the snapshot of each bound process in its session, which is loaded first if necessary."""
        for process_id, key in self._key_by_process.items():
            session = self._sessions.get(key)
            if session is None or (session.is_released and not session.goodput.knows(process_id)):
                session = self._sessions[key] = Session(key)
            if not session.is_loaded:
                self._open(session)
            if session.is_loaded and not session.is_released:
                session.count_snapshot(session_pass.leading_processes[process_id], session_pass)

    def _bind(self, process: ProcessTotals, endings: Endings, now: Moment) -> None:
        """Bind a process to a session, once the session is known. Does nothing for a process that is not an attempt."""
        identity, reading = process.identity, process.training
        if identity.id in self._key_by_process:
            return
        if reading is None:
            # A process that exited without a training report is bound to the session of the run, if there is one.
            if not process.is_alive:
                for key, session in self._sessions.items():
                    attempt = session.goodput.attempt
                    if attempt is not None and attempt.run == identity.run and session.goodput.trains:
                        self._key_by_process[identity.id] = key
            return
        if not process.is_alive and not reading.loop and not reading.failure and process.is_final:
            return  # the process exited normally without training: no attempt
        has_waited = (
            now.monotonic - self._first_seen_monotonic.setdefault(identity.id, now.monotonic) >= TAG_SECONDS
        )
        tag = dict(reading.facts).get("session_tag", "")
        if tag or reading.loop or reading.finished or has_waited or not process.is_alive:
            name, kind = (tag, "session") if tag else (identity.run, "run")
            if not tag and self._is_evaluation(process, endings):
                return
            # The session of a rank other than 0 belongs to this node.
            rank_and_sidecar = (str(identity.rank), self._state.sidecar) if identity.rank else ("", "")
            self._key_by_process[identity.id] = ("goodput", name, kind, *rank_and_sidecar)

    def _is_evaluation(self, process: ProcessTotals, endings: Endings) -> bool:
        """Return True if a process does not train, and follows a training of the same launch that may have completed."""
        session = self._sessions.get(("goodput", process.identity.run, "run", "", ""))
        attempt = None if session is None else session.goodput.attempt
        if attempt is None or not attempt.reading.loop:
            return False
        may_complete = attempt.ended_at is None and not endings.expects_restart(attempt.run)
        return (attempt.has_completed or may_complete) and follows(
            process, attempt.launch, attempt.recorded_at
        )

    def _release(self, key: StateKey) -> None:
        """Release a session for other sidecars, and discard it from memory."""
        self._state.release(key)
        del self._sessions[key]

    def _release_all(self) -> None:
        """Release all sessions, because a different sidecar owns the feed directory."""
        for key in list(self._sessions):
            self._release(key)
        self._key_by_process.clear()
        self._held_ids = frozenset()
        self._is_resumed = False

    def _resume_recent(self, now: Moment) -> None:
        """Load the sessions that this sidecar saved within the retention time, including sessions without feed files."""
        try:
            keys = self._state.recent("goodput", self._linger_seconds)
        except StateError as error:
            self._state.report(str(error))
            return
        self._is_resumed = True
        for key in keys:
            session = self._sessions[key] = Session(key)
            self._open(session)
            attempt = session.goodput.attempt
            ended_at = now.wall if attempt is None or attempt.ended_at is None else attempt.ended_at
            if attempt is None or now.wall - ended_at > self._linger_seconds:
                self._release(key)

    def _open(self, session: Session) -> None:
        """Claim and load the state of a session. After an error or if a different sidecar holds it, the session stays unloaded."""
        try:
            session.is_locked = not self._state.claim(session.key)
            if session.is_locked:
                self._state.report(
                    f"a different sidecar holds the goodput of {session.name} in {self._state.directory}"
                )
            else:
                decode = partial(from_line, Goodput)
                session.goodput = self._state.load(session.key, decode) or Goodput()
                session.is_loaded = True
        except StateError as error:
            self._state.report(str(error))

    def _save(self, session: Session) -> None:
        """Save a session that has changed since its last save. After an error, the session is not published."""
        content = to_line(session.goodput)
        try:
            if not session.is_saved or session.saved_hash != hash(content):
                self._state.save(session.key, content)
            session.is_saved, session.saved_hash = True, hash(content)
        except StateError as error:
            session.is_saved = False
            self._state.report(str(error))

    def _needed_ids(self, leading_processes: Mapping[str, ProcessTotals], now: Moment) -> Iterator[str]:
        """Yield the ids of processes whose feed files must not be removed yet."""
        for process_id, key in self._key_by_process.items():
            session, attempt = self._sessions[key], self._sessions[key].goodput.attempt
            seconds_since_exit = now.monotonic - leading_processes[process_id].exited_monotonic
            if session.is_locked and seconds_since_exit > LOCKED_RETENTION_SECONDS:
                continue
            is_open = attempt is not None and attempt.process_id == process_id and attempt.ended_at is None
            if is_open or not session.is_saved:
                yield process_id

    def _release_ended(self, now: Moment) -> None:
        """Release each session after its last attempt: at once in a shared state directory, otherwise after the retention time.

        In both cases the session stays in memory for the retention time. A session that could not be loaded is discarded once no
        process is bound to it.
        """
        for key, session in list(self._sessions.items()):
            attempt = session.goodput.attempt
            is_over = session.is_saved and attempt is not None and attempt.ended_at is not None
            if is_over and self._is_shared and not session.is_released:
                self._state.release(key)
                session.is_released = True
            is_lingering = session.exited_monotonic is None or (
                now.monotonic - session.exited_monotonic <= self._retention_seconds(session)
            )
            if (is_over and not is_lingering) or (
                not session.is_loaded and key not in self._key_by_process.values()
            ):
                self._release(key)

    def _retention_seconds(self, session: Session) -> float:
        """Return the time after the exit for which a session stays in memory: shorter if its run is no longer shown."""
        attempt = session.goodput.attempt
        if self._shown_runs is None or attempt is None or attempt.run in self._shown_runs:
            return self._linger_seconds
        return min(self._linger_seconds, RETENTION_SECONDS)

    def _latest_sessions(self) -> Iterator[Session]:
        """Yield the latest session of each run that trains, if the session is saved."""
        started_sessions = [
            session
            for session in self._sessions.values()
            if session.goodput.attempt and session.goodput.trains
        ]
        # A running session is the latest session, even after a clock step.
        started_sessions.sort(
            key=lambda session: (session.goodput.latest.ended_at is None, session.goodput.latest.recorded_at)
        )
        latest = {session.goodput.latest.run: session for session in started_sessions}
        return (session for session in latest.values() if session.is_saved)

    def add_families(self, collected: Collected, shown_runs: Collection[str]) -> None:
        """Add the families of the latest session of each shown run, if the session belongs to rank 0 and is saved."""
        self._shown_runs = shown_runs
        for session in self._latest_sessions():
            if session.rank == 0 and session.goodput.latest.run in shown_runs:
                add_goodput(collected, session.goodput)


def _leading_processes(ranks: Ranks) -> list[ProcessTotals]:
    """Return the processes of the lowest rank of each run on this node: exited before running processes, oldest first."""
    numbered_ranks = [rank for rank in ranks if rank.key.rank is not None and rank.slots]
    numbered_ranks.sort(key=lambda rank: -(rank.key.rank or 0))
    lowest_ranks = {rank.key.run: rank for rank in numbered_ranks}
    processes = [
        process
        for rank in lowest_ranks.values()
        for slot, process in rank.processes()
        if slot.number == 0 and process.snapshot is not None
    ]
    # A running process is later than an exited process, even after a clock step.
    return sorted(
        processes, key=lambda process: (process.is_alive, process.identity.started, process.identity.id)
    )
