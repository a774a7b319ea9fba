"""Endings: how processes have ended, and what that is known by.

Runs in the sidecar, on the ledger's collecting thread. What the feed shows of all ranks and what the machine knows come
in; the evidence for one attempt's end goes out (`interruptions` judges it).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from exporter.feed.runs import End
from exporter.ledger.attempts import Attempt
from exporter.ledger.interruptions import Evidence
from exporter.ledger.process_start import started_at
from exporter.ledger.ranks import Ranks
from exporter.ledger.seats import Moment

SETTLE_SECONDS = 3.0
"""How long after the end of a process others may still say what it died of."""
TOGETHER_SECONDS = 60.0
"""Ends of one run's processes within such a time are one interruption."""


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
class _Ended:
    """How a process of any rank ended.

    Attributes:
        run: Its run.
        at: Unix time.
        final: Whether it took its leave.
        failure: What it said of it.
    """

    run: str
    at: float
    final: bool
    failure: str


class Endings:
    """Remembers how processes ended.

    Attributes:
        witnesses: Who else may be asked; set by the composition root.
    """

    def __init__(self) -> None:
        self.witnesses = Witnesses()
        self._ended: dict[str, _Ended] = {}

    def note(self, ranks: Ranks, now: Moment) -> None:
        """Remember the dead of all ranks, which themselves may be let go of before anybody asks."""
        for record in ranks.records():
            snapshot = record.snapshot
            if snapshot is None or record.departed is None or snapshot.recording.training is None:
                continue
            self._ended[record.process.id] = _Ended(
                record.process.run,
                record.departed,
                snapshot.recording.final,
                snapshot.recording.training.failure,
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
        return Evidence(
            said=[attempt.failure, *(each.failure for each in others)],
            silent=(seen and not attempt.final) or not all(each.final for each in others),
            final=attempt.final,
            status=self._status(attempt, ended),
            oom_kills=0 if kills is None or oom_kills is None else round(kills - oom_kills),
            rebooted=self.witnesses.machine[0] == name and self.witnesses.machine[1] != boot,
        )

    def own_status(self, attempt: Attempt, ended: float) -> int | None:
        """Give the exit status of an attempt's own process; None where nobody saw it."""
        return next((_signal_of(end.status) for end in self._near(ended) if end.pid == attempt.pid), None)

    def _status(self, attempt: Attempt, ended: float) -> int | None:
        """Its own exit status, else a signal that ended the shell or the launcher around it."""
        own = self.own_status(attempt, ended)
        if own is not None:
            return own
        around = [end for end in self._near(ended) if end.at > attempt.recorded]
        return next((status for end in around if (status := _signal_of(end.status)) < 0), None)

    def _near(self, ended: float) -> list[End]:
        return [end for end in self.witnesses.ends() if abs(end.at - ended) <= TOGETHER_SECONDS]


def _signal_of(status: int) -> int:
    """A shell reports its child's signal as 128 and more."""
    return 128 - status if 128 < status < 128 + 65 else status
