"""CPU and I/O totals of a run's processes, which do not decrease when a process ends."""

from __future__ import annotations

from dataclasses import dataclass, field

import psutil

from exporter.collectors.job import Role


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """Rank and role of processes."""

    rank: str
    role: Role


@dataclass(slots=True)
class Usage:
    """CPU time and I/O of a process; None for an unreadable value."""

    user_seconds: float | None = None
    system_seconds: float | None = None
    read_bytes: float | None = None
    written_bytes: float | None = None

    def add_io(self, child: Usage) -> None:
        """Add the I/O of a child. A value that is unreadable for the child or for this process is not changed."""
        if self.read_bytes is not None and child.read_bytes is not None:
            self.read_bytes += child.read_bytes
        if self.written_bytes is not None and child.written_bytes is not None:
            self.written_bytes += child.written_bytes


@dataclass(slots=True)
class GroupTotals:
    """Sums over the current and the ended processes of a group."""

    user_seconds: float = 0.0
    system_seconds: float = 0.0
    read_bytes: float | None = None  # None if the I/O of no process was readable
    written_bytes: float | None = None

    def add(self, previous: Usage, current: Usage) -> None:
        """Add the increase of a process between two readings. A value that has decreased or is unreadable adds 0."""
        self.user_seconds += _increase(previous.user_seconds, current.user_seconds)
        self.system_seconds += _increase(previous.system_seconds, current.system_seconds)
        if current.read_bytes is not None:
            self.read_bytes = (self.read_bytes or 0) + _increase(previous.read_bytes, current.read_bytes)
        if current.written_bytes is not None:
            increase = _increase(previous.written_bytes, current.written_bytes)
            self.written_bytes = (self.written_bytes or 0) + increase


@dataclass(slots=True, eq=False)
class RunTotals:
    """Totals of a run since the exporter started.

    Earlier CPU time and I/O are not counted, because they would appear as an increase after a restart of the exporter.
    """

    # Last reading of each process. All runs share this dict, because a process may change its run.
    last_usages: dict[psutil.Process, Usage]
    groups: dict[ProcessGroup, GroupTotals] = field(default_factory=dict)

    @property
    def cpu_seconds(self) -> float:
        """CPU time of all groups, user and system."""
        return sum(total.user_seconds + total.system_seconds for total in self.groups.values())

    def count(
        self, process: psutil.Process, group: ProcessGroup, usage: Usage, *, predates_exporter: bool
    ) -> None:
        """Add the increase since the last reading.

        The first reading of a process adds nothing if the process started before the exporter (`predates_exporter`). Otherwise, the first
        reading is added as a whole.
        """
        total = self.groups.setdefault(group, GroupTotals())
        previous = self.last_usages.get(process)
        if previous is None:
            no_usage = Usage(user_seconds=0.0, system_seconds=0.0, read_bytes=0, written_bytes=0)
            previous = usage if predates_exporter else no_usage
        total.add(previous, usage)
        self.last_usages[process] = Usage(
            user_seconds=_maximum(previous.user_seconds, usage.user_seconds),
            system_seconds=_maximum(previous.system_seconds, usage.system_seconds),
            read_bytes=_maximum(previous.read_bytes, usage.read_bytes),
            written_bytes=_maximum(previous.written_bytes, usage.written_bytes),
        )


def _increase(previous: float | None, current: float | None) -> float:
    """Return the increase between two values. Return 0 for a decrease or an unknown value."""
    return 0 if current is None or previous is None else max(0, current - previous)


def _maximum(previous: float | None, current: float | None) -> float | None:
    """Return the larger of the known values, or None if both are unknown."""
    if previous is None or current is None:
        return current if previous is None else previous
    return max(previous, current)
