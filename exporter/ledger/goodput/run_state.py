"""What state each run is in, how its processes have ended, and why an attempt ended before its time.

What a process says of its own end is believed first, and of several the most telling one. That a peer is gone is what the
others say when one is killed or crashes: then its own end is looked at. The states are those of docs/goodput.md.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from exporter.families import Collected, FamilySpec, family
from exporter.feed.runs import End
from exporter.ledger.goodput.task import Attempt
from exporter.ledger.totals import LONG_PHASES, GapRules, Moment, Process
from exporter.recording.values import END_REASONS

TOGETHER_SECONDS = 60.0
"""Ends of one run's processes within such a time are one interruption."""
LONGEST_BEFORE_SECONDS = 600.0
"""What began so long before its recording, such as the kernel of a notebook, did something else first."""
LIVES = ("starting", "running", "stalled", "hung")
ENDED = ("stopped", "finished", "failed", "lost")
STATES = LIVES + ENDED

_MOST_TELLING = ("sdc", "gpu_memory", "gpu", "oom_kill", "storage", "host", "preemption", "user", "exit")
"""The reasons that a process gives and that are a cause, the most particular first."""
_CONSEQUENCES = ("network", "nccl_timeout", "signal", "unknown")
"""Those that may be no more than what another process has left behind."""
_WAITING = LONG_PHASES | {"data_loading"}
_STOPS = frozenset({-signal.SIGINT, -signal.SIGTERM})
_SIGNALS = {each.value: each.name for each in signal.Signals}

STATE = family(
    "training_run_state",
    "1 for the state that the run is in, 0 for the others: starting, running, stalled (no step for long while it waits"
    " for data, saves or validates, or its feed is not refreshed), hung (no step for long), stopped (by SIGINT, SIGTERM"
    " or its user), finished, failed, lost (killed or crashed, and nobody saw how). Absent when nothing of the run"
    " lingers, and on nodes without rank 0.",
    "processes of the run, exit status seen by `run`",
    *("run", "state"),
)
INFO = FamilySpec(
    name="training_run_state_info",
    type="gauge",  # as an info family it would have the name of the other one
    help="Why the run is in its state, and since when (Unix time): exit status, signal or exception where they are known;"
    " a reason that begins with `deduced` was seen by nobody. Absent as training_run_state.",
    labels=("run", "state", "reason", "exit_status", "signal", "exception", "since"),
    source="see training_run_state",
)
SPECS = (STATE, INFO)


def started_at(
    pid: int | None,
    recorded: float,
    *,
    proc: Path = Path("/proc"),
    clock: Callable[[], float] = time.time,
    boottime: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
) -> float:
    """Tell when a process began, as the kernel has it; at most when its recording did, where nobody knows better."""
    try:
        stat = (proc / str(pid) / "stat").read_bytes()
        # The name of the program stands in brackets and may have any; the start is the 22nd field, in ticks.
        ticks = int(stat[stat.rindex(b")") + 1 :].split()[19])
    except (OSError, ValueError, IndexError):
        return recorded
    began = clock() - boottime() + ticks / os.sysconf("SC_CLK_TCK")
    return began if recorded - LONGEST_BEFORE_SECONDS <= began <= recorded else recorded


@dataclass(frozen=True, slots=True)
class Witnesses:
    """Who may know of the end of a process; each may be called from the ledger's thread."""

    oom_kills: Callable[[], float | None] = lambda: None  # of the kernel since the machine began
    ends: Callable[[], Sequence[End]] = lambda: ()  # how the jobs of `run` have ended
    started: Callable[[int | None, float], float] = started_at
    machine: tuple[str, str] = field(default_factory=lambda: (socket.gethostname(), ""))  # name, boot

    def own(self, pid: int, recorded: float, ended: float) -> End | None:
        """Give the end of a process as its parent `run` saw it; None where nobody did."""
        return next((end for end in self._near(recorded, ended) if end.pid == pid), None)

    def job(self, run: str, recorded: float, ended: float) -> End | None:
        """Give the end of the job of `run` that a process was part of; None where there was none."""
        return next((end for end in self._near(recorded, ended) if end.run == run), None)

    def _near(self, recorded: float, ended: float) -> Iterator[End]:
        for end in self.ends():
            if abs(end.at - ended) <= TOGETHER_SECONDS and end.at >= recorded:
                # A shell reports its child's signal as 128 and more.
                status = 128 - end.status if 128 < end.status < 128 + 65 else end.status
                yield replace(end, status=status)

    def explain(
        self,
        attempt: Attempt,
        ended: float,
        processes: Iterable[Process],
        oom_kills: float | None,
        *,
        seen: bool,
    ) -> tuple[str, int | None, bool]:
        """Tell why an attempt ended, one of `END_REASONS`; its process was perhaps `seen` to be dead.

        `oom_kills` is the kernel's count while it lived, None where that is not known. With the reason come the status, as
        a parent gets it, where somebody saw it, and whether a process of the run was dead that had not said that it ends.
        """
        # Whatever ended before this attempt began was the end of the one before.
        others = [
            each
            for each in processes
            if each.departed is not None
            and each.training is not None
            and each.identity.run == attempt.run
            and each.departed > attempt.recorded
            and abs(each.departed - ended) <= TOGETHER_SECONDS
        ]
        silent = (seen and not attempt.final) or not all(each.final for each in others)
        # Its own exit status, else a signal that ended the shell or the launcher around it.
        own = self.own(attempt.pid, attempt.recorded, ended)
        signals = [end.status for end in self._near(attempt.recorded, ended) if end.status < 0]
        status = own.status if own is not None else next(iter(signals), None)
        kills = self.oom_kills()
        killed = kills is not None and oom_kills is not None and kills > oom_kills
        told = {attempt.reading.failure, *(each.failure for each in others)} - {""}
        said = {each if each in END_REASONS else "exit" for each in told}
        # A lost connection is the consequence of a rank that has gone before, and said of no failure.
        left = silent or any(not each.failure and (each.departed or ended) <= ended for each in others)
        believed = _MOST_TELLING if left else _MOST_TELLING + _CONSEQUENCES
        name, boot = attempt.machine
        if said.intersection(believed):
            reason = next(each for each in believed if each in said)
        elif self.machine[0] == name and self.machine[1] != boot:
            reason = "host"
        # The kernel kills for memory with SIGKILL, which leaves no last word.
        elif silent and killed and status in {None, -signal.SIGKILL}:
            reason = "oom_kill"
        elif status is not None:
            reason = "exit" if status >= 0 else "user" if status == -signal.SIGINT else "signal"
        elif silent:
            reason = "signal"  # so ends what is killed; `os._exit` is rare
        else:
            reason = "exit" if attempt.final else "unknown"
        return reason, status, silent


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of one run."""

    state: str  # one of `STATES`
    reason: str = ""  # for people
    since: float = field(default=0.0, compare=False)  # Unix time
    exit_status: str = ""  # of the job, where somebody saw it and it ended by no signal
    signal: str = ""  # that ended it
    exception: str = ""  # that ended it


class RunStates:
    """Follows the state of every run."""

    def __init__(self) -> None:
        self._runs: dict[str, RunState] = {}

    def tell(
        self,
        collected: Collected,
        processes: Iterable[Process],
        shown: Collection[str],
        witnesses: Witnesses,
        rules: GapRules,
        now: Moment,
    ) -> None:
        """Fill the families, of the runs of which anything is shown."""
        runs: dict[str, list[Process]] = {}
        for process in processes:
            if process.identity.run in shown:
                runs.setdefault(process.identity.run, []).append(process)
        before, self._runs = self._runs, {}
        for run, each in runs.items():
            if any(not process.identity.rank for process in each):
                it = _look(each, before.get(run), witnesses, rules, now)
                # A state has one begin, however often it is found.
                it = self._runs[run] = before[run] if before.get(run) == it else it
                for name in STATES:
                    collected.add(STATE, float(name == it.state), run, name)
                why = (it.state, it.reason, it.exit_status, it.signal, it.exception, str(round(it.since)))
                collected.add(INFO, 1.0, run, *why)


def _look(
    processes: list[Process], before: RunState | None, witnesses: Witnesses, rules: GapRules, now: Moment
) -> RunState:
    """Tell the state of a run by its processes."""
    trainers = [each for each in processes if each.identity.rank is not None] or processes
    living = [each for each in trainers if each.living]
    if living:
        living.sort(key=lambda each: (not each.trains, each.identity.rank or 0, each.identity.started))
        return _living(living[0], rules, now)
    last = max(
        trainers,
        key=lambda each: (-(each.identity.rank or 0), each.identity.started, each.departed or 0.0),
    )
    settled = now.monotonic - last.departed_monotonic > TOGETHER_SECONDS  # nobody has more to say of it
    return before if before is not None and before.state in ENDED and settled else _ended(last, witnesses)


def _living(process: Process, rules: GapRules, now: Moment) -> RunState:
    reading, started = process.training, process.identity.started
    if process.snapshot is not None and not rules.fresh(process):
        since = now.wall - process.age_seconds
        starved = "its feed is not refreshed: stopped, or starved"
        return RunState("stalled", "it cannot write its feed" if process.outdated else starved, since)
    late = rules.without_step(process, now)
    if reading is not None and late is not None:
        state = "stalled" if reading.phase in _WAITING else "hung"
        return RunState(state, f"no step has ended, phase {reading.phase}", now.wall - late)
    if process.identity.rank is None:
        return RunState("starting", "no process trains yet", started)
    if reading is None:
        return RunState("running", "its training is not told", started)
    if reading.steps == 0 and reading.last_progress is None and not reading.finished:
        return RunState("starting", "no step has ended yet", started)
    return RunState("running", since=now.wall)


def _ended(process: Process, witnesses: Witnesses) -> RunState:
    """Tell how a run has ended, from all that is known of its last process."""
    at, identity, exception = process.departed or 0.0, process.identity, process.exception
    own = witnesses.own(identity.pid, identity.started, at)
    job = own or witnesses.job(identity.run, identity.started, at)
    since = at if job is None else min(at, job.at)
    if job is not None and job.status < 0:
        name = _SIGNALS.get(-job.status, str(-job.status))
        state = "stopped" if job.status in _STOPS else "failed"
        return RunState(state, f"signal {name}", since, signal=name, exception=exception)
    if job is not None and job.status > 0:
        reason = f"exit status {job.status}" + (f", {exception}" if exception else "")
        return RunState("failed", reason, since, exit_status=str(job.status), exception=exception)
    if job is not None and (own is not None or process.final):
        return RunState("finished", "exit status 0", since, exit_status="0")
    if exception or process.failure:
        state = "stopped" if process.failure in {"user", "preemption"} else "failed"
        reason = f"exception {exception}" if exception else f"told: {process.failure}"
        return RunState(state, reason, since, exception=exception)
    if process.final:
        return RunState("finished", "deduced: the process exited normally", since)
    return RunState("lost", "deduced: the process was killed or crashed", since)
