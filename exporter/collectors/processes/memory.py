"""Unique and proportional memory of the job's processes.

For a reading, the kernel walks all page tables of the process and holds its memory lock: a third of a second for 8 GiB of small
pages. Meanwhile, a trainer that needs the lock waits. A pass therefore has a time budget and starts with the processes that were
read longest ago. A process is read so rarely that its lock is held for at most about a thousandth of the time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from exporter.collectors.kernel_files import from_psutil, source
from exporter.collectors.processes.tree import Member
from exporter.families import Collected, FamilySpec

_ABSENT = (
    "without permission (same user or ptrace), or until all processes have been read within the time budget"
)

UNIQUE = FamilySpec(
    name="training_process_unique_bytes",
    type="gauge",
    unit="bytes",
    labels=("run", "rank", "role"),
    help="Memory that is not shared with other processes (USS).",
    absent=_ABSENT,
    source="/proc/<pid>/smaps_rollup Private_*",
)
PROPORTIONAL = FamilySpec(
    name="training_process_proportional_bytes",
    type="gauge",
    unit="bytes",
    labels=("run", "rank", "role"),
    help="Memory with each shared page divided by the number of processes that share it (PSS).",
    absent=_ABSENT,
    source="/proc/<pid>/smaps_rollup Pss",
)
SPECS = (UNIQUE, PROPORTIONAL)

BUDGET_SECONDS = 0.5
"""Time after which a pass starts no further reading."""
MAX_LOCK_RATIO = 1e-3
"""Maximum share of the time for which the memory lock of a process is held."""
MIN_INTERVAL_SECONDS = 55.0
"""Minimum time between two readings of a process. A new process is read in the next pass with time left."""
RETENTION_SECONDS = 180.0
"""Minimum time for which a reading is published."""
RETENTION_INTERVALS = 1.5
"""Minimum time for which a reading is published, in intervals between two readings of the process."""


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Memory of a process, with monotonic times. The default stands for a process without a reading: due now, and not published."""

    unique_bytes: int = 0
    proportional_bytes: int = 0
    read_at: float = -math.inf
    due_at: float = -math.inf  # earliest time of the next reading
    stale_at: float = -math.inf  # end of the publication of this reading


class ProcessMemoryCollector:
    """Collector of the unique and the proportional memory of the job's processes."""

    name = "process_memory"
    specs = SPECS

    def __init__(
        self,
        *,
        members: Callable[[], Sequence[Member]] = tuple,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members = members
        self._monotonic = monotonic
        self._readings: dict[psutil.Process, MemoryReading] = {}

    def collect(self) -> Collected:
        """Read as many processes as the budget allows."""
        collected = Collected()
        members = self._members()
        self._readings = {
            member.process: self._readings.get(member.process, MemoryReading()) for member in members
        }
        pass_start = self._monotonic()
        for process, reading in sorted(self._readings.items(), key=lambda item: item[1].read_at):
            now = self._monotonic()
            if now - pass_start < BUDGET_SECONDS and now >= reading.due_at:
                with source(collected, f"process {process.pid}"):
                    self._readings[process] = self._read(process, now)
        now = self._monotonic()
        groups: dict[tuple[str, str, str], list[MemoryReading]] = {}
        for member in members:
            group = (member.run, member.rank, member.role)
            groups.setdefault(group, []).append(self._readings[member.process])
        for labels, readings in groups.items():
            if all(now < reading.stale_at for reading in readings):  # a partial sum would be misleading
                collected.add(UNIQUE, sum(reading.unique_bytes for reading in readings), *labels)
                collected.add(PROPORTIONAL, sum(reading.proportional_bytes for reading in readings), *labels)
        return collected

    def _read(self, process: psutil.Process, read_start: float) -> MemoryReading:
        """Read the memory of a process. Returns the default for an ended process and without permission."""
        try:
            info = from_psutil(f"process {process.pid}", process.memory_full_info)
        except psutil.Error:  # the process has ended or belongs to a different user
            return MemoryReading()
        read_end = self._monotonic()
        wait_seconds = max(MIN_INTERVAL_SECONDS, (read_end - read_start) / MAX_LOCK_RATIO)
        return MemoryReading(
            unique_bytes=info.uss,
            proportional_bytes=info.pss,
            read_at=read_end,
            due_at=read_end + wait_seconds,
            stale_at=read_end + max(RETENTION_SECONDS, RETENTION_INTERVALS * wait_seconds),
        )
