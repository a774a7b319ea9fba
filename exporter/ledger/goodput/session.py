"""Goodput of a session: consecutive attempts at a task, counted from the snapshots of a node's lowest rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from exporter.feed.snapshot import Snapshot
from exporter.ledger.goodput.accounting import Goodput
from exporter.ledger.goodput.attempt import Attempt
from exporter.ledger.goodput.endings import Endings, ExitedProcess, ExitEvidence, exited_peers
from exporter.ledger.goodput.options import GoodputOptions
from exporter.ledger.goodput.outcome import EvidenceSource, Outcome
from exporter.ledger.state.files import StateKey
from exporter.ledger.totals import GapRules, Moment, ProcessTotals

FINISHED_SECONDS = 5.0
"""Delay after the reported end of the application until the work of a process that is still running counts as productive."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SessionPass:
    """Input of all sessions in a pass."""

    moment: Moment
    rules: GapRules
    options: GoodputOptions
    endings: Endings
    evidence: ExitEvidence
    processes: Sequence[ProcessTotals]  # of all ranks
    leading_processes: Mapping[str, ProcessTotals]  # of the lowest rank of each run on this node, by id
    pids: Mapping[str, int | None]  # in the sidecar's pid namespace, by id


@dataclass(slots=True, eq=False)
class Session:
    """Attempts with the same session tag, or attempts of the same run without a tag."""

    key: StateKey  # ("goodput", tag or run, "session" or "run", rank, sidecar); rank and sidecar are "" for rank 0
    goodput: Goodput = field(default_factory=Goodput)
    is_loaded: bool = False  # True after the state was loaded
    is_saved: bool = False  # True if the last save succeeded; otherwise the totals are not shown
    saved_hash: int = 0  # hash of the last saved content
    is_released: bool = False  # True if other sidecars may claim the state
    is_locked: bool = False  # True if a different sidecar holds the state
    exited_monotonic: float | None = None  # exit of the latest process
    # the kernel's count of OOM kills at the latest snapshot and at the snapshot before
    _oom_kills: float | None = None
    _oom_kills_before: float | None = None
    _counted_snapshot: Snapshot | None = None
    _finished_monotonic: float | None = None  # first observation of the end of the application
    _logged_conflicts: set[str] = field(default_factory=set)  # ids of processes with a logged conflict

    @property
    def rank(self) -> int:
        """Rank of the counted processes: 0, or the lowest rank of a node without rank 0."""
        _, _, _, rank, _ = self.key
        return int(rank or 0)

    @property
    def name(self) -> str:
        """Name for log lines."""
        _, name, kind, _, _ = self.key
        return f"{kind} {name!r}"

    @property
    def _has_tag(self) -> bool:
        """True for a session with a tag, False for a session of a run."""
        _, _, kind, _, _ = self.key
        return kind == "session"

    def count_snapshot(self, process: ProcessTotals, session_pass: SessionPass) -> None:
        """Count the latest snapshot of a process, which is the latest attempt or starts a new attempt.

        Does nothing for a process that is neither, see `_may_start`.
        """
        goodput, snapshot, now = self.goodput, process.snapshot, session_pass.moment.monotonic
        assert snapshot is not None  # noqa: S101 - the caller passes only processes with a snapshot
        attempt = goodput.attempt
        if attempt is None or attempt.process_id != process.identity.id:
            if not self._may_start(process, session_pass):
                return
            start = session_pass.evidence.find_start(
                session_pass.pids.get(process.identity.id), process.identity.started
            )
            if attempt is not None and attempt.ended_at is None:
                self._end_superseded(attempt, process, session_pass, latest_end=start)
            attempt = self._start(process, start, session_pass)
        if self._counted_snapshot is not snapshot:
            self._counted_snapshot = snapshot
            is_hanging = process.is_alive and session_pass.rules.hangs(process, session_pass.moment)
            goodput.update(
                process.training,
                written_at=snapshot.written,
                is_final=process.is_final,
                is_hanging=is_hanging,
            )
            self._oom_kills_before = self._oom_kills
            if process.is_alive:  # a kill of this process is not yet part of the count
                self._oom_kills = session_pass.evidence.oom_kills()
        if process.is_alive:
            self.exited_monotonic = None
            if attempt.ended_at is not None:
                goodput.reopen()
            self._finished_monotonic = (self._finished_monotonic or now) if attempt.reading.finished else None
            if self._finished_monotonic is not None and now - self._finished_monotonic >= FINISHED_SECONDS:
                goodput.complete()

    def count_end(self, session_pass: SessionPass, *, linger_seconds: float) -> None:
        """Count the end of the latest process once its outcome is decided, and after that the downtime."""
        attempt, moment = self.goodput.attempt, session_pass.moment
        if attempt is None:
            return
        process = session_pass.leading_processes.get(attempt.process_id)
        if self.exited_monotonic is None:
            if process is not None and process.is_alive:
                return
            # Not among the leading processes: in general, a process that exited before this sidecar started.
            ended_at = attempt.written_at if attempt.ended_at is None else attempt.ended_at
            seconds_since_end = max(0.0, moment.wall - ended_at)
            self.exited_monotonic = (
                moment.monotonic - seconds_since_end if process is None else process.exited_monotonic
            )
        if attempt.ended_at is None:
            outcome = self._outcome(attempt, process, session_pass)
            if outcome is None:
                return
            self._end(attempt, outcome, session_pass, is_observed=process is not None)
        seconds_since_exit = moment.monotonic - self.exited_monotonic
        if seconds_since_exit <= linger_seconds and session_pass.endings.expects_restart(attempt.run):
            self.goodput.count_downtime(seconds_since_exit)

    def _may_start(self, process: ProcessTotals, session_pass: SessionPass) -> bool:
        """Return True if a process is a new attempt of this session, and the latest process is not running.

        A second running process is logged once and not counted.
        """
        attempt, identity = self.goodput.attempt, process.identity
        if attempt is None:
            return True
        # An exited process may be older than the attempt; a running process is later, even after a clock step.
        if self.goodput.knows(identity.id) or (
            not process.is_alive and identity.started < attempt.recorded_at
        ):
            return False
        latest_process = session_pass.leading_processes.get(attempt.process_id)
        if latest_process is None or not latest_process.is_alive:
            return True
        if identity.id not in self._logged_conflicts:
            self._logged_conflicts.add(identity.id)
            _log.warning(
                "%s has two running processes of rank %d (runs %r and %r), and only the first is counted;"
                " set different session tags or run names",
                self.name,
                self.rank,
                attempt.run,
                identity.run,
            )
        return False

    def _start(self, process: ProcessTotals, start: float, session_pass: SessionPass) -> Attempt:
        """Start an attempt of a process that started at the Unix time *start*, and return the attempt."""
        identity = process.identity
        attempt = Attempt(
            process_id=identity.id,
            run=identity.run,
            number=1,
            started_at=start,
            recorded_at=identity.started,
            pid=identity.pid,
            launch=identity.launch,
            machine=session_pass.evidence.machine,
            has_tag=self._has_tag,
            is_validation_productive=session_pass.options.validation == "productive",
        )
        self.goodput.start(attempt, new_after_seconds=session_pass.options.new_task_after)
        self.exited_monotonic = self._finished_monotonic = self._oom_kills = self._oom_kills_before = None
        return attempt

    def _end_superseded(
        self, attempt: Attempt, successor: ProcessTotals, session_pass: SessionPass, *, latest_end: float
    ) -> None:
        """End the latest attempt, because a new process of the rank has started. *latest_end* is the start of the new process."""
        process = session_pass.leading_processes.get(attempt.process_id)
        outcome = self._outcome(attempt, process, session_pass, successor=successor)
        if outcome is None:  # the exit was not observed
            outcome = Outcome(EvidenceSource.INFERRED, attempt.is_final, attempt.written_at)
        self._end(attempt, outcome, session_pass, is_observed=process is not None, latest_end=latest_end)

    def _outcome(
        self,
        attempt: Attempt,
        process: ProcessTotals | None,
        session_pass: SessionPass,
        *,
        successor: ProcessTotals | None = None,
    ) -> Outcome | None:
        """Return the outcome of an attempt, or None if undecided. Without a process, the saved attempt provides the facts."""
        if process is not None:
            return session_pass.endings.decide_outcome(process, successor=successor)
        return session_pass.evidence.outcome(
            ExitedProcess(
                pid=attempt.pid,
                run=attempt.run,
                launch=attempt.launch,
                recorded_at=attempt.recorded_at,
                exited_at=attempt.written_at,
                seconds_since_exit=max(0.0, session_pass.moment.wall - attempt.written_at),
                is_final=attempt.is_final,
                is_finished=attempt.reading.finished,
                failure=attempt.reading.failure,
                is_superseded=successor is not None,
            )
        )

    def _end(
        self,
        attempt: Attempt,
        outcome: Outcome,
        session_pass: SessionPass,
        *,
        is_observed: bool,
        latest_end: float = inf,
    ) -> None:
        """Count the end of an attempt, and log an attempt that ended early.

        *is_observed* is True if this sidecar has a record of the process. *latest_end* is the start of the next process, or infinity
        if there is none.
        """
        ended_at = attempt.written_at
        if is_observed and not attempt.is_final:
            ended_at = max(
                ended_at,
                min(session_pass.leading_processes[attempt.process_id].exited_at or ended_at, latest_end),
            )
        if outcome.source is EvidenceSource.PROCESS:
            ended_at = max(attempt.written_at, min(outcome.exited_at, latest_end))
        peers = exited_peers(attempt, ended_at, session_pass.processes)
        reason = session_pass.evidence.reason(
            attempt,
            outcome,
            session_pass.processes,
            self._oom_kills_before,
            lacks_final_snapshot=(is_observed and not attempt.is_final)
            or not all(peer.is_final for peer in peers),
        )
        self.goodput.end(ended_at, reason, is_completed=outcome.is_completed, hang=session_pass.rules.hang)
        if not outcome.is_completed:
            extra = {"reason": attempt.reason}
            _log.info(
                "attempt %d of %s ended early: %s", attempt.number, self.name, attempt.reason, extra=extra
            )
