"""Phase history of the processes of each run, and the outcome of their work."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

from exporter.recording.values import TrainingReading

RETENTION_SECONDS = 30.0
"""Length of the stored phase history, equal to the retention of power samples in the GPU collector."""
MAX_HISTORY_VALUES = 16_384
"""Maximum number of history values that are read from a snapshot, more than `training.history` writes."""


@dataclass(frozen=True, slots=True)
class PhaseInterval:
    """Interval in which a main thread was in a phase, on the monotonic clock."""

    start: float
    end: float
    phase: str


@dataclass(frozen=True, slots=True)
class WorkAccount:
    """Outcome of the work of a run, in total seconds."""

    session: str  # the seconds of different sessions are not comparable
    productive_seconds: float  # without validation
    lost_seconds: float
    hung_seconds: float
    uncommitted_seconds: float
    is_validation_productive: bool


@dataclass(frozen=True, slots=True)
class ProcessWork:
    """Phases of a process, as totals and as the intervals of the last `RETENTION_SECONDS`."""

    run: str
    rank: int
    process_id: str
    phases: Mapping[str, float]  # total seconds by phase
    device: str = ""  # UUID of the only GPU that the process uses
    intervals: tuple[PhaseInterval, ...] = ()  # oldest first
    is_alive: bool = True  # False for a process that exited within `RETENTION_SECONDS`


@dataclass(frozen=True, slots=True)
class WorkSnapshot:
    """Phases of all processes, and the outcome of the work of each run, in a pass. Lower ranks of a run are first."""

    processes: tuple[ProcessWork, ...] = ()
    accounts: Mapping[str, WorkAccount] = field(default_factory=dict)

    def account(self, run: str, session: str) -> WorkAccount | None:
        """Return the account of a run, or None.

        If the run has no account, its session may continue under a different name: return the account of *session*.
        """
        account = self.accounts.get(run)
        if account is None and session:
            return next(
                (candidate for candidate in self.accounts.values() if candidate.session == session), None
            )
        return account


def extend_intervals(
    intervals: tuple[PhaseInterval, ...], reading: TrainingReading
) -> tuple[PhaseInterval, ...]:
    """Return the known intervals of a process, extended by the history of a new snapshot. An invalid history is ignored."""
    phases, history_until = reading.history_phases, reading.history_until
    history = tuple(chain.from_iterable(reading.intervals))[-MAX_HISTORY_VALUES:]
    covered_until = intervals[-1].end if intervals else 0.0
    if history_until <= covered_until or len(history) % 2:
        return intervals
    if history and not 0 <= min(history[::2]) <= max(history[::2]) < len(phases):
        return intervals
    new_intervals: list[PhaseInterval] = []
    end = history_until
    # Backwards until the covered time: most of a history was part of the previous snapshot.
    for index, microseconds in zip(history[-2::-2], history[::-2], strict=True):
        if end <= covered_until:
            break
        start = end - microseconds / 1e6
        if start < end:
            new_intervals.append(PhaseInterval(max(start, covered_until), end, phases[index]))
        end = start
    first_kept = bisect_right(intervals, history_until - RETENTION_SECONDS, key=lambda interval: interval.end)
    extended_intervals = list(intervals[first_kept:])
    for interval in reversed(new_intervals):
        last = extended_intervals[-1] if extended_intervals else None
        if last is not None and (last.end, last.phase) == (interval.start, interval.phase):
            extended_intervals[-1] = PhaseInterval(last.start, interval.end, interval.phase)
        else:
            extended_intervals.append(interval)
    return tuple(extended_intervals)
