"""Content of the status page: exporter, runs, ranks and GPUs.

An unknown number is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from exporter.collectors.status import CollectorStatus
from exporter.feed.runs import Job
from exporter.status.history import History, Holder
from exporter.status.numbers import ranges
from exporter.status.readings import Readings
from exporter.status.thresholds import STRAGGLER_RATIO
from exporter.training.phases import PHASES

STOPPED_SECONDS = 15.0
"""Age of the snapshot of a process that is alive but stopped, or blocked in the kernel."""
HEAT = "thermal"
"""Any heat; drivers before 575 report no other thermal reason. Later drivers also report the parts of heat."""
HEAT_AND_POWER = ("hw_thermal", "sw_thermal", "hw_power_brake")
ENDED_STATES = frozenset({"stopped", "finished", "failed", "lost"})
"""States of a run without processes."""
TROUBLES = {"ended early": 0, "silent": 1, "hangs": 2, "slow": 3}
"""Conditions of a process that need attention, in the order of the table."""
_OF_RANKS = {
    "training_feed_alive": "alive",
    "training_feed_last_update_timestamp_seconds": "updated",
    "training_last_progress_timestamp_seconds": "progress",
    "training_rank_compute_seconds": "compute_seconds",
    "training_rank_conflicts": "rivals",
}
"""Families by the field of `Rank` that holds their value."""


@dataclass(frozen=True, slots=True)
class StackFrame:
    """A frame of a stack."""

    function: str
    location: str  # file:line


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Ranks that wait at the same place, with the stack of a rank."""

    title: str
    rank: int
    frames: tuple[StackFrame, ...]  # the innermost first


@dataclass(frozen=True, slots=True)
class Hang:
    """The explanation of a hanging run."""

    sentence: str
    groups: tuple[StackGroup, ...] = ()
    step: int | None = None


@dataclass(frozen=True, slots=True)
class About:
    """The exporter itself; times are Unix times."""

    version: str
    node: str
    started: float
    now: float
    feed_directory: str
    not_ready: str | None = None  # the reason why scrapes are refused
    silent_jobs: Sequence[Job] = ()  # jobs of `run` without a feed
    hangs: Mapping[str, Hang] = field(default_factory=dict)  # by run


@dataclass(frozen=True, slots=True)
class Run:
    """A run; `state` is the label of `training_run_state`, "" if unknown."""

    name: str
    state: str
    reason: str
    since: float | None
    fastest_seconds: Mapping[str, float]  # by pipeline stage, own work of the fastest rank in a step
    phases: Mapping[str, float]  # seconds per second of all ranks in each phase, last minute
    ended: bool  # True if the run has no process any more
    is_partial: bool  # True if sums over ranks lack the ranks of other nodes
    ranks: tuple[int, ...]  # ranks of this node
    reporting: int  # number of these ranks that are alive and report; sums and rates have no other ranks
    world_size: int | None

    @property
    def steps_now(self) -> bool:
        """Return True if rates and losses are current."""
        return not self.ended and self.state not in {"hung", "stalled", "ending"}

    @property
    def has_rank_zero(self) -> bool:
        """Return True if rank 0, which reports step, loss and saves, runs on this node."""
        return 0 in self.ranks


@dataclass(slots=True)
class Rank:
    """A training process; times are Unix times."""

    run: str
    rank: str  # "" for a process without a rank
    worker: str  # slot among the processes of a rank
    role: str
    node: str = ""
    gpu: str = ""
    uuid: str = ""
    stage: str = ""  # pipeline stage, "" if unknown; ranks of the same stage do the same work
    alive: float | None = None
    updated: float | None = None
    phase: str = ""
    phase_since: float | None = None
    progress: float | None = None  # time of the last step
    compute_seconds: float | None = None  # own work in a step, without waits
    rivals: float = 0.0  # further processes that are alive with the same run and rank
    condition: str = "unknown"  # unknown, alive, ended (with its run), or one of `TROUBLES`
    is_slow: bool = False

    def reports(self, now: float) -> bool:
        """Return True if the process is alive and its snapshot is not old."""
        return self.alive == 1 and (self.updated is None or now - self.updated <= STOPPED_SECONDS)

    @property
    def phase_seconds(self) -> float | None:
        """Return the duration of the phase at the last snapshot."""
        if self.phase_since is None or self.updated is None:
            return None
        return max(0.0, self.updated - self.phase_since)

    @property
    def title(self) -> str:
        """Return the name of the process."""
        return f"{f'rank {self.rank}' if self.rank else self.role or 'process'} of {self.run}"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU."""

    index: str
    uuid: str
    up: bool
    throttled_ratio: float | None  # share of the last minute with clocks reduced by heat or power
    holders: frozenset[Holder]  # that hold the card now
    last_holders: frozenset[Holder]  # the same, or those that held the card last

    @property
    def runs(self) -> frozenset[str]:
        """Return the runs that hold the card now."""
        return frozenset(run for run, _ in self.holders)

    @property
    def title(self) -> str:
        """Return the name of the card with its holder, such as "GPU 3 (rank 5 of night)"."""
        if not self.last_holders:
            return f"GPU {self.index}"
        numbers = [int(rank) for _, rank in self.last_holders if rank.isdecimal()]
        ranks = f"rank{'s' if len(numbers) > 1 else ''} {ranges(numbers)} of " if numbers else ""
        runs = ", ".join(sorted({run for run, _ in self.last_holders}))
        return f"GPU {self.index} ({'' if self.holders else 'last held by '}{ranks}{runs})"


@dataclass(frozen=True, slots=True)
class View:
    """The content of the page; ranks in trouble are first."""

    about: About
    readings: Readings
    past: History
    collectors: Sequence[CollectorStatus]
    runs: Mapping[str, Run]
    ranks: Sequence[Rank]
    gpus: Sequence[Gpu]


def view(about: About, readings: Readings, past: History, collectors: Sequence[CollectorStatus] = ()) -> View:
    """Return the content of the page."""
    ranks = _ranks(readings)
    names = {rank.run for rank in ranks if rank.run}
    for family in ("training_wall_seconds_total", "training_run_state", "training_steps_total"):
        names |= {labels["run"] for labels, _ in readings.rows(family)}
    runs = {name: _run(name, readings, past, ranks, about.now) for name in sorted(names)}
    for rank in ranks:
        rank.is_slow = _is_slow(rank, runs.get(rank.run))
        rank.condition = _condition(rank, runs.get(rank.run), about)
    gpus = [_gpu(labels, up, readings, past, ranks) for labels, up in readings.rows("gpu_up")]
    ranks.sort(key=lambda rank: TROUBLES.get(rank.condition, len(TROUBLES)))
    gpus.sort(key=lambda each: each.index.zfill(12))
    return View(about, readings, past, collectors, runs, ranks, gpus)


def _run(name: str, readings: Readings, past: History, ranks: Sequence[Rank], now: float) -> Run:
    states = readings.rows("training_run_state", run=name)
    state = next((labels["state"] for labels, holds in states if holds), "")
    own_ranks = [rank for rank in ranks if rank.run == name]
    numbers = {rank.rank for rank in own_ranks if rank.rank}
    alive = [rank.alive for rank in own_ranks if rank.alive is not None and (rank.rank or not numbers)]
    why = next((labels for labels, _ in readings.rows("training_run_outcome_info", run=name)), {})
    phases = {phase: past.recent("phase", name, phase) or 0.0 for phase in PHASES}
    fastest: dict[str, float] = {}
    for rank in own_ranks:
        if rank.alive != 0 and rank.compute_seconds:
            own = rank.compute_seconds
            fastest[rank.stage] = min(own, fastest.get(rank.stage, own))
    return Run(
        name=name,
        state=state,
        reason=why.get("reason", ""),
        since=readings.value("training_run_state_since_timestamp_seconds", run=name),
        fastest_seconds=fastest,
        phases={phase: seconds for phase, seconds in phases.items() if seconds > 0},
        ended=state in ENDED_STATES or (bool(alive) and not any(alive)),
        is_partial=_is_partial(name, readings, numbers),
        ranks=tuple(sorted(int(number) for number in numbers if number.isdecimal())),
        reporting=len({rank.rank for rank in own_ranks if rank.rank.isdecimal() and rank.reports(now)}),
        world_size=_whole(readings.value("training_world_size", run=name)),
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _is_partial(name: str, readings: Readings, numbers: set[str]) -> bool:
    world_size = readings.value("training_world_size", run=name)
    if world_size is not None and numbers:
        return world_size > len(numbers)
    info = next((labels for labels, _ in readings.rows("training_run_info", run=name)), {})
    return info.get("nodes", "") not in {"", "0", "1"}


def _gpu(
    labels: Mapping[str, str], up: float, readings: Readings, past: History, ranks: Sequence[Rank]
) -> Gpu:
    uuid = labels["uuid"]
    holders = {(rank.run, rank.rank) for rank in ranks if rank.uuid == uuid and rank.alive != 0} or {
        (found.get("run", ""), found.get("rank", ""))
        for found, _ in readings.rows("training_process_gpu_memory_bytes", uuid=uuid)
    }
    if not holders:
        # Where the driver reports process ids of another namespace, the shares of energy name the run.
        shares = readings.rows("training_energy_share_ratio", component="gpu", device=uuid)
        holders = {(found.get("run", ""), "") for found, share in shares if share > 0}
    throttled = [past.recent("clock events", uuid, reason) for reason in HEAT_AND_POWER]
    known = [ratio for ratio in throttled if ratio is not None]
    return Gpu(
        index=labels["gpu"],
        uuid=uuid,
        up=up == 1,
        throttled_ratio=sum(known) if known else past.recent("clock events", uuid, HEAT),
        holders=frozenset(holders),
        last_holders=_named(frozenset(holders), past.last_holders(uuid)),
    )


def _named(holders: frozenset[Holder], last: frozenset[Holder]) -> frozenset[Holder]:
    """Return the holders, or the last holders if these are the same runs with ranks, or the only known."""
    runs = {run for run, _ in holders}
    has_ranks = any(rank for _, rank in holders)
    return last if not holders or (not has_ranks and runs == {run for run, _ in last}) else holders


def _ranks(readings: Readings) -> list[Rank]:
    found: dict[tuple[str, ...], Rank] = {}

    def rank(labels: Mapping[str, str]) -> Rank:
        run, number, worker, role = (labels.get(name, "") for name in ("run", "rank", "worker", "role"))
        key = (run, number, worker, "" if number else role)
        return found.setdefault(key, Rank(run, number, worker, role))

    for family, attribute in _OF_RANKS.items():
        for labels, value in readings.rows(family):
            setattr(rank(labels), attribute, value)
    for labels, _ in readings.rows("training_rank_info"):
        found_rank = rank(labels)
        for attribute in ("role", "node", "gpu", "uuid"):
            setattr(found_rank, attribute, labels.get(attribute, ""))
        found_rank.stage = labels.get("label_stage", "")
    for labels, value in readings.rows("training_phase_active"):
        if value == 1:
            rank(labels).phase = labels["phase"]
    for labels, value in readings.rows("training_phase_active_since_timestamp_seconds"):
        rank(labels).phase_since = value
    return sorted(found.values(), key=lambda each: (each.run, each.rank.zfill(12), each.worker, each.role))


def _condition(rank: Rank, run: Run | None, about: About) -> str:
    now = about.now
    if not rank.alive:
        if rank.alive is None:
            return "unknown"
        return "ended early" if rank.rank and run is not None and not run.ended else "ended"
    if not rank.reports(now):
        return "silent"
    if run is not None and run.state == "hung" and rank.progress is not None:
        return "hangs"
    return "slow" if rank.is_slow else "alive"


def _is_slow(rank: Rank, run: Run | None) -> bool:
    """Return True if the fastest rank's own work is far shorter; other ranks wait for a straggler, so only own work differs."""
    fastest = run and run.fastest_seconds.get(rank.stage)
    return bool(fastest and fastest < STRAGGLER_RATIO * (rank.compute_seconds or 0.0))
