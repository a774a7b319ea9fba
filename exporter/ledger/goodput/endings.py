"""Outcomes of exited processes and reasons of interruptions, from exit evidence.

The first of these rules that applies decides:

1. the exit status of the process itself, from `run` or from torchrun's agent;
2. an uncaught exception, or a failure that the process reported;
3. the exit status of the launch, for the last process of a rank that exited within 60 s of the launch's end;
4. a restart by torchrun's agent, after which the process counts as not completed;
5. the last snapshot: a process that exited normally has completed, a killed process has not.

While evidence may still arrive, there is no outcome: the run is `ending`, no work is committed and no interruption is counted.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from exporter.feed.runs import End
from exporter.ledger.goodput.attempt import Attempt, MachineIdentity
from exporter.ledger.goodput.outcome import EvidenceSource, Outcome
from exporter.ledger.totals import Moment, ProcessTotals
from exporter.recording.values import END_REASONS

LAUNCH_SECONDS = 60.0
"""Maximum time from the exit of a process to the end of the launch whose status applies to the process."""
SETTLE_SECONDS = 3.0
"""Time after the exit of a process for reports of other processes, if there is no launch."""
EXITING_SECONDS = 10.0
"""Time for a process to exit after the release of the feed, because torch may still tear down a device."""
MAX_START_DELAY_SECONDS = 600.0
"""Longest time from a process's start to the recording that belongs to the training; the kernel of a notebook is older."""

_SPECIFIC = ("sdc", "gpu_memory", "gpu", "oom_kill", "storage", "host", "preemption", "user", "exit")
"""Reported reasons that are causes, the most specific first."""
_CONSEQUENCES = ("network", "nccl_timeout", "signal", "unknown")
"""Reported reasons that may be consequences of a different process's exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitedProcess:
    """Facts about an exited process."""

    pid: int
    run: str
    launch: str
    recorded_at: float  # Unix time at which recording started
    exited_at: float  # Unix time of the exit, as far as known
    seconds_ago: float  # since the end, by the monotonic clock
    is_final: bool  # the last snapshot was written at a normal exit
    is_finished: bool  # True if the job reported the end of the application
    exception: str = ""
    failure: str = ""  # reported reason, from END_REASONS
    is_doubtful: bool = False  # True if the process exited within a step, beside a killed or crashed rank
    is_superseded: bool = False  # True if a later process has the rank
    is_restarted: bool = False  # torchrun's agent started the later process
    has_agent: bool = False  # torchrun's agent may still report or restart


def started_at(
    pid: int | None,
    recorded_at: float,
    *,
    proc: Path = Path("/proc"),
    clock: Callable[[], float] = time.time,
    boottime: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
) -> float:
    """Return the start time of a process from the kernel, or the start of the recording if unknown."""
    try:
        stat = (proc / str(pid) / "stat").read_bytes()
        # The name in brackets may contain any character; the start time is field 22, in ticks.
        ticks = int(stat[stat.rindex(b")") + 1 :].split()[19])
    except (OSError, ValueError, IndexError):
        return recorded_at
    start = clock() - boottime() + ticks / os.sysconf("SC_CLK_TCK")
    return start if recorded_at - MAX_START_DELAY_SECONDS <= start <= recorded_at else recorded_at


@dataclass(frozen=True, slots=True)
class ExitEvidence:
    """Sources of evidence about exited processes; the functions may be called from the ledger's thread."""

    oom_kills: Callable[[], float | None] = lambda: None  # by the kernel since boot
    ends: Callable[[], Sequence[End]] = lambda: ()  # ends of jobs of `run` and of torchrun's workers
    launches: Callable[[], Collection[str]] = lambda: ()  # ids of running launches of `run`
    start_of: Callable[[int | None, float], float] = started_at
    machine: MachineIdentity = field(default_factory=MachineIdentity)

    def outcome(self, process: ExitedProcess) -> Outcome | None:
        """Return the outcome of a process, or None if evidence may still arrive."""
        ends = [end for end in map(_without_shell, self.ends()) if _is_near(end, process)]
        process_end = next((end for end in ends if _is_own(end, process)), None)
        if process_end is not None:
            return Outcome(
                EvidenceSource.PROCESS,
                process_end.status == 0,
                process_end.noticed_at,
                process_end.status,
                process.exception,
                process.failure,
            )
        launch_end = next((end for end in ends if _is_launch(end, process)), None)
        is_undecided = launch_end is None and not process.is_superseded
        if process.exception or process.failure:
            if is_undecided and process.seconds_ago < SETTLE_SECONDS:
                return None
            status = launch_end.status if launch_end is not None and launch_end.status else None
            return Outcome(
                EvidenceSource.EXCEPTION, False, process.exited_at, status, process.exception, process.failure
            )
        is_awaited = process.has_agent or self.lives(process.launch)
        if is_undecided and is_awaited and process.seconds_ago < LAUNCH_SECONDS:
            return None
        if launch_end is not None and not process.is_superseded:
            return Outcome(
                EvidenceSource.LAUNCH,
                launch_end.status == 0,
                min(process.exited_at, launch_end.noticed_at),
                launch_end.status,
            )
        if process.is_restarted:
            return Outcome(EvidenceSource.RESTART, False, process.exited_at)
        if not process.is_superseded and process.seconds_ago < self._patience_seconds(process):
            return None
        is_completed = process.is_finished or (process.is_final and not process.is_doubtful)
        return Outcome(EvidenceSource.INFERRED, is_completed, process.exited_at)

    def with_cached_sources(self) -> ExitEvidence:
        """Return evidence that reads each source at most once."""
        return replace(self, ends=cache(self.ends), launches=cache(self.launches))

    def lives(self, launch: str) -> bool:
        """Return True if a launch of `run` is alive."""
        return bool(launch) and launch in self.launches()

    def _patience_seconds(self, process: ExitedProcess) -> float:
        # A process that released the feed may still be running, and the exit status may still arrive.
        is_exiting = (
            process.is_finished and self.start_of(process.pid, process.recorded_at) < process.recorded_at
        )
        return EXITING_SECONDS if is_exiting else SETTLE_SECONDS

    def reason(
        self,
        attempt: Attempt,
        outcome: Outcome,
        processes: Iterable[ProcessTotals],
        oom_kills: float | None,
        *,
        is_silent: bool,
    ) -> str:
        """Return the reason, from `END_REASONS`, of an attempt that did not complete.

        *oom_kills* is the kernel's count before the exit. *is_silent* means that a process of the run exited without
        a final snapshot.
        """
        peers = exited_peers(attempt, outcome.exited_at, processes)
        reported_reasons = {attempt.reading.failure, outcome.failure, *(peer.failure for peer in peers)} - {
            ""
        }
        reported_reasons = {failure if failure in END_REASONS else "exit" for failure in reported_reasons}
        # A lost connection is a consequence if another process has exited earlier without a report.
        has_silent_exit = is_silent or any(
            not peer.failure and (peer.exited_at or outcome.exited_at) <= outcome.exited_at for peer in peers
        )
        credible_reasons = _SPECIFIC if has_silent_exit else _SPECIFIC + _CONSEQUENCES
        if reported_reasons.intersection(credible_reasons):
            return next(cause for cause in credible_reasons if cause in reported_reasons)
        if self.machine.name == attempt.machine.name and self.machine.boot != attempt.machine.boot:
            return "host"
        status = outcome.status
        if (
            outcome.source is EvidenceSource.LAUNCH
            and status is not None
            and status > 0
            and not attempt.is_final
        ):
            status = None  # a launcher's positive status is not the status of a killed rank
        kills = self.oom_kills()
        has_oom_kill = kills is not None and oom_kills is not None and kills > oom_kills
        if is_silent and has_oom_kill and status in {None, -signal.SIGKILL}:
            return "oom_kill"
        if status is not None:
            return "exit" if status >= 0 else "user" if status == -signal.SIGINT else "signal"
        if is_silent:
            return "signal"  # more likely than `os._exit`
        return "exit" if attempt.is_final else "unknown"


def follows(process: ProcessTotals, launch: str, trained_at: float) -> bool:
    """Return True if a process has not trained and is later than a training of the same launch."""
    identity = process.identity
    return not process.has_trained and identity.launch == launch != "" and identity.started > trained_at


def exited_peers(
    attempt: Attempt, ended_at: float, processes: Iterable[ProcessTotals]
) -> list[ProcessTotals]:
    """Return the training processes of a run that exited with an attempt."""
    return _exited_near(attempt.run, attempt.recorded_at, ended_at, processes)


def _exited_near(
    run: str, recorded_at: float, ended_at: float, processes: Iterable[ProcessTotals]
) -> list[ProcessTotals]:
    return [
        process
        for process in processes
        if process.exited_at is not None
        and process.training is not None
        and process.identity.run == run
        and process.exited_at > recorded_at
        and abs(process.exited_at - ended_at) <= LAUNCH_SECONDS
    ]


class Endings:
    """Outcomes of exited processes: each is decided once, by the same rule, and saved in the process's record."""

    def __init__(self) -> None:
        self.evidence = ExitEvidence()  # any thread may replace the evidence
        self._pass = self.evidence
        self._processes: Sequence[ProcessTotals] = ()
        self._moment = Moment(0.0, 0.0)

    def begin_pass(self, processes: Sequence[ProcessTotals], now: Moment) -> ExitEvidence:
        """Store the evidence and the processes of a new pass, and return the evidence."""
        self._pass, self._processes, self._moment = self.evidence.with_cached_sources(), processes, now
        return self._pass

    def outcome(self, process: ProcessTotals, *, successor: ProcessTotals | None = None) -> Outcome | None:
        """Return the outcome of an exited process, or None if not yet decided."""
        if process.exited_at is not None and process.outcome is None:
            process.outcome = self._pass.outcome(self._facts(process, process.exited_at, successor))
        return process.outcome

    def successor(self, process: ProcessTotals, later: Iterable[ProcessTotals]) -> ProcessTotals | None:
        """Return the next attempt. After a training, a process of the same launch is an attempt only if the process trains."""
        identity = process.identity
        accepts_any = not process.has_trained or self.expects_restart(identity.run)
        return next(
            (
                candidate
                for candidate in later
                if accepts_any or not follows(candidate, identity.launch, identity.started)
            ),
            None,
        )

    def _facts(
        self, process: ProcessTotals, exited_at: float, successor: ProcessTotals | None
    ) -> ExitedProcess:
        identity, reading = process.identity, process.training
        peers = _exited_near(identity.run, identity.started, exited_at, self._processes)
        is_silent = not process.is_final or not all(peer.is_final for peer in peers)
        return ExitedProcess(
            pid=identity.pid,
            run=identity.run,
            launch=identity.launch,
            recorded_at=identity.started,
            exited_at=exited_at,
            seconds_ago=self._moment.monotonic - process.exited_monotonic,
            is_final=process.is_final,
            is_finished=process.is_finished,
            exception=process.exception,
            failure=process.failure,
            is_doubtful=reading is not None and reading.open_seconds > 0 and is_silent,
            is_superseded=successor is not None,
            is_restarted=successor is not None and self._has_agent(process, successor),
            has_agent=self.expects_restart(identity.run),
        )

    def _has_agent(self, process: ProcessTotals, successor: ProcessTotals) -> bool:
        """Return True if an agent of torchrun was running from before the process until the successor."""
        return any(
            agent.identity.role == "agent"
            and agent.identity.run == process.identity.run
            and agent.identity.started < process.identity.started
            and (agent.exited_at is None or agent.exited_at > successor.identity.started)
            for agent in self._processes
        )

    def expects_restart(self, run: str) -> bool:
        """Return True if an agent of torchrun is running, which may start a further process of the run."""
        return any(
            agent.is_alive and agent.identity.role == "agent" and agent.identity.run == run
            for agent in self._processes
        )


def _without_shell(end: End) -> End:
    """Return the end with a signal if the status is from a shell, which reports a signal of its child as 128 + signal."""
    return replace(end, status=128 - end.status) if 128 < end.status < 128 + 65 else end


def _is_near(end: End, process: ExitedProcess) -> bool:
    return end.noticed_at >= process.recorded_at and abs(end.noticed_at - process.exited_at) <= LAUNCH_SECONDS


def _is_own(end: End, process: ExitedProcess) -> bool:
    has_launches = bool(end.launch and process.launch)
    return end.pid == process.pid and (end.launch == process.launch or not has_launches)


def _is_launch(end: End, process: ExitedProcess) -> bool:
    """Return True if an end belongs to the launch of a process. Ends of older releases contain only the run."""
    if end.worker:
        return False
    if end.launch and process.launch:
        return end.launch == process.launch
    return end.run == process.run
