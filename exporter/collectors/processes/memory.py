"""Process memory: what the processes of the job would free, and their fair share of what they map together.

Used in the sidecar, in the slow tier. The kernel walks all page tables for one number, a third of a second for 8 GiB of
small pages, and holds the memory lock of the *trainer* meanwhile: so a pass has a budget, those that were read longest
ago come first, and a process that is slow to read is read so seldom that it costs it a thousandth of its time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import psutil

from exporter.collectors.kernel_files import source
from exporter.collectors.processes.tree import Identity, Member
from exporter.families import Collected, table

(UNIQUE, PROPORTIONAL) = SPECS = table("""
training_process_unique_bytes{run,rank,role}: Memory that would be free if the processes ended, each on its
    own (USS). Absent without the right to read it (same user, or ptrace). Absent also while the time for it
    does not suffice. <- /proc/<pid>/smaps_rollup Private_*
training_process_proportional_bytes{run,rank,role}: Memory of the processes, what they share divided by the
    number of sharers (PSS). Absent without the right to read it (same user, or ptrace). Absent also while
    the time for it does not suffice. <- /proc/<pid>/smaps_rollup Pss
""")

BUDGET_SECONDS = 0.5
"""Time that a pass may begin to read in."""
DUTY = 1e-3
"""Share of a process's time for which its memory lock may be held."""
AGAIN_SECONDS = 55.0
"""A process is read again after so long at the earliest; one that is new is read in the next pass."""
FRESH_SECONDS = 180.0
"""A reading is shown for so long, and while a slow process waits for its next turn."""


class _Reading(NamedTuple):
    """What was read of a process, and when: monotonic seconds."""

    unique: int = 0
    proportional: int = 0
    at: float = -math.inf
    again_at: float = -math.inf
    stale_at: float = -math.inf


class ProcessMemoryCollector:
    """Reads the memory of the job's processes by mapping."""

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
        self._readings: dict[Identity, _Reading] = {}

    def collect(self) -> Collected:
        """Read as many processes as there is time for."""
        collected = Collected()
        members = self._members()
        self._readings = {each.identity: self._readings.get(each.identity, _Reading()) for each in members}
        begun = self._monotonic()
        for member in sorted(members, key=lambda member: self._readings[member.identity].at):
            now = self._monotonic()
            if now - begun < BUDGET_SECONDS and now >= self._readings[member.identity].again_at:
                with source(collected, f"process {member.stat.pid}"):
                    self._readings[member.identity] = self._read(member.stat.pid, now)
        now = self._monotonic()
        groups: dict[tuple[str, ...], list[_Reading]] = {}
        for member in members:
            group = (member.run, member.rank, member.role)
            groups.setdefault(group, []).append(self._readings[member.identity])
        for labels, readings in groups.items():
            if all(now < each.stale_at for each in readings):  # a part of the sum would be another number
                collected.add(UNIQUE, sum(each.unique for each in readings), *labels)
                collected.add(PROPORTIONAL, sum(each.proportional for each in readings), *labels)
        return collected

    def _read(self, pid: int, begun: float) -> _Reading:
        try:
            found = psutil.Process(pid).memory_full_info()
        except psutil.Error:  # gone, or somebody else's
            return _Reading()
        ended = self._monotonic()
        wait = max(AGAIN_SECONDS, (ended - begun) / DUTY)
        return _Reading(found.uss, found.pss, ended, ended + wait, ended + max(FRESH_SECONDS, 1.5 * wait))
