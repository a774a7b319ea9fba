"""Why an attempt ended before its time, from all that is known of its end.

Runs in the sidecar, on the ledger's collecting thread; no I/O. What the processes of the run said, the exit status
that `run` has seen, the kernel's count of OOM kills and the boot of the machine come in; one reason goes out.

What a process says of itself is believed first, and of several processes the most telling one. That a peer is gone, or
does not answer, is what the others say when one of them dies without a word: then its own end is looked at.
"""

from __future__ import annotations

import signal
from collections.abc import Collection
from dataclasses import dataclass

from exporter.recording.values import END_REASONS

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
    for reason in _MOST_TELLING:
        if reason in said:
            return reason
    if not evidence.silent:
        for reason in _CONSEQUENCES:
            if reason in said:
                return reason
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
