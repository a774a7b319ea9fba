"""What processes use now: readings of single ones, and how a group of them becomes samples.

Used in the sidecar by the collector of processes, on one thread. psutil reads; samples go out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import psutil

from exporter.collectors.processes.families import (
    CPU,
    EXITS,
    INSTANCES,
    IO_READ,
    IO_WRITTEN,
    OPEN_FDS,
    RESIDENT,
    STATE,
    THREADS,
)
from exporter.collectors.processes.stat import Stat
from exporter.collectors.processes.tree import Member
from exporter.families import FamilySpec

STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "disk_sleep",
    "T": "stopped",
    "t": "tracing_stop",
    "Z": "zombie",
    "X": "dead",
    "x": "dead",
    "I": "idle",
}

Samples = dict[FamilySpec, dict[tuple[str, ...], float]]


@dataclass(slots=True)
class Reading:
    """What was last read of a process by psutil.

    Attributes:
        process: Through which it is read; None while it could not be opened.
        at: When, monotonic seconds; None before the first time.
        resident_bytes: Memory in RAM; None while unknown.
        io: Bytes read and written; None where that is not ours to know.
        open_descriptors: Likewise.
    """

    process: psutil.Process | None = None
    at: float | None = None
    resident_bytes: int | None = None
    io: tuple[int, int] | None = None
    open_descriptors: int | None = None

    def update(self, pid: int, now: float) -> None:
        """Read it.

        Raises:
            psutil.NoSuchProcess: It has ended.
        """
        self.process = self.process or psutil.Process(pid)
        self.at = now
        self.resident_bytes = self.process.memory_info().rss
        try:
            io = self.process.io_counters()
            self.io = io.read_bytes, io.write_bytes
            self.open_descriptors = self.process.num_fds()
        except psutil.AccessDenied:
            self.io = self.open_descriptors = None


@dataclass(slots=True, eq=False)
class GroupUse:
    """What one group uses now.

    Attributes:
        states: Processes by state.
        living: Those that have not ended, with what was last read of them.
    """

    states: Counter[str] = field(default_factory=Counter)
    living: list[tuple[Member, Reading]] = field(default_factory=list)


def status_of(stat: Stat, reading: Reading) -> str:
    """Tell how a zombie ended."""
    if stat.exit_code:
        return "failed"
    # To read its I/O needs the same right as the status, which is 0 for those who have it not.
    return "completed" if reading.io is not None else "unknown"


def add_counts(
    samples: Samples,
    labels: tuple[str, ...],
    values: dict[str, float],
    ends: dict[str, float],
    use: GroupUse | None,
) -> None:
    """Add the counters of a group, which may have no process any more."""
    samples[INSTANCES][labels] = 0
    samples[CPU].update({(*labels, mode): values[mode] for mode in ("user", "system")})
    if use is None or all(reading.io is not None for _, reading in use.living):
        samples[IO_READ][labels] = values["read_bytes"]
        samples[IO_WRITTEN][labels] = values["written_bytes"]
    samples[EXITS].update({(*labels, reason): count for reason, count in ends.items()})


def add_use(samples: Samples, labels: tuple[str, ...], use: GroupUse) -> None:
    """Add what the processes of a group use now."""
    samples[INSTANCES][labels] = len(use.living)
    samples[STATE].update({(*labels, state): count for state, count in use.states.items()})
    if not use.living:
        return
    samples[THREADS][labels] = sum(member.stat.threads for member, _ in use.living)
    # A part of a sum, or of a maximum, would be another number.
    resident = [each.resident_bytes for _, each in use.living if each.resident_bytes is not None]
    if len(resident) == len(use.living):
        samples[RESIDENT][labels] = sum(resident)
    descriptors = [each.open_descriptors for _, each in use.living if each.open_descriptors is not None]
    if len(descriptors) == len(use.living):
        samples[OPEN_FDS][labels] = max(descriptors)
