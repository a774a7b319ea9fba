"""Attribution of a GPU's energy to the processes that hold the GPU, from start to exit.

The processes of a GPU are read from the driver every second. A listed process holds the GPU from its start, but not from before the last
list without the process. It holds the GPU until its exit or, if no exit is known, until the next list without the process. Energy up
to the last list is divided among the holders of each interval. Later energy waits for the next list, unless all holders have exited.
The energy of a process whose run is unknown is stored until the run is known.

The driver does not list a process that exits between two lists, or that runs in a different pid namespace. The feed may report
such a process later. The energy of times without a holder is therefore stored for a minute.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from exporter.collectors.job import EnergyPoint, GpuListing, ProcessLife
from exporter.ledger.energy.free_intervals import FreeInterval, FreeIntervals

# Methods of the division of a GPU's energy, values of the label `method`.
EXCLUSIVE = "exclusive"
SM_SHARE = "sm_share"
MEMORY_SHARE = "memory_share"

NOT_LISTED = "process_not_listed"
"""Reason of a gap: the driver never listed an exited process, and the GPU of the process is uncertain."""
SHARE_UNKNOWN = "share_unknown"
"""Reason of a gap: several runs used the GPU, and neither the utilization nor the memory of all processes is known and above 0."""

UNKNOWN_RUN_SECONDS = 120.0
"""Retention of the energy of a process without a known run."""
FREE_INTERVAL_SECONDS = 60.0
"""Retention of intervals without a holder, equal to the retention of energy readings."""
LIFE_TOLERANCE_SECONDS = 1.5
"""Tolerance when a lifetime from the feed is compared with the times of the driver's lists."""
MAX_IGNORED_PIDS = 4096
"""Maximum number of pids whose further reports by the feed are ignored. Further pids replace the oldest."""


@dataclass(frozen=True, slots=True)
class GpuSlice:
    """Part of a GPU's energy that a run used."""

    run: str  # of a stored slice, whose run is unknown: a NUL and the pid
    pids: tuple[int, ...]  # of the run, on the GPU
    method: str
    ratio: float  # of the GPU's energy
    start: float  # monotonic time
    end: float
    joules: float


@dataclass(frozen=True, slots=True)
class ReportedProcess:
    """Process that uses a GPU according to the feed."""

    life: ProcessLife
    has_used_cuda: bool  # False also if unknown
    has_gpu_name: bool  # False if the feed names no GPU and CUDA's default GPU is assumed
    is_listable: bool  # False if the sidecar cannot recognize the process in the driver's lists


@dataclass(slots=True)
class DividedEnergy:
    """Result of a division: slices of the runs, and the joules that belong to no run, by reason."""

    slices: list[GpuSlice] = field(default_factory=list)
    gap_joules: Counter[str] = field(default_factory=Counter)

    def add_gap(self, reason: str, joules: float) -> None:
        """Add energy that is attributed to no run."""
        self.gap_joules[reason] += joules  # type: ignore[assignment]  # typeshed: a Counter holds integers only


@dataclass(slots=True)
class _Holder:
    """Interval in which a process holds or held the GPU, with the use of the GPU."""

    pid: int  # or a negative number, see `GpuHolders`
    start: float  # monotonic time
    end: float | None = None  # None while the process holds the GPU
    sm_ratio: float | None = None  # None if unknown
    memory_bytes: int | None = None  # None if unknown
    stored_slices: list[GpuSlice] = field(default_factory=list)  # of a process whose run is unknown


FindRun = Callable[[int], str]
"""Function that returns the run of a pid, or an empty text if unknown."""


class GpuAttribution:
    """Attribution of a GPU's energy to runs; *start* is the first reading."""

    def __init__(self, start: EnergyPoint) -> None:
        self._divided_point = start
        self._listed_at = start.time
        self._list_times: deque[float] = deque()  # monotonic
        self._holders: dict[int, _Holder] = {}
        self._past_holders: list[_Holder] = []  # previous intervals of processes that hold the GPU again
        self._free_intervals = FreeIntervals()
        # A process that was listed, or whose energy was divided without a list, must not claim energy again when the feed
        # reports it. By pid: the latest possible start of this process. A process with a later start is a different process,
        # to which the kernel has given the pid again.
        self._ignored_start_by_pid: dict[int, float] = {}

    @property
    def pids(self) -> set[int]:
        """Pids of the holders whose energy is not fully divided, or whose run is not known yet."""
        return set(self._holders)

    @property
    def _all_holders(self) -> list[_Holder]:
        """Current and past holders that are not discarded yet."""
        return [*self._past_holders, *self._holders.values()]

    @property
    def divided_at(self) -> float:
        """Monotonic time up to which the energy is divided."""
        return self._divided_point.time

    def divide(
        self,
        history: Sequence[EnergyPoint],
        listings: Sequence[GpuListing],
        lives: Mapping[int, ProcessLife],
        find_run: FindRun,
        *,
        reported_processes: Sequence[ReportedProcess] = (),
        phases_until: float = inf,
    ) -> DividedEnergy:
        """Divide the energy since the last call among the runs, at most up to *phases_until*.

        Args:
            history: Energy readings, oldest first.
            listings: Lists of processes, oldest first; lists of previous calls are ignored.
            lives: Start and exit of the listed and the reported processes.
            find_run: Returns the run of a pid.
            reported_processes: Processes on this GPU according to the feed.
            phases_until: Monotonic time up to which the phases of the processes are known.
        """
        for listing in listings:
            if listing.time > self._listed_at:
                self._update_holders(listing, lives)
        if not self._list_times and history:
            # The driver has no process list: only the feed names holders.
            self._listed_at = history[-1].time
        division = DividedEnergy(self._take_claimed_slices(find_run))
        points = self._points(history)
        for process in reported_processes:
            is_never_listed = not (process.is_listable and self._list_times)
            if process.has_gpu_name and is_never_listed and process.life.ended_at is None:
                self._add_unlisted_holder(process.life, points, find_run, division)
        # The energy up to an exit is divided without waiting for the next list.
        for holder in self._holders.values():
            life = lives.get(holder.pid)
            if holder.end is None and life is not None and life.ended_at is not None:
                holder.end = max(holder.start, life.ended_at)
        if points:
            self._divide_until(
                points, min(self._horizon(), points[-1].time, phases_until), find_run, division
            )
            for process in reported_processes:
                self._add_exited_process(process, points, find_run, division)
        self._discard_divided(find_run)
        return division

    def _points(self, history: Sequence[EnergyPoint]) -> Sequence[EnergyPoint]:
        """Return the readings, after the last divided point if the first reading is later than this point."""
        if (
            history
            and history[0].time > self._divided_point.time
            and history[0].joules >= self._divided_point.joules
        ):
            return (self._divided_point, *history)
        return history

    def _divide_until(
        self, points: Sequence[EnergyPoint], horizon: float, find_run: FindRun, division: DividedEnergy
    ) -> None:
        """Divide the energy up to the monotonic time *horizon*, interval by interval between the starts and ends of holders."""
        changes_of_holders = {
            time
            for holder in self._all_holders
            for time in (holder.start, holder.end)
            if time is not None and self._divided_point.time < time < horizon
        }
        times = sorted({max(self._divided_point.time, points[0].time), *changes_of_holders, horizon})
        for start, end in itertools.pairwise(times):
            if start >= self._divided_point.time and end <= horizon:
                joules = joules_between(points, start, end)
                self._divide_interval(start, end, joules, find_run, division)
        if horizon > self._divided_point.time:
            self._divided_point = EnergyPoint(horizon, joules_at(points, horizon))

    def _update_holders(self, listing: GpuListing, lives: Mapping[int, ProcessLife]) -> None:
        """Update the holders from a new list of processes.

        A newly listed process holds the GPU from its start, but not from before the previous list. A process that is no longer listed held
        the GPU until its exit or, if no exit is known, until this list. A process that is listed again has a further interval. Negative
        numbers are in no list, and their holders do not change.
        """
        use_by_pid = {use.pid: use for use in listing.processes}
        for pid, use in use_by_pid.items():
            holder, life = self._holders.get(pid), lives.get(pid)
            if life is not None and life.ended_at is not None and life.ended_at <= listing.time:
                continue  # the process had exited by the time of the list
            if holder is None or (holder.end is not None and holder.end < listing.time):
                if holder is not None:
                    self._past_holders.append(holder)
                started_at = self._listed_at if life is None else life.started_at
                holder = self._holders[pid] = _Holder(pid, max(started_at, self._listed_at))
                self._ignore_reports(pid, listing.time)
            holder.memory_bytes = use.memory_bytes
            holder.sm_ratio = use.ratios.get("sm", holder.sm_ratio)
        for pid, holder in self._holders.items():
            if pid > 0 and pid not in use_by_pid and holder.end is None:
                life = lives.get(pid)
                holder.end = listing.time if life is None or life.ended_at is None else life.ended_at
        self._listed_at = listing.time
        self._list_times.append(listing.time)
        while self._list_times[0] < listing.time - FREE_INTERVAL_SECONDS:
            self._list_times.popleft()

    def _add_unlisted_holder(
        self, life: ProcessLife, points: Sequence[EnergyPoint], find_run: FindRun, division: DividedEnergy
    ) -> None:
        """Add a holder for a process that no list contains, and attribute the energy of the free intervals since its start."""
        if life.pid in self._holders or self._ignores_reports(life):
            return
        self._ignore_reports(life.pid, life.started_at + LIFE_TOLERANCE_SECONDS)
        self._claim_stored_slices(life, find_run, division)
        if points:
            for interval in self._free_intervals.take(life.started_at, self._divided_point.time):
                division.slices.append(self._exclusive_slice(life.pid, interval, points, find_run))
        self._holders[life.pid] = _Holder(life.pid, max(life.started_at, self._divided_point.time))

    def _add_exited_process(
        self,
        process: ReportedProcess,
        points: Sequence[EnergyPoint],
        find_run: FindRun,
        division: DividedEnergy,
    ) -> None:
        """Attribute the energy of a reported process that exited before a list contained it.

        Does nothing until the energy up to the exit is divided.
        """
        life = process.life
        if life.ended_at is None or life.ended_at > self._divided_point.time or self._ignores_reports(life):
            return
        self._ignore_reports(life.pid, life.ended_at)
        list_times = [
            listed_at
            for listed_at in self._list_times
            if process.is_listable and life.started_at <= listed_at <= life.ended_at
        ]
        # A list without the process shows that the process had not used the GPU until then.
        is_certain = process.has_gpu_name and (process.has_used_cuda or not list_times)
        if process.has_gpu_name and not process.is_listable:
            self._claim_stored_slices(life, find_run, division)
        for interval in self._free_intervals.take(max([life.started_at, *list_times]), life.ended_at):
            if is_certain:
                division.slices.append(self._exclusive_slice(life.pid, interval, points, find_run))
            else:
                division.add_gap(NOT_LISTED, joules_between(points, interval.start, interval.end))

    def _exclusive_slice(
        self, pid: int, interval: FreeInterval, points: Sequence[EnergyPoint], find_run: FindRun
    ) -> GpuSlice:
        """Return the slice of a process that alone held the GPU in a free interval."""
        joules = joules_between(points, interval.start, interval.end)
        return GpuSlice(
            run=find_run(pid),
            pids=(pid,),
            method=EXCLUSIVE,
            ratio=1.0,
            start=interval.start,
            end=interval.end,
            joules=joules,
        )

    def _claim_stored_slices(self, life: ProcessLife, find_run: FindRun, division: DividedEnergy) -> None:
        """Attribute the stored energy of holders without a known run whose lifetime is within the lifetime of the process.

        Such a holder is the same process, listed with its pid in a different pid namespace.
        """
        for holder in self._all_holders:
            is_within = life.ended_at is None or (holder.end or inf) <= life.ended_at + LIFE_TOLERANCE_SECONDS
            if (
                not find_run(holder.pid)
                and is_within
                and holder.start >= life.started_at - LIFE_TOLERANCE_SECONDS
            ):
                division.slices += [
                    replace(stored_slice, run=find_run(life.pid), pids=(life.pid,))
                    for stored_slice in holder.stored_slices
                ]
                holder.stored_slices.clear()

    def _horizon(self) -> float:
        """Return the time up to which all holders are known: the last list, or a later exit if all holders have exited."""
        ends = [holder.end for holder in self._all_holders]
        known_ends = [end for end in ends if end is not None]
        if known_ends and len(known_ends) == len(ends):
            return max(self._listed_at, *known_ends)
        return self._listed_at

    def _take_claimed_slices(self, find_run: FindRun) -> list[GpuSlice]:
        """Remove and return the stored slices of processes whose run has become known."""
        slices: list[GpuSlice] = []
        for holder in self._all_holders:
            run = find_run(holder.pid) if holder.stored_slices else ""
            if run:
                slices += [replace(stored_slice, run=run) for stored_slice in holder.stored_slices]
                holder.stored_slices.clear()
        return slices

    def _divide_interval(
        self, start: float, end: float, joules: float, find_run: FindRun, division: DividedEnergy
    ) -> None:
        """Divide the energy of an interval in which the holders did not change.

        Without a holder, the interval is stored as free. The energy of a process whose run is unknown is stored with the process. If
        no method of division applies, the energy is a gap, unless the runs of all holders are unknown.
        """
        if end <= start:
            return
        holders = [
            holder
            for holder in self._all_holders
            if holder.start <= start and (holder.end is None or holder.end >= end)
        ]
        if any(holder.pid < 0 for holder in holders):
            # Other pids in the list may be the same processes in a different pid namespace.
            holders = [holder for holder in holders if find_run(holder.pid)]
        if not holders:
            self._free_intervals.add(start, end)
            return
        # The owner is the run. For a process whose run is unknown, the owner is "\0" and the pid: no name of a run contains a NUL.
        holders_by_owner: dict[str, list[_Holder]] = {}
        for holder in holders:
            holders_by_owner.setdefault(find_run(holder.pid) or f"\0{holder.pid}", []).append(holder)
        shares = _owner_shares(holders_by_owner)
        if not shares.ratios and any(not owner.startswith("\0") for owner in holders_by_owner):
            division.add_gap(SHARE_UNKNOWN, joules)
        for owner, ratio in shares.ratios.items():
            owner_holders = holders_by_owner[owner]
            pids = tuple(holder.pid for holder in owner_holders)
            gpu_slice = GpuSlice(
                run=owner,
                pids=pids,
                method=shares.method,
                ratio=ratio,
                start=start,
                end=end,
                joules=joules * ratio,
            )
            if owner.startswith("\0"):
                stored_slices = owner_holders[0].stored_slices
                stored_slices.append(gpu_slice)
                while stored_slices and stored_slices[0].end < end - UNKNOWN_RUN_SECONDS:
                    stored_slices.pop(0)
            else:
                division.slices.append(gpu_slice)

    def _ignore_reports(self, pid: int, latest_start: float) -> None:
        """Ignore later reports of the feed about a process that had the pid and started by *latest_start*."""
        self._ignored_start_by_pid.pop(pid, None)  # inserted again as the newest entry
        self._ignored_start_by_pid[pid] = latest_start
        while len(self._ignored_start_by_pid) > MAX_IGNORED_PIDS:
            del self._ignored_start_by_pid[next(iter(self._ignored_start_by_pid))]

    def _ignores_reports(self, life: ProcessLife) -> bool:
        """Return True if the energy of the process was already divided, or is divided by the driver's lists."""
        return life.started_at <= self._ignored_start_by_pid.get(life.pid, -inf)

    def _discard_divided(self, find_run: FindRun) -> None:
        """Discard holders whose energy is divided, and free intervals that ended over `FREE_INTERVAL_SECONDS` ago.

        A holder whose run is unknown is kept for `UNKNOWN_RUN_SECONDS` after its exit, because the run may become known.
        """

        def can_be_discarded(holder: _Holder) -> bool:
            if holder.end is None or holder.end > self._divided_point.time:
                return False
            return bool(find_run(holder.pid)) or self._divided_point.time - holder.end > UNKNOWN_RUN_SECONDS

        self._holders = {pid: holder for pid, holder in self._holders.items() if not can_be_discarded(holder)}
        self._past_holders = [holder for holder in self._past_holders if not can_be_discarded(holder)]
        self._free_intervals.discard_before(self._divided_point.time - FREE_INTERVAL_SECONDS)


@dataclass(frozen=True, slots=True)
class _OwnerShares:
    """Share of each owner in the energy, and the method of the division."""

    method: str
    ratios: Mapping[str, float]  # by owner; empty if no method applies


def _owner_shares(holders_by_owner: Mapping[str, Collection[_Holder]]) -> _OwnerShares:
    """Return the shares by the first method whose values are known for all holders and have a positive sum."""
    if len(holders_by_owner) == 1:
        return _OwnerShares(EXCLUSIVE, dict.fromkeys(holders_by_owner, 1.0))
    sm_ratios = {
        owner: [holder.sm_ratio for holder in holders] for owner, holders in holders_by_owner.items()
    }
    memory_bytes = {
        owner: [holder.memory_bytes for holder in holders] for owner, holders in holders_by_owner.items()
    }
    for method, amounts_by_owner in ((SM_SHARE, sm_ratios), (MEMORY_SHARE, memory_bytes)):
        if any(amount is None for amounts in amounts_by_owner.values() for amount in amounts):
            continue
        sums = {
            owner: float(sum(amount or 0 for amount in amounts))
            for owner, amounts in amounts_by_owner.items()
        }
        total = sum(sums.values())
        if total > 0:
            return _OwnerShares(method, {owner: amount / total for owner, amount in sums.items()})
    return _OwnerShares(MEMORY_SHARE, {})


def joules_at(history: Sequence[EnergyPoint], moment: float) -> float:
    """Return the energy at a time, interpolated between two points, or the first or last energy outside the history."""
    index = bisect.bisect_left([point.time for point in history], moment)
    if index == 0:
        return history[0].joules
    if index == len(history):
        return history[-1].joules
    earlier, later = history[index - 1], history[index]
    elapsed_ratio = (moment - earlier.time) / (later.time - earlier.time)
    return earlier.joules + (later.joules - earlier.joules) * elapsed_ratio


def joules_between(history: Sequence[EnergyPoint], start: float, end: float) -> float:
    """Return the energy between two times."""
    return max(0.0, joules_at(history, end) - joules_at(history, start))
