"""How processes have begun and ended, what that is known by, and why an attempt ended before its time.

Runs in the sidecar, on the ledger's collecting thread. What the feed shows of all ranks, the exit statuses that `run` has
left, the kernel's count of OOM kills and the boot of the machine come in; evidence and reasons go out.

What a process says of itself is believed first, and of several processes the most telling one. That a peer is gone, or
does not answer, is what the others say when one of them dies without a word: then its own end is looked at.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from exporter.feed.runs import End
from exporter.ledger.goodput.attempt import Attempt
from exporter.ledger.ranks import Ranks
from exporter.ledger.totals import Moment
from exporter.recording.values import END_REASONS

SETTLE_SECONDS = 3.0
"""How long after the end of a process others may still say what it died of."""
TOGETHER_SECONDS = 60.0
"""Ends of one run's processes within such a time are one interruption."""
LONGEST_BEFORE_SECONDS = 600.0
"""What began so long before its recording, such as the kernel of a notebook, did something else first."""

_MOST_TELLING = (
    "sdc",
    "gpu_memory",
    "gpu",
    "oom_kill",
    "storage",
    "host",
    "preemption",
    "user",
    "exit",
)
"""The reasons that a process gives and that are a cause, the most particular first."""
_CONSEQUENCES = ("network", "nccl_timeout", "signal", "unknown")
"""Those that may be no more than what another process has left behind."""


def started_at(
    pid: int | None,
    recorded: float,
    *,
    proc: Path = Path("/proc"),
    clock: Callable[[], float] = time.time,
    boottime: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
) -> float:
    """Tell when a process began, as the kernel has it.

    Args:
        pid: As seen from here; None where it cannot be seen.
        recorded: Unix time at which its recording began.
        proc: Where procfs is mounted.
        clock: Unix time.
        boottime: Seconds since the machine began.

    Returns:
        Unix time, at most `recorded`, which it is where nobody knows better.
    """
    if pid is None:
        return recorded
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
    """What may be known of the end of a process; each may be called from the ledger's thread.

    Attributes:
        oom_kills: Processes that the kernel has killed for memory since the machine began; None where it is not known.
        ends: How the jobs of `run` have ended.
        started: When a process began: its pid as seen from here, and when its recording began.
        machine: Name and boot of this machine.
    """

    oom_kills: Callable[[], float | None] = lambda: None
    ends: Callable[[], Sequence[End]] = lambda: ()
    started: Callable[[int | None, float], float] = started_at
    machine: tuple[str, str] = field(default_factory=lambda: (socket.gethostname(), ""))


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of the end of an attempt.

    Attributes:
        said: Reasons that its process, and those of other ranks that ended about then, gave.
        silent: Whether one of them was seen to be dead and had not taken its leave.
        final: Whether its own process took its leave.
        status: Its exit status as a parent gets it, negative for a signal; None where nobody saw it.
        oom_kills: Processes that the kernel killed for memory on this machine meanwhile.
        rebooted: Whether the machine has begun anew since.
    """

    said: Collection[str] = ()
    silent: bool = False
    final: bool = False
    status: int | None = None
    oom_kills: int = 0
    rebooted: bool = False


def reason_of(evidence: Evidence) -> str:
    """Choose one of `END_REASONS`."""
    said = {each if each in END_REASONS else "exit" for each in evidence.said if each}
    for reason in (*_MOST_TELLING, *(() if evidence.silent else _CONSEQUENCES)):
        if reason in said:
            return str(reason)
    if evidence.rebooted:
        return "host"
    # The kernel kills for memory with SIGKILL, which leaves no last word.
    if evidence.silent and evidence.oom_kills > 0 and evidence.status in {None, -signal.SIGKILL}:
        return "oom_kill"
    if evidence.status is not None:
        if evidence.status < 0:
            return "user" if evidence.status == -signal.SIGINT else "signal"
        return "exit"
    if evidence.silent:
        return "signal"  # so ends what is killed; `os._exit` is rare
    return "exit" if evidence.final else "unknown"


@dataclass(frozen=True, slots=True)
class _Ended:
    """How a process of any rank ended: its run, Unix time, whether it took its leave, what it said of it."""

    run: str
    at: float
    final: bool
    failure: str


class Ends:
    """Remembers how processes ended.

    Attributes:
        witnesses: Who else may be asked; set by the composition root.
    """

    def __init__(self) -> None:
        self.witnesses = Witnesses()
        self._ended: dict[str, _Ended] = {}

    def note(self, ranks: Ranks, now: Moment) -> None:
        """Remember the dead of all ranks, which themselves may be let go of before anybody asks."""
        for each in ranks.processes():
            if each.departed is not None and each.training is not None:
                self._ended[each.identity.id] = _Ended(
                    each.identity.run, each.departed, each.final, each.training.failure
                )
        oldest = now.wall - 2 * TOGETHER_SECONDS
        self._ended = {each: ended for each, ended in self._ended.items() if ended.at >= oldest}

    def evidence(self, attempt: Attempt, ended: float, oom_kills: float | None, *, seen: bool) -> Evidence:
        """Put together what is known of the end of an attempt.

        Args:
            attempt: It.
            ended: Unix time of its end.
            oom_kills: The kernel's count while it lived; None where that is not known.
            seen: Whether its process was seen to be dead.
        """
        # Whatever ended before this attempt began was the end of the one before.
        others = [
            each
            for each in self._ended.values()
            if each.run == attempt.run
            and each.at > attempt.recorded
            and abs(each.at - ended) <= TOGETHER_SECONDS
        ]
        kills = self.witnesses.oom_kills()
        name, boot = attempt.machine
        own = self.own(attempt.pid, attempt.recorded, ended)
        around = [end.status for end in self._near(ended) if end.at > attempt.recorded]
        return Evidence(
            said=[attempt.failure, *(each.failure for each in others)],
            silent=(seen and not attempt.final) or not all(each.final for each in others),
            final=attempt.final,
            # Its own exit status, else a signal that ended the shell or the launcher around it.
            status=own.status if own is not None else next((each for each in around if each < 0), None),
            oom_kills=0 if kills is None or oom_kills is None else round(kills - oom_kills),
            rebooted=self.witnesses.machine[0] == name and self.witnesses.machine[1] != boot,
        )

    def own(self, pid: int, recorded: float, ended: float) -> End | None:
        """Give the end of a process as its parent `run` saw it; None where nobody did."""
        near = self._near(ended)
        return next((end for end in near if end.pid == pid and end.at >= recorded), None)

    def job(self, run: str, recorded: float, ended: float) -> End | None:
        """Give the end of the job of `run` that a process was part of; None where there was none."""
        near = self._near(ended)
        return next((end for end in near if end.run == run and end.at >= recorded), None)

    def _near(self, ended: float) -> list[End]:
        return [
            replace(end, status=_signal_of(end.status))
            for end in self.witnesses.ends()
            if abs(end.at - ended) <= TOGETHER_SECONDS
        ]


def _signal_of(status: int) -> int:
    """A shell reports its child's signal as 128 and more."""
    return 128 - status if 128 < status < 128 + 65 else status
