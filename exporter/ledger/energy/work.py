"""Work of the processes of each run: phases over time, and the fate of their work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from exporter.recording.values import TrainingReading

KEPT_SECONDS = 30.0
"""Length of the stored phase history, equal to the retention of power samples in the GPU collector."""
MAX_NUMBERS = 8192
"""Numbers of a snapshot's history that are used; no writer writes more."""


@dataclass(frozen=True, slots=True)
class PhaseInterval:
    """Interval of a main thread's phase, on the monotonic clock."""

    begin: float
    end: float
    phase: str


@dataclass(frozen=True, slots=True)
class WorkAccount:
    """Fate of the work of a run, in total seconds."""

    session: str  # accounts of different sessions are not comparable
    productive: float  # without validation
    lost: float
    hung: float
    uncommitted: float
    validates: bool  # validation is productive


@dataclass(frozen=True, slots=True)
class ProcessWork:
    """Phases of a process."""

    run: str
    rank: int
    process: str
    phases: Mapping[str, float]  # total seconds by phase
    device: str = ""  # UUID of the only GPU that the process uses
    intervals: tuple[PhaseInterval, ...] = ()  # of the last seconds
    alive: bool = True  # False for a recently exited process


@dataclass(frozen=True, slots=True)
class WorkUse:
    """Phases of all processes, lower ranks of a run first, and the fate of the work of each run."""

    processes: tuple[ProcessWork, ...] = ()
    accounts: Mapping[str, WorkAccount] = field(default_factory=dict)

    def account(self, run: str, session: str) -> WorkAccount | None:
        """Return the account of a run, or of the run that continues the session under a different name."""
        own = self.accounts.get(run)
        if own is None and session:
            return next((each for each in self.accounts.values() if each.session == session), None)
        return own


def extended(intervals: tuple[PhaseInterval, ...], reading: TrainingReading) -> tuple[PhaseInterval, ...]:
    """Return the known intervals of a process, extended by the history of a new snapshot."""
    history, phases, until = reading.history[-MAX_NUMBERS:], reading.history_phases, reading.history_until
    known = intervals[-1].end if intervals else 0.0
    if until <= known or len(history) % 2 or any(not 0 <= place < len(phases) for place in history[::2]):
        return intervals
    found = [each for each in intervals if each.end > until - KEPT_SECONDS]
    at = until - sum(history[1::2]) / 1e6
    for place, microseconds in zip(history[::2], history[1::2], strict=True):
        began, at = max(at, known), at + microseconds / 1e6
        if at <= began:
            continue
        if found and (found[-1].end, found[-1].phase) == (began, phases[place]):
            began = found.pop().begin
        found.append(PhaseInterval(began, at, phases[place]))
    return tuple(found)
