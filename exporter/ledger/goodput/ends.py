"""How processes have begun and ended, what that is known by, and why an attempt ended before its time.

Runs in the sidecar, on the ledger's collecting thread. What the feed shows of all ranks, the exit statuses that `run` has
left, the kernel's count of OOM kills and the boot of the machine come in; evidence and reasons go out.

What a process says of itself is believed first, and of several processes the most telling one. That a peer is gone, or
does not answer, is what the others say when one of them is killed or crashes: then its own end is looked at.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from exporter.feed.runs import End
from exporter.ledger.goodput.task import Attempt
from exporter.ledger.ranks import Ranks
from exporter.ledger.totals import Moment, Process
from exporter.recording.values import END_REASONS

SETTLE_SECONDS = 3.0
"""How long after the end of a process others may still say what it died of."""
TOGETHER_SECONDS = 60.0
"""Ends of one run's processes within such a time are one interruption."""
LONGEST_BEFORE_SECONDS = 600.0
"""What began so long before its recording, such as the kernel of a notebook, did something else first."""

_MOST_TELLING = ("sdc", "gpu_memory", "gpu", "oom_kill", "storage", "host", "preemption", "user", "exit")
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
    """What may be known of the end of a process; each may be called from the ledger's thread."""

    oom_kills: Callable[[], float | None] = lambda: None  # of the kernel since the machine began
    ends: Callable[[], Sequence[End]] = lambda: ()  # how the jobs of `run` have ended
    started: Callable[[int | None, float], float] = started_at
    machine: tuple[str, str] = field(default_factory=lambda: (socket.gethostname(), ""))  # name, boot


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of the end of an attempt."""

    status: int | None  # as a parent gets it, negative for a signal; None where nobody saw it
    silent: bool  # a process of the run was seen to be dead that had not said that it ends
    reason: str  # one of `END_REASONS`


class Ends:
    """Remembers how processes ended.

    Attributes:
        witnesses: Who else may be asked; set by the composition root.
    """

    def __init__(self) -> None:
        self.witnesses = Witnesses()
        self._ended: dict[str, Process] = {}

    def note(self, ranks: Ranks, now: Moment) -> None:
        """Remember the dead of all ranks, which themselves may be let go of before anybody asks."""
        self._ended.update(
            {each.identity.id: each for each in ranks.processes() if each.training is not None}
        )
        oldest = now.wall - 2 * TOGETHER_SECONDS
        self._ended = {name: each for name, each in self._ended.items() if (each.departed or 0.0) >= oldest}

    def look(self, attempt: Attempt, ended: float, oom_kills: float | None, *, seen: bool) -> Evidence:
        """Tell how an attempt ended, and why; its process was perhaps `seen` to be dead.

        `oom_kills` is the kernel's count while it lived, None where that is not known.
        """
        # Whatever ended before this attempt began was the end of the one before.
        others = [
            each
            for each in self._ended.values()
            if each.departed is not None
            and each.identity.run == attempt.run
            and each.departed > attempt.recorded
            and abs(each.departed - ended) <= TOGETHER_SECONDS
        ]
        silent = (seen and not attempt.final) or not all(each.final for each in others)
        # Its own exit status, else a signal that ended the shell or the launcher around it.
        own = self.own(attempt.pid, attempt.recorded, ended)
        signals = [end.status for end in self._near(attempt.recorded, ended) if end.status < 0]
        status = own.status if own is not None else next(iter(signals), None)
        kills = self.witnesses.oom_kills()
        killed = kills is not None and oom_kills is not None and kills > oom_kills
        told = [attempt.failure, *(each.training.failure for each in others if each.training is not None)]
        said = {each if each in END_REASONS else "exit" for each in told if each}
        believed = _MOST_TELLING if silent else _MOST_TELLING + _CONSEQUENCES
        name, boot = attempt.machine
        if said.intersection(believed):
            reason = next(each for each in believed if each in said)
        elif self.witnesses.machine[0] == name and self.witnesses.machine[1] != boot:
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
        return Evidence(status, silent, reason)

    def own(self, pid: int, recorded: float, ended: float) -> End | None:
        """Give the end of a process as its parent `run` saw it; None where nobody did."""
        return next((end for end in self._near(recorded, ended) if end.pid == pid), None)

    def job(self, run: str, recorded: float, ended: float) -> End | None:
        """Give the end of the job of `run` that a process was part of; None where there was none."""
        return next((end for end in self._near(recorded, ended) if end.run == run), None)

    def _near(self, recorded: float, ended: float) -> Iterator[End]:
        for end in self.witnesses.ends():
            if abs(end.at - ended) <= TOGETHER_SECONDS and end.at >= recorded:
                # A shell reports its child's signal as 128 and more.
                status = 128 - end.status if 128 < end.status < 128 + 65 else end.status
                yield replace(end, status=status)
