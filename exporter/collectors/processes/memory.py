"""Process memory: what the processes of the job would free, and their fair share of what they map together.

Used in the sidecar, in the slow tier. The members that the collector of processes has found come in. The kernel
walks all page tables for one number, which takes a third of a second for 8 GiB of small pages, and it holds the
memory lock of the *trainer* meanwhile: so a pass has a budget, those that were read longest ago come first, and a
process that is slow to read is read so seldom that it costs it a thousandth of its time. No threads.

The proportional size is the one that adds up over processes: DataLoader workers share most of what is resident
with their trainer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from exporter.collectors.kernel_files import source
from exporter.collectors.processes.families import MEMORY_SPECS, PROPORTIONAL, UNIQUE
from exporter.collectors.processes.tree import Identity, Member
from exporter.families import Collected

BUDGET_SECONDS = 0.5
"""Time that a pass may begin to read in."""
DUTY = 1e-3
"""Share of a process's time for which its memory lock may be held."""
AGAIN_SECONDS = 55.0
"""A process is read again after so long at the earliest; one that is new is read in the next pass."""
FRESH_SECONDS = 180.0
"""A reading is shown for so long, and while a slow process waits for its next turn."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """What was read of a process, and when: monotonic seconds."""

    unique: int
    proportional: int
    at: float
    again_at: float

    @property
    def stale_at(self) -> float:
        return self.at + max(FRESH_SECONDS, 1.5 * (self.again_at - self.at))


class ProcessMemoryCollector:
    """Reads the memory of the job's processes by mapping.

    Args:
        members: Gives the living processes.
        monotonic: Seconds.
        budget_seconds: Of one pass.
    """

    name = "process_memory"
    specs = MEMORY_SPECS

    def __init__(
        self,
        *,
        members: Callable[[], Sequence[Member]] = tuple,
        monotonic: Callable[[], float] = time.monotonic,
        budget_seconds: float = BUDGET_SECONDS,
    ) -> None:
        self._members = members
        self._monotonic = monotonic
        self._budget_seconds = budget_seconds
        self._readings: dict[Identity, _Reading] = {}

    def collect(self) -> Collected:
        """Read as many processes as there is time for."""
        collected = Collected()
        members = self._members()
        living = {member.identity for member in members}
        self._readings = {who: each for who, each in self._readings.items() if who in living}
        begun = self._monotonic()
        for member in sorted(members, key=self._last_read):
            known = self._readings.get(member.identity)
            now = self._monotonic()
            if now - begun >= self._budget_seconds:
                break
            if known is None or now >= known.again_at:
                with source(collected, f"process {member.stat.pid}"):
                    self._read(member)
        self._add_sums(members, collected)
        return collected

    def _last_read(self, member: Member) -> float:
        known = self._readings.get(member.identity)
        return float("-inf") if known is None else known.at

    def _read(self, member: Member) -> None:
        begun = self._monotonic()
        try:
            found = psutil.Process(member.stat.pid).memory_full_info()
        except psutil.Error:  # gone, or somebody else's
            self._readings.pop(member.identity, None)
            return
        ended = self._monotonic()
        self._readings[member.identity] = _Reading(
            found.uss, found.pss, ended, ended + max(AGAIN_SECONDS, (ended - begun) / DUTY)
        )

    def _add_sums(self, members: Sequence[Member], collected: Collected) -> None:
        now = self._monotonic()
        groups: dict[tuple[str, ...], list[_Reading | None]] = {}
        for member in members:
            labels: tuple[str, ...] = (member.owner.run, member.owner.rank, member.role)
            reading = self._readings.get(member.identity)
            fresh = reading is not None and now < reading.stale_at
            groups.setdefault(labels, []).append(reading if fresh else None)
        unique: dict[tuple[str, ...], float] = {}
        proportional: dict[tuple[str, ...], float] = {}
        for labels, readings in groups.items():
            known = [reading for reading in readings if reading is not None]
            if len(known) == len(readings):  # a part of the sum would be another number
                unique[labels] = sum(reading.unique for reading in known)
                proportional[labels] = sum(reading.proportional for reading in known)
        collected.add_family(UNIQUE, unique)
        collected.add_family(PROPORTIONAL, proportional)
