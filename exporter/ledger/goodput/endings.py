"""Outcomes of exited processes and reasons of interruptions, from exit evidence.

The first of these rules that applies decides:

1. The exit status of the process itself, from `run` or from torchrun's agent.
2. An uncaught exception, or a failure that the process reported.
3. The exit status of the launch, if the process is the last of its rank and exited within 60 s of the launch's end.
4. A restart by torchrun's agent: the process has not completed the training.
5. The last snapshot. A process that exited normally has completed the training, except if it exited during a step while another rank
   was killed or crashed. A killed process has not completed the training, except if the job had reported the end of the application.

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

from exporter.feed.runs import ProcessEnd
from exporter.ledger.goodput.attempt import Attempt, MachineIdentity
from exporter.ledger.goodput.outcome import EvidenceSource, Outcome
from exporter.ledger.totals import Moment, ProcessTotals
from exporter.recording.values import END_REASONS

LAUNCH_SECONDS = 60.0
"""Maximum time between the exit of a process and the end of the launch whose status applies to the process. Also the maximum time
between two exits of a run that may have the same cause."""
REPORT_DELAY_SECONDS = 3.0
"""Time after the exit of a process during which reports of other processes may arrive, unless the launch has ended."""
EXITING_SECONDS = 10.0
"""Time for a process to exit after it closed the feed, because torch may still release devices."""
MAX_START_DELAY_SECONDS = 600.0
"""Longest time from the start of a process to the start of the recording that counts as initialization. The kernel of a notebook
may be much older than the training."""

SHELL_SIGNAL_STATUS = 128
"""Exit status of a shell whose child was terminated by a signal, minus the number of the signal."""

_CAUSES = ("sdc", "gpu_memory", "gpu", "oom_kill", "storage", "host", "preemption", "user", "exit")
"""Reported reasons that are causes, the most specific first."""
_CONSEQUENCES = ("network", "nccl_timeout", "signal", "unknown")
"""Reported reasons that may be consequences of the exit of a different process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitedProcess:
    """Facts about an exited process."""

    pid: int
    run: str
    launch: str
    recorded_at: float  # Unix time at which recording started
    exited_at: float  # Unix time of the exit, or of the last snapshot if the exit was not observed
    seconds_since_exit: float
    is_final: bool  # the last snapshot was written at a normal exit
    is_finished: bool  # True if the job reported the end of the application
    exception: str = ""
    failure: str = ""  # reported reason, from END_REASONS
    # True if the process exited during a step, and this rank or another was killed or crashed
    is_doubtful: bool = False
    is_superseded: bool = False  # True if a later process has the same rank
    is_restarted: bool = False  # True if torchrun's agent started the later process
    # True if torchrun's agent is running, which may still report an exit status or restart the process
    is_agent_running: bool = False


def find_process_start(
    pid: int | None,
    recorded_at: float,
    *,
    proc: Path = Path("/proc"),
    clock: Callable[[], float] = time.time,
    boottime: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
) -> float:
    """Return the start time of a process from the kernel.

    Returns *recorded_at* if the kernel's time is unknown, later than *recorded_at*, or over `MAX_START_DELAY_SECONDS` earlier.
    """
    try:
        stat = (proc / str(pid) / "stat").read_bytes()
        # The name in brackets, field 2, may contain any character. The start time is field 22, the 20th after the name, in ticks.
        ticks = int(stat[stat.rindex(b")") + 1 :].split()[19])
    except (OSError, ValueError, IndexError):
        return recorded_at
    start = clock() - boottime() + ticks / os.sysconf("SC_CLK_TCK")
    return start if recorded_at - MAX_START_DELAY_SECONDS <= start <= recorded_at else recorded_at


@dataclass(frozen=True, slots=True)
class ExitEvidence:
    """Sources of evidence about exited processes. The ledger's thread calls the functions."""

    oom_kills: Callable[[], float | None] = lambda: None  # number of OOM kills since boot
    # exit statuses of jobs of `run` and of torchrun's workers
    ends: Callable[[], Sequence[ProcessEnd]] = lambda: ()
    launches: Callable[[], Collection[str]] = lambda: ()  # ids of running launches of `run`
    find_start: Callable[[int | None, float], float] = find_process_start
    machine: MachineIdentity = field(default_factory=MachineIdentity)

    def outcome(self, process: ExitedProcess) -> Outcome | None:
        """Return the outcome of a process by the rules of this module, or None if evidence may still arrive."""
        ends = [end for end in map(_without_shell, self.ends()) if _is_near(end, process)]
        process_end = next((end for end in ends if _is_end_of_process(end, process)), None)
        if process_end is not None:
            return Outcome(
                EvidenceSource.PROCESS,
                is_completed=process_end.status == 0,
                exited_at=process_end.noticed_at,
                status=process_end.status,
                exception=process.exception,
                failure=process.failure,
            )
        launch_end = next((end for end in ends if _is_end_of_launch(end, process)), None)
        is_undecided = launch_end is None and not process.is_superseded
        if process.exception or process.failure:
            if is_undecided and process.seconds_since_exit < REPORT_DELAY_SECONDS:
                return None
            status = launch_end.status if launch_end is not None and launch_end.status else None
            return Outcome(
                EvidenceSource.EXCEPTION,
                is_completed=False,
                exited_at=process.exited_at,
                status=status,
                exception=process.exception,
                failure=process.failure,
            )
        is_awaited = process.is_agent_running or self.is_launch_running(process.launch)
        if is_undecided and is_awaited and process.seconds_since_exit < LAUNCH_SECONDS:
            return None
        if launch_end is not None and not process.is_superseded:
            return Outcome(
                EvidenceSource.LAUNCH,
                is_completed=launch_end.status == 0,
                exited_at=min(process.exited_at, launch_end.noticed_at),
                status=launch_end.status,
            )
        if process.is_restarted:
            return Outcome(EvidenceSource.RESTART, is_completed=False, exited_at=process.exited_at)
        if not process.is_superseded and process.seconds_since_exit < self._patience_seconds(process):
            return None
        is_completed = process.is_finished or (process.is_final and not process.is_doubtful)
        return Outcome(EvidenceSource.INFERRED, is_completed=is_completed, exited_at=process.exited_at)

    def with_cached_sources(self) -> ExitEvidence:
        """Return the same evidence with sources that read the ends and the launches at most once."""
        return replace(self, ends=cache(self.ends), launches=cache(self.launches))

    def is_launch_running(self, launch: str) -> bool:
        """Return True if a launch of `run` is running."""
        return bool(launch) and launch in self.launches()

    def _patience_seconds(self, process: ExitedProcess) -> float:
        """Return the time after the exit during which evidence may arrive for a process without a running launch.

        A process that has closed the feed after the end of the application may still be running, and its exit status may arrive.
        """
        is_exiting = (
            process.is_finished and self.find_start(process.pid, process.recorded_at) < process.recorded_at
        )
        return EXITING_SECONDS if is_exiting else REPORT_DELAY_SECONDS

    def reason(
        self,
        attempt: Attempt,
        outcome: Outcome,
        processes: Iterable[ProcessTotals],
        oom_kills_before: float | None,
        *,
        lacks_final_snapshot: bool,
    ) -> str:
        """Return the reason, from `END_REASONS`, for which an attempt ended before the training was completed.

        The first of these that applies decides:

        1. the most specific reported reason; a lost connection is no reason if another process ended without a report
        2. a reboot of the machine
        3. an OOM kill
        4. the exit status or signal
        5. the last snapshot

        *oom_kills_before* is the kernel's count of OOM kills before the exit. *lacks_final_snapshot* is True if the process wrote no final
        snapshot, or another process of the run that exited within `LAUNCH_SECONDS` wrote none.
        """
        peers = exited_peers(attempt, outcome.exited_at, processes)
        failures = {attempt.reading.failure, outcome.failure, *(peer.failure for peer in peers)}
        # A job with a later release may report further reasons.
        reported_reasons = {failure if failure in END_REASONS else "exit" for failure in failures - {""}}
        # A lost connection may be a consequence if another process has exited earlier without a report.
        has_unreported_exit = lacks_final_snapshot or any(
            not peer.failure and (peer.exited_at or outcome.exited_at) <= outcome.exited_at for peer in peers
        )
        credible_reasons = _CAUSES if has_unreported_exit else _CAUSES + _CONSEQUENCES
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
            status = None  # a launcher whose rank was killed exits with a positive status
        kills = self.oom_kills()
        has_oom_kill = kills is not None and oom_kills_before is not None and kills > oom_kills_before
        if lacks_final_snapshot and has_oom_kill and status in {None, -signal.SIGKILL}:
            return "oom_kill"
        if status is not None and status >= 0:
            return "exit"
        if status is not None:
            return "user" if status == -signal.SIGINT else "signal"
        if lacks_final_snapshot:
            return "signal"  # more likely than `os._exit`
        return "exit" if attempt.is_final else "unknown"


def follows(process: ProcessTotals, launch: str, trained_at: float) -> bool:
    """Return True if a process has not trained, belongs to *launch*, and started after *trained_at*.

    *trained_at* is the start of a training process of the launch. Returns False without a launch.
    """
    identity = process.identity
    is_same_launch = launch != "" and identity.launch == launch
    return not process.has_trained and is_same_launch and identity.started > trained_at


def exited_peers(
    attempt: Attempt, ended_at: float, processes: Iterable[ProcessTotals]
) -> list[ProcessTotals]:
    """Return the training processes of an attempt's run that exited within `LAUNCH_SECONDS` of the attempt.

    The process of the attempt is included if this sidecar has read its feed. Otherwise, the saved state does not show how it exited.
    """
    return [
        process
        for process in _exited_near(attempt.run, attempt.recorded_at, ended_at, processes)
        if process.training is not None or process.identity.id != attempt.process_id
    ]


def _exited_near(
    run: str, recorded_at: float, ended_at: float, processes: Iterable[ProcessTotals]
) -> list[ProcessTotals]:
    """Return the training processes of a run that exited after *recorded_at* and within `LAUNCH_SECONDS` of *ended_at*."""
    return [
        process
        for process in processes
        if process.exited_at is not None
        # The saved state of a process whose feed file was removed has no reading.
        and (process.has_trained or process.training is not None)
        and process.identity.run == run
        and process.exited_at > recorded_at
        and abs(process.exited_at - ended_at) <= LAUNCH_SECONDS
    ]


class Endings:
    """Outcomes of exited processes. An outcome is decided once and stored in the process's totals."""

    def __init__(self) -> None:
        self.evidence = ExitEvidence()  # any thread may replace the evidence
        self._pass_evidence = self.evidence
        self._processes: Sequence[ProcessTotals] = ()
        self._moment = Moment(0.0, 0.0)

    def begin_pass(self, processes: Sequence[ProcessTotals], now: Moment) -> ExitEvidence:
        """Store the evidence and the processes of a new pass. Return the evidence, whose sources are read once in the pass."""
        self._pass_evidence = self.evidence.with_cached_sources()
        self._processes, self._moment = processes, now
        return self._pass_evidence

    def decide_outcome(
        self, process: ProcessTotals, *, successor: ProcessTotals | None = None
    ) -> Outcome | None:
        """Decide the outcome of an exited process if the evidence suffices. Return the outcome, or None if undecided."""
        if process.exited_at is not None and process.outcome is None:
            process.outcome = self._pass_evidence.outcome(self._facts(process, process.exited_at, successor))
        return process.outcome

    def find_successor(self, process: ProcessTotals, later: Iterable[ProcessTotals]) -> ProcessTotals | None:
        """Return the first later process that is a further attempt.

        After a training, a later process of the same launch that does not train, such as an evaluation, is not an attempt.
        """
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
        """Return the facts by which the outcome of an exited process is decided."""
        identity, reading = process.identity, process.training
        peers = _exited_near(identity.run, identity.started, exited_at, self._processes)
        lacks_final_snapshot = not process.is_final or not all(peer.is_final for peer in peers)
        return ExitedProcess(
            pid=identity.pid,
            run=identity.run,
            launch=identity.launch,
            recorded_at=identity.started,
            exited_at=exited_at,
            seconds_since_exit=self._moment.monotonic - process.exited_monotonic,
            is_final=process.is_final,
            is_finished=process.is_finished,
            exception=process.exception,
            failure=process.failure,
            is_doubtful=reading is not None and reading.open_seconds > 0 and lacks_final_snapshot,
            is_superseded=successor is not None,
            is_restarted=successor is not None and self._is_restarted_by_agent(process, successor),
            is_agent_running=self.expects_restart(identity.run),
        )

    def _is_restarted_by_agent(self, process: ProcessTotals, successor: ProcessTotals) -> bool:
        """Return True if an agent of torchrun was running from before the process started until the successor had started."""
        return any(
            agent.identity.role == "agent"
            and agent.identity.run == process.identity.run
            and agent.identity.started < process.identity.started
            and (agent.exited_at is None or agent.exited_at > successor.identity.started)
            for agent in self._processes
        )

    def expects_restart(self, run: str) -> bool:
        """Return True if an agent of torchrun is running, which may restart the processes of the run."""
        return any(
            agent.is_alive and agent.identity.role == "agent" and agent.identity.run == run
            for agent in self._processes
        )


def _without_shell(end: ProcessEnd) -> ProcessEnd:
    """Return the end with a negative signal number if the status is a shell's, 128 + the signal of its child."""
    signal_number = end.status - SHELL_SIGNAL_STATUS
    return replace(end, status=-signal_number) if 0 < signal_number <= signal.SIGRTMAX else end


def _is_near(end: ProcessEnd, process: ExitedProcess) -> bool:
    """Return True if an end was noticed after the recording started, and within `LAUNCH_SECONDS` of the exit."""
    return end.noticed_at >= process.recorded_at and abs(end.noticed_at - process.exited_at) <= LAUNCH_SECONDS


def _is_end_of_process(end: ProcessEnd, process: ExitedProcess) -> bool:
    """Return True if an end is the process's own. Equal pids of different launches are different processes."""
    has_launches = bool(end.launch and process.launch)
    return end.pid == process.pid and (end.launch == process.launch or not has_launches)


def _is_end_of_launch(end: ProcessEnd, process: ExitedProcess) -> bool:
    """Return True if an end belongs to the launch of a process. Ends of older releases contain the run and no launch."""
    if end.is_worker:
        return False
    if end.launch and process.launch:
        return end.launch == process.launch
    return end.run == process.run
