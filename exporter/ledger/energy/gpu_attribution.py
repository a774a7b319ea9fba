"""Attribution of a GPU's energy to the processes that hold the GPU, from start to exit.

The driver lists the processes of a GPU every two seconds. A process holds the GPU from the later of start and last list
without the process, until the exit or the first list without the process. Energy up to the last list is divided by the
holders at each time; energy after the list waits, unless all holders have exited. The energy of a process without a known
run is stored, and added to the run when the run is known.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from exporter.collectors.job import EnergyPoint, GpuListing, ProcessLife

EXCLUSIVE, SM_SHARE, MEMORY_SHARE = "exclusive", "sm_share", "memory_share"

STRANGER_SECONDS = 120.0
"""Retention of the energy of a process without a known run."""


@dataclass(frozen=True, slots=True)
class GpuSlice:
    """Part of a GPU's energy that a run used."""

    run: str
    pids: tuple[int, ...]  # of the run, on the GPU
    method: str
    ratio: float  # of the GPU's energy
    begin: float  # monotonic time
    end: float
    joules: float


@dataclass(slots=True)
class _Holder:
    """Process that holds the GPU."""

    pid: int
    begin: float
    end: float | None = None
    sm: float | None = None
    memory: int | None = None
    waiting: list[GpuSlice] = field(default_factory=list)  # of a process without a run


RunOf = Callable[[int], str]
"""Returns the run of a pid, "" if unknown."""


class GpuAttribution:
    """Attribution of a GPU's energy; `began` is the monotonic time of the first reading."""

    def __init__(self, began: float) -> None:
        self._divided_at = began
        self._listed_at = began
        self._holders: dict[int, _Holder] = {}

    @property
    def pids(self) -> set[int]:
        """Processes with energy that is not fully divided."""
        return set(self._holders)

    @property
    def divided_at(self) -> float:
        """Monotonic time up to which the energy is divided."""
        return self._divided_at

    def divide(
        self,
        history: Sequence[EnergyPoint],
        listing: GpuListing | None,
        lives: Mapping[int, ProcessLife],
        run_of: RunOf,
        *,
        until: float = inf,
    ) -> list[GpuSlice]:
        """Return the parts of the runs since the last call, up to `until` at most."""
        if listing is not None and listing.at > self._listed_at:
            self._update(listing, lives)
        for holder in self._holders.values():
            life = lives.get(holder.pid)
            if holder.end is None and life is not None and life.ended is not None:
                holder.end = max(holder.begin, life.ended)
        found = self._claimed(run_of)
        if not history:
            return found
        horizon = min(self._horizon(), history[-1].at, until)
        times = sorted(
            {
                max(self._divided_at, history[0].at),
                *(
                    moment
                    for holder in self._holders.values()
                    for moment in (holder.begin, holder.end)
                    if moment is not None and self._divided_at < moment < horizon
                ),
                horizon,
            }
        )
        for begin, end in itertools.pairwise(times):
            if begin >= self._divided_at and end <= horizon:
                joules = joules_at(history, end) - joules_at(history, begin)
                found += self._shares(begin, end, joules, run_of)
        self._divided_at = max(self._divided_at, horizon)
        for pid, holder in list(self._holders.items()):
            over = holder.end is not None and holder.end <= self._divided_at
            if over and (run_of(pid) or self._divided_at - (holder.end or 0.0) > STRANGER_SECONDS):
                del self._holders[pid]
        return found

    def _update(self, listing: GpuListing, lives: Mapping[int, ProcessLife]) -> None:
        """Update the holders from a new list of processes."""
        listed = {use.pid: use for use in listing.processes}
        for pid, use in listed.items():
            holder, life = self._holders.get(pid), lives.get(pid)
            if life is not None and life.ended is not None:
                continue  # the list is older than the end
            if holder is None or holder.end is not None:
                began = self._listed_at if life is None else life.began
                holder = self._holders[pid] = _Holder(pid, max(began, self._listed_at))
            holder.memory = use.memory_bytes
            holder.sm = use.ratios.get("sm", holder.sm)
        for pid, holder in self._holders.items():
            if pid not in listed and holder.end is None:
                life = lives.get(pid)
                holder.end = listing.at if life is None or life.ended is None else life.ended
        self._listed_at = listing.at

    def _horizon(self) -> float:
        """Return the time up to which the holders are known."""
        ends = [holder.end for holder in self._holders.values()]
        known = [end for end in ends if end is not None]
        if known and len(known) == len(ends):
            return max(self._listed_at, *known)
        return self._listed_at

    def _claimed(self, run_of: RunOf) -> list[GpuSlice]:
        """Return stored parts of processes whose run is now known."""
        found: list[GpuSlice] = []
        for holder in self._holders.values():
            run = run_of(holder.pid) if holder.waiting else ""
            if run:
                found += [
                    GpuSlice(run, each.pids, each.method, each.ratio, each.begin, each.end, each.joules)
                    for each in holder.waiting
                ]
                holder.waiting.clear()
        return found

    def _shares(self, begin: float, end: float, joules: float, run_of: RunOf) -> list[GpuSlice]:
        """Divide the energy of an interval in which the holders did not change."""
        holders = [
            holder
            for holder in self._holders.values()
            if holder.begin <= begin and (holder.end is None or holder.end >= end)
        ]
        if not holders or end <= begin:
            return []
        owners: dict[str, list[_Holder]] = {}
        for holder in holders:
            owners.setdefault(run_of(holder.pid) or f"\0{holder.pid}", []).append(holder)
        method, parts = _parts(owners)
        found = []
        for owner, ratio in parts.items():
            pids = tuple(holder.pid for holder in owners[owner])
            part = GpuSlice(owner, pids, method, ratio, begin, end, max(0.0, joules) * ratio)
            if owner.startswith("\0"):
                waiting = owners[owner][0].waiting
                waiting.append(part)
                while waiting and waiting[0].end < end - STRANGER_SECONDS:
                    waiting.pop(0)
            else:
                found.append(part)
        return found


def _parts(owners: Mapping[str, Sequence[_Holder]]) -> tuple[str, dict[str, float]]:
    """Return the method and the parts by the first measure with known values of all holders and a positive sum."""
    if len(owners) == 1:
        return EXCLUSIVE, dict.fromkeys(owners, 1.0)
    busy = {owner: [holder.sm for holder in holders] for owner, holders in owners.items()}
    memory = {owner: [holder.memory for holder in holders] for owner, holders in owners.items()}
    for method, amounts in ((SM_SHARE, busy), (MEMORY_SHARE, memory)):
        if any(amount is None for each in amounts.values() for amount in each):
            continue
        sums = {owner: float(sum(amount or 0 for amount in each)) for owner, each in amounts.items()}
        total = sum(sums.values())
        if total > 0:
            return method, {owner: amount / total for owner, amount in sums.items()}
    return MEMORY_SHARE, {}


def joules_at(history: Sequence[EnergyPoint], moment: float) -> float:
    """Return the energy at a time, interpolated between two points."""
    place = bisect.bisect_left([point.at for point in history], moment)
    if place == 0:
        return history[0].joules
    if place == len(history):
        return history[-1].joules
    before, after = history[place - 1], history[place]
    part = (moment - before.at) / (after.at - before.at)
    return before.joules + (after.joules - before.joules) * part
