"""View model of the status page: exporter, runs, ranks and GPUs.

Unknown numbers are None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from exporter.collectors.status import CollectorStatus
from exporter.feed.runs import Job
from exporter.status.formatting import clock, rank_names
from exporter.status.history import History, RankOfRun
from exporter.status.samples import SampleIndex
from exporter.status.thresholds import STRAGGLER_RATIO
from exporter.training.phases import PHASES, WORK_PHASES

SILENT_AFTER_SECONDS = 15.0
"""Snapshot age above which a living process is silent: it is probably stopped, or blocked in the kernel. If a run has silent ranks and has
completed no step for this time, the silent ranks are the cause."""
EXIT_TOLERANCE_SECONDS = 1.0
"""Time by which the exit of a process may precede its last snapshot, because the exit is estimated."""
OVERDUE_SECONDS = 30.0
"""Minimum time without a finished step after which the time counts neither as work nor as badput, as in run:training_step_overdue:seconds."""
LATE_SECONDS = 60.0
"""Minimum time without a finished step after which a step is late."""
OVERDUE_STEPS = LATE_STEPS = 5.0
"""Multiple of the longest of the last 100 steps that an overdue and a late step must also exceed. While a rank is in a phase of `PAUSING_CAUSES`, the
limit is longer by this factor again."""
PAUSING_CAUSES = frozenset({"init", "compile", "checkpoint_load", "checkpoint_save", "validation"})
"""Causes of badput whose phases delay a step without a problem."""
THERMAL_REASON = "thermal"
"""Reason that covers all thermal reasons. Drivers before 575 report only this thermal reason."""
MAX_CLOCK_EVENT_RATE = 1.1
"""Rate of a throttling counter above which the counter has jumped, for example after a reload of the driver."""
SPECIFIC_THROTTLE_REASONS = ("hw_thermal", "sw_thermal", "hw_power_brake")
"""Reasons for throttling by heat or by the power supply that drivers from 575 on report separately."""
ENDED_STATES = frozenset({"stopped", "finished", "failed", "lost"})
"""States of a run without processes."""
STOP_REASONS = frozenset(
    {
        "signal SIGINT",
        "signal SIGTERM",
        "reported: user",
        "reported: preemption",
        "exception KeyboardInterrupt",
    }
)
"""Exit reasons of a process that the user or the scheduler has stopped."""
PROCESS_STATE_ORDER = {"ended early": 0, "silent": 1, "hangs": 2, "stalled": 3, "slow": 4}
"""States of a process that need attention, with their position in the table of the ranks."""
_RANK_FAMILIES = {
    "training_feed_alive": "alive",
    "training_feed_last_update_timestamp_seconds": "updated_at",
    "training_last_progress_timestamp_seconds": "progress_at",
    "training_rank_compute_seconds": "compute_seconds",
    "training_rank_conflicts": "conflict_count",
}
"""Field of `Rank` for the value of each family."""


@dataclass(frozen=True, slots=True)
class StackFrame:
    """Function and source line of a call on a stack."""

    function: str
    location: str  # file:line


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Ranks that wait in the same function, with the stack of one of these ranks."""

    title: str
    rank: int  # rank whose stack is shown
    frames: tuple[StackFrame, ...]  # the innermost first


@dataclass(frozen=True, slots=True)
class Hang:
    """Explanation of a hanging run."""

    sentence: str
    groups: tuple[StackGroup, ...] = ()
    step: int | None = None  # last completed step
    has_odd_group: bool = True  # True if the first group differs from the others, and probably blocks them


@dataclass(frozen=True, slots=True)
class ExporterInfo:
    """State of the exporter itself; times are Unix times."""

    version: str
    node: str
    start_time: float
    now: float
    feed_directory: str
    not_ready: str | None = None  # the reason why scrapes are refused
    silent_jobs: Sequence[Job] = ()  # Python jobs under `run` that have recorded nothing
    hangs: Mapping[str, Hang] = field(default_factory=dict)  # by run


@dataclass(frozen=True, slots=True)
class NonfiniteValues:
    """Consecutive losses or gradient norms that are not finite, up to the latest value."""

    start: float  # Unix time of the first
    step: int | None  # step of the first, counted from 1; None before the training loop
    saved_step: int | None  # step of the last known save before `step`; None if unknown

    @property
    def start_text(self) -> str:
        """Step and time of the first value, such as "step 82 (14:27:03 UTC)"."""
        return clock(self.start) if self.step is None else f"step {self.step:,} ({clock(self.start)})"


@dataclass(frozen=True, slots=True)
class Run:
    """Training run."""

    name: str
    state: str  # label of `training_run_state`; "" if unknown
    reason: str  # reason for the end of the run; "" while it runs or if unknown
    state_since: float | None  # Unix time
    fastest_seconds: Mapping[str, float]  # compute time per step of the fastest rank, by pipeline stage
    phase_rates: Mapping[str, float]  # seconds per second in each phase, summed over ranks, last minute
    is_ended: bool  # True if no process of the run is left
    is_partial: bool  # True if the run has ranks on other nodes, which are missing from sums
    ranks: tuple[int, ...]  # ranks of this node
    reporting_count: int  # number of these ranks that report; sums and rates do not cover the other ranks
    world_size: int | None
    # Unix time of the first failure of a rank of this node whose process has not restarted.
    failed_at: float | None = None
    nonfinite: Mapping[str, NonfiniteValues] = field(default_factory=dict)  # by kind: "loss" or "grad"
    # Unix time of the last completed step if the next step is late; otherwise None
    last_step_before_delay: float | None = None

    has_finished_early: bool = False  # True if the run finished before its step target
    # Time in which a run in a phase of work has finished no step, although a step is overdue: neither work nor badput, because the step
    # may still finish. 0 if no step is overdue, and once the run counts as hung.
    undecided_seconds: float = 0.0

    @property
    def is_stepping(self) -> bool:
        """True if rates and losses are current."""
        is_overdue = self.undecided_seconds > 0 or self.state in {"hung", "stalled", "ending"}
        return not self.is_ended and not is_overdue

    @property
    def remote_count(self) -> int:
        """Number of ranks that are not on this node; 0 if the world size or the ranks of this node are unknown."""
        return max(0, (self.world_size or 0) - len(self.ranks)) if self.ranks else 0

    @property
    def has_rank_zero(self) -> bool:
        """True if rank 0, which reports step, loss and saves, runs on this node."""
        return 0 in self.ranks


@dataclass(slots=True)
class Rank:
    """Training process; times are Unix times."""

    run: str
    rank: str  # "" for a process without a rank
    worker: str  # slot among the processes of a rank
    role: str
    node: str = ""
    gpu: str = ""
    uuid: str = ""
    stage: str = ""  # pipeline stage, "" if unknown; ranks of the same stage do the same work
    alive: float | None = None  # 1 for a living process, 0 for an ended process, None if unknown
    updated_at: float | None = None
    phase: str = ""
    phase_since: float | None = None
    progress_at: float | None = None  # time of the last step
    compute_seconds: float | None = None  # compute time per step, without waits for other ranks
    conflict_count: float = 0.0  # number of other living processes with the same run and rank
    exited_at: float | None = None  # last exit without completing the training
    exit_reason: str = ""  # reason of that exit; "" without such an exit
    process_state: str = "unknown"  # unknown, alive, ended (with the run), or a key of `PROCESS_STATE_ORDER`
    is_slow: bool = False

    def reports(self, now: float) -> bool:
        """Return True if the process is alive and its snapshot is at most `SILENT_AFTER_SECONDS` old, or of unknown age."""
        return self.alive == 1 and (self.updated_at is None or now - self.updated_at <= SILENT_AFTER_SECONDS)

    @property
    def failed_at(self) -> float | None:
        """Time at which the latest process was killed, crashed or failed; None if it lives, was stopped or completed the training."""
        if self.alive != 0 or self.exited_at is None or self.exit_reason in STOP_REASONS:
            return None
        # An exit before the last snapshot is the exit of an earlier process of the rank.
        is_earlier = self.updated_at is not None and self.exited_at < self.updated_at - EXIT_TOLERANCE_SECONDS
        return None if is_earlier else self.exited_at

    @property
    def phase_seconds(self) -> float | None:
        """Duration of the phase at the last snapshot; None if unknown."""
        if self.phase_since is None or self.updated_at is None:
            return None
        return max(0.0, self.updated_at - self.phase_since)

    @property
    def title(self) -> str:
        """Name of the process, such as "rank 5 of night"."""
        return f"{f'rank {self.rank}' if self.rank else self.role or 'process'} of {self.run}"


@dataclass(frozen=True, slots=True)
class Gpu:
    """GPU of this node, with the ranks that use it."""

    index: str
    uuid: str
    is_up: bool
    # largest share of the last minute with throttling for a thermal or power reason, with the reason; the reasons overlap
    throttled_ratio: float | None
    throttling_reason: str
    holders: frozenset[RankOfRun]  # ranks that use the GPU now
    last_holders: frozenset[RankOfRun]  # `holders`, or the last known holders

    @property
    def runs(self) -> frozenset[str]:
        """Runs that use the GPU now."""
        return frozenset(run for run, _ in self.holders)

    @property
    def title(self) -> str:
        """Name of the GPU with its holders, such as "GPU 3 (rank 5 of night)"."""
        if not self.last_holders:
            return f"GPU {self.index}"
        numbers = [int(rank) for _, rank in self.last_holders if rank.isdecimal()]
        ranks = f"{rank_names(numbers)} of " if numbers else ""
        runs = ", ".join(sorted({run for run, _ in self.last_holders}))
        return f"GPU {self.index} ({'' if self.holders else 'last held by '}{ranks}{runs})"


@dataclass(frozen=True, slots=True)
class View:
    """Content of the status page, with the ranks that need attention first."""

    exporter: ExporterInfo
    samples: SampleIndex
    history: History
    collectors: Sequence[CollectorStatus]
    runs: Mapping[str, Run]
    ranks: Sequence[Rank]
    gpus: Sequence[Gpu]


def build_view(
    exporter: ExporterInfo, samples: SampleIndex, history: History, collectors: Sequence[CollectorStatus] = ()
) -> View:
    """Build the content of the status page from the samples and their history."""
    ranks = _ranks(samples)
    names = {rank.run for rank in ranks if rank.run}
    for family in ("training_wall_seconds_total", "training_run_state", "training_steps_total"):
        names |= {labels["run"] for labels, _ in samples.select(family)}
    runs = {name: _run(name, samples, history, ranks, exporter.now) for name in sorted(names)}
    for rank in ranks:
        rank.is_slow = _is_slow(rank, runs.get(rank.run))
        rank.process_state = _process_state(rank, runs.get(rank.run), exporter)
    gpus = [_gpu(labels, up, samples, history, ranks) for labels, up in samples.select("gpu_up")]
    ranks.sort(
        key=lambda rank: (
            PROCESS_STATE_ORDER.get(rank.process_state, len(PROCESS_STATE_ORDER)),
            rank.process_state == "ended",
        )
    )
    gpus.sort(key=lambda gpu: gpu.index.zfill(12))
    return View(exporter, samples, history, collectors, runs, ranks, gpus)


def _run(name: str, samples: SampleIndex, history: History, ranks: Sequence[Rank], now: float) -> Run:
    """Build the view of a run from the ranks of this node and the families of the run."""
    states = samples.select("training_run_state", run=name)
    state = next((labels["state"] for labels, holds in states if holds), "")
    own_ranks = [rank for rank in ranks if rank.run == name]
    numbers = {rank.rank for rank in own_ranks if rank.rank}
    # Processes without a rank, such as torchrun's agent, count only if no process has a rank.
    alive_values = [rank.alive for rank in own_ranks if rank.alive is not None and (rank.rank or not numbers)]
    outcome = next((labels for labels, _ in samples.select("training_run_outcome_info", run=name)), {})
    phase_rates = {phase: history.compute_last_rate("phase", name, phase) or 0.0 for phase in PHASES}
    fastest_seconds: dict[str, float] = {}
    for rank in own_ranks:
        if rank.alive != 0 and rank.compute_seconds:
            seconds = rank.compute_seconds
            fastest_seconds[rank.stage] = min(seconds, fastest_seconds.get(rank.stage, seconds))
    return Run(
        name=name,
        state=state,
        reason=outcome.get("reason", ""),
        state_since=samples.value("training_run_state_since_timestamp_seconds", run=name),
        fastest_seconds=fastest_seconds,
        phase_rates={phase: rate for phase, rate in phase_rates.items() if rate > 0},
        is_ended=state in ENDED_STATES or (bool(alive_values) and not any(alive_values)),
        is_partial=_is_partial(name, samples, numbers),
        ranks=tuple(sorted(int(number) for number in numbers if number.isdecimal())),
        reporting_count=len({rank.rank for rank in own_ranks if rank.rank.isdecimal() and rank.reports(now)}),
        world_size=_rounded(samples.value("training_world_size", run=name)),
        nonfinite=_nonfinite_values(name, samples, history),
        failed_at=min((rank.failed_at for rank in own_ranks if rank.failed_at is not None), default=None),
        last_step_before_delay=_last_step_before_delay(name, samples, own_ranks, now)
        if state == "running"
        else None,
        has_finished_early=state == "finished"
        and (samples.value("training_step", run=name) or 0.0)
        < (samples.value("training_step_target", run=name) or 0.0),
        undecided_seconds=_undecided_seconds(name, samples, own_ranks, now) if state == "running" else 0.0,
    )


def _first_progress_at(ranks: Sequence[Rank]) -> float | None:
    """Return the time of the last step of the lowest rank, from which the ledger counts a hang; None without a step."""
    return next((rank.progress_at for rank in ranks if rank.progress_at is not None), None)


def _undecided_seconds(name: str, samples: SampleIndex, ranks: Sequence[Rank], now: float) -> float:
    """Return `Run.undecided_seconds` of a running run, up to its last snapshot."""
    last_progress_at = max((rank.progress_at for rank in ranks if rank.progress_at is not None), default=None)
    first_progress_at = _first_progress_at(ranks)
    longest_seconds = samples.value("training_step_longest_seconds", run=name)
    if last_progress_at is None or first_progress_at is None or longest_seconds is None:
        return 0.0
    limit_seconds = max(OVERDUE_SECONDS, OVERDUE_STEPS * longest_seconds)
    if now - last_progress_at <= limit_seconds or not any(rank.phase in WORK_PHASES for rank in ranks):
        return 0.0
    updated_at = max((rank.updated_at for rank in ranks if rank.updated_at is not None), default=now)
    return max(0.0, updated_at - first_progress_at)


def _nonfinite_values(name: str, samples: SampleIndex, history: History) -> dict[str, NonfiniteValues]:
    """Return the kinds of values whose latest value is not finite."""
    values: dict[str, NonfiniteValues] = {}
    for labels, start in samples.select("training_nonfinite_since_timestamp_seconds", run=name):
        step = _rounded(samples.value("training_nonfinite_since_step", run=name, kind=labels["kind"]))
        saved_steps = [saved for _, saved in history.read_levels("saved step", name) if saved is not None]
        current = samples.value("training_checkpoint_last_step", run=name)
        saved_steps += [] if current is None else [current]
        earlier = [saved for saved in saved_steps if step is not None and saved < step]
        values[labels["kind"]] = NonfiniteValues(start, step, _rounded(max(earlier, default=None)))
    return values


def _last_step_before_delay(
    name: str, samples: SampleIndex, ranks: Sequence[Rank], now: float
) -> float | None:
    """Return the time of the last step if the next step is late, usually minutes before the run counts as hung; otherwise None."""
    last_progress_at = max((rank.progress_at for rank in ranks if rank.progress_at is not None), default=None)
    longest_seconds = samples.value("training_step_longest_seconds", run=name)
    if last_progress_at is None or longest_seconds is None:
        return None
    limit_seconds = max(LATE_SECONDS, LATE_STEPS * longest_seconds)
    if any(PHASES[rank.phase].badput in PAUSING_CAUSES for rank in ranks if rank.phase in PHASES):
        limit_seconds *= LATE_STEPS
    return _first_progress_at(ranks) if now - last_progress_at > limit_seconds else None


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)


def _is_partial(name: str, samples: SampleIndex, numbers: set[str]) -> bool:
    """Return True if ranks of the run are on other nodes: by the world size if it is known, and otherwise by the number of nodes."""
    world_size = samples.value("training_world_size", run=name)
    if world_size is not None and numbers:
        return world_size > len(numbers)
    info = next((labels for labels, _ in samples.select("training_run_info", run=name)), {})
    return info.get("nodes", "") not in {"", "0", "1"}


def _gpu(
    labels: Mapping[str, str], up_value: float, samples: SampleIndex, history: History, ranks: Sequence[Rank]
) -> Gpu:
    """Build the view of a GPU. Its holders are the ranks that report it, otherwise the processes that NVML lists on it."""
    uuid = labels["uuid"]
    holders = {(rank.run, rank.rank) for rank in ranks if rank.uuid == uuid and rank.alive != 0} or {
        (process.get("run", ""), process.get("rank", ""))
        for process, _ in samples.select("training_process_gpu_memory_bytes", uuid=uuid)
    }
    if not holders:
        # If the driver reports process ids of another PID namespace, the energy shares still name the run.
        shares = samples.select("training_energy_share_ratio", component="gpu", device=uuid)
        holders = {(owner.get("run", ""), "") for owner, ratio in shares if ratio > 0}
    reasons = (*SPECIFIC_THROTTLE_REASONS, THERMAL_REASON)
    ratios = {
        reason: ratio
        for reason in reasons
        if (ratio := clock_event_ratio(history.compute_last_rate("clock events", uuid, reason))) is not None
    }
    throttling_reason = max(ratios, key=lambda reason: ratios[reason], default="")
    return Gpu(
        index=labels["gpu"],
        uuid=uuid,
        is_up=up_value == 1,
        throttled_ratio=ratios.get(throttling_reason),
        throttling_reason=throttling_reason,
        holders=frozenset(holders),
        last_holders=_best_known_holders(frozenset(holders), history.find_last_holders(uuid)),
    )


def clock_event_ratio(rate: float | None) -> float | None:
    """Return the rate of a throttling counter as a share of the time, or None if the counter is unknown or has jumped."""
    return None if rate is None or rate > MAX_CLOCK_EVENT_RATE else min(rate, 1.0)


def _best_known_holders(
    holders: frozenset[RankOfRun], last_holders: frozenset[RankOfRun]
) -> frozenset[RankOfRun]:
    """Return the current holders of a GPU, or the last known holders if no holder is known now.

    The last known holders also replace current holders without ranks of the same runs.
    """
    runs = {run for run, _ in holders}
    has_ranks = any(rank for _, rank in holders)
    is_replaced = not holders or (not has_ranks and runs == {run for run, _ in last_holders})
    return last_holders if is_replaced else holders


def _ranks(samples: SampleIndex) -> list[Rank]:
    """Return the processes that the families name, sorted by run and rank. `process_state` and `is_slow` are not set yet."""
    ranks: dict[tuple[str, ...], Rank] = {}

    def find_or_add(labels: Mapping[str, str]) -> Rank:
        run, number, worker, role = (labels.get(name, "") for name in ("run", "rank", "worker", "role"))
        key = (run, number, worker, "" if number else role)  # some families of a rank have no role
        return ranks.setdefault(key, Rank(run, number, worker, role))

    for family, attribute in _RANK_FAMILIES.items():
        for labels, value in samples.select(family):
            setattr(find_or_add(labels), attribute, value)
    for labels, _ in samples.select("training_rank_info"):
        rank = find_or_add(labels)
        for attribute in ("role", "node", "gpu", "uuid"):
            setattr(rank, attribute, labels.get(attribute, ""))
        rank.stage = labels.get("label_stage", "")
    for labels, value in samples.select("training_phase_active"):
        if value == 1:
            find_or_add(labels).phase = labels["phase"]
    for labels, value in samples.select("training_rank_last_exit_timestamp_seconds"):
        rank = find_or_add(labels)
        rank.exited_at, rank.exit_reason = value, labels["reason"]
    for labels, value in samples.select("training_phase_active_since_timestamp_seconds"):
        find_or_add(labels).phase_since = value
    return sorted(ranks.values(), key=lambda rank: (rank.run, rank.rank.zfill(12), rank.worker, rank.role))


def _process_state(rank: Rank, run: Run | None, exporter: ExporterInfo) -> str:
    """Return the state of a process, as described at `Rank.process_state`. A process that has made no step yet does not hang."""
    now = exporter.now
    if not rank.alive:
        if rank.alive is None:
            return "unknown"
        has_failed_elsewhere = rank.failed_at is not None and run is not None and not run.has_rank_zero
        is_early = run is not None and (not run.is_ended or has_failed_elsewhere)
        return "ended early" if rank.rank and is_early else "ended"
    if not rank.reports(now):
        return "silent"
    if run is not None and run.state == "hung" and rank.progress_at is not None:
        return "hangs"
    if run is not None and (run.state == "stalled" or run.undecided_seconds):
        return "stalled"
    return "slow" if rank.is_slow else "alive"


def _is_slow(rank: Rank, run: Run | None) -> bool:
    """Return True if the fastest rank of the same pipeline stage needs less than `STRAGGLER_RATIO` of the rank's compute time.

    Only compute time is compared: the step time of all ranks is equal, because they wait for the straggler.
    """
    seconds = run and run.fastest_seconds.get(rank.stage)
    return bool(seconds and seconds < STRAGGLER_RATIO * (rank.compute_seconds or 0.0))
