"""Unique and proportional memory of the job's processes.

The kernel walks all page tables for a reading, a third of a second for 8 GiB of small pages, and holds the memory lock of
the *trainer* meanwhile. A pass therefore has a time budget, processes with the oldest reading come first, and a
reading holds the lock for at most a thousandth of the time.
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

UNIQUE = FamilySpec(
    name="training_process_unique_bytes",
    type="gauge",
    unit="bytes",
    labels=("run", "rank", "role"),
    help=(
        "Memory that no other process shares (USS). Absent without permission (same user, or ptrace), and while"
        " the time budget does not suffice."
    ),
    source="/proc/<pid>/smaps_rollup Private_*",
)
PROPORTIONAL = FamilySpec(
    name="training_process_proportional_bytes",
    type="gauge",
    unit="bytes",
    labels=("run", "rank", "role"),
    help=(
        "Memory of the processes, shared memory divided by the number of sharers (PSS). Absent without permission (same user,"
        " or ptrace), and while the time budget does not suffice."
    ),
    source="/proc/<pid>/smaps_rollup Pss",
)
SPECS = (UNIQUE, PROPORTIONAL)

BUDGET_SECONDS = 0.5
"""Time within which a pass begins readings."""
DUTY = 1e-3
"""Largest share of the time for which the memory lock of a process is held."""
AGAIN_SECONDS = 55.0
"""Shortest time between two readings of a process; a new process is read in the next pass."""
FRESH_SECONDS = 180.0
"""Time for which a reading is published, longer for a process that is read rarely."""


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Memory of a process, and the monotonic times of the last and the next reading."""

    unique: int = 0
    proportional: int = 0
    at: float = -math.inf
    again_at: float = -math.inf
    stale_at: float = -math.inf


class ProcessMemoryCollector:
    """Collector of the memory of the job's processes by mapping."""

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
        pass_started = self._monotonic()
        for process, reading in sorted(self._readings.items(), key=lambda item: item[1].at):
            now = self._monotonic()
            if now - pass_started < BUDGET_SECONDS and now >= reading.again_at:
                with source(collected, f"process {process.pid}"):
                    self._readings[process] = self._read(process, now)
        now = self._monotonic()
        groups: dict[tuple[str, str, str], list[MemoryReading]] = {}
        for member in members:
            group = (member.run, member.rank, member.role)
            groups.setdefault(group, []).append(self._readings[member.process])
        for labels, readings in groups.items():
            if all(
                now < memory.stale_at for memory in readings
            ):  # a part of the sum would be a different number
                collected.add(UNIQUE, sum(memory.unique for memory in readings), *labels)
                collected.add(PROPORTIONAL, sum(memory.proportional for memory in readings), *labels)
        return collected

    def _read(self, process: psutil.Process, pass_started: float) -> MemoryReading:
        try:
            info = from_psutil(f"process {process.pid}", process.memory_full_info)
        except psutil.Error:  # ended, or of a different user
            return MemoryReading()
        ended = self._monotonic()
        wait = max(AGAIN_SECONDS, (ended - pass_started) / DUTY)
        return MemoryReading(info.uss, info.pss, ended, ended + wait, ended + max(FRESH_SECONDS, 1.5 * wait))
