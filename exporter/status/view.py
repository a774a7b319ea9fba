"""View: the exporter, runs, ranks and GPUs as the status page tells them, and what of them needs somebody.

A number that nobody has is None. Nothing here knows HTML. Thresholds are those of the alert rules where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from exporter import diagnoses
from exporter.collectors.status import CollectorStatus
from exporter.feed.runs import Job
from exporter.status.elements import duration, share
from exporter.status.readings import DRAWN_SECONDS, History, Readings
from exporter.training.phases import PHASES

STOPPED_SECONDS = 15.0
"""A living process whose snapshot is older has stopped, or hangs in the kernel."""
STRAGGLER_RATIO = 0.75
"""Of the fastest rank's own work to another's."""
SLOWER_RATIO = 1.25
SLOW_SAVE_TIMES = 10.0
SLOW_SAVE_SECONDS = 10.0
"""A save is no matter before that, however short saves are."""
THROTTLED_RATIO = 0.05
NEAR_LIMIT_CELSIUS = 5.0
TROUBLES = {"silent": 0, "hangs": 1, "slow": 2}
"""Conditions of a living process, the worst first."""
_OF_RANKS = {
    "training_feed_alive": "alive",
    "training_feed_last_update_timestamp_seconds": "updated",
    "training_last_progress_timestamp_seconds": "progress",
    "training_rank_compute_seconds": "compute_seconds",
    "training_rank_conflicts": "rivals",
}
"""Families whose value a field of `Rank` has."""


@dataclass(frozen=True, slots=True)
class About:
    """The exporter itself; times are Unix times."""

    version: str
    node: str
    started: float
    now: float
    feed_directory: str
    not_ready: str | None = None  # why a scrape is refused
    silent_jobs: Sequence[Job] = ()  # jobs of `run` that record nothing
    hangs: Mapping[str, str] = field(default_factory=dict)  # explanation of each hanging run


@dataclass(frozen=True, slots=True)
class Run:
    """One run; its state is that of `training_run_state`, "" where that is not known."""

    name: str
    state: str
    reason: str
    since: float | None
    attempt_steps: float | None
    usual_seconds: float | None  # mean of the last hour's steps
    pace: tuple[float, float] | None  # mean of the last minutes' steps, and of those of the hour before
    save_seconds: float | None  # mean of its checkpoints' saves
    fastest_seconds: Mapping[str, float]  # by stage, own work in a step of the rank that needs the least
    phases: Mapping[str, float]  # seconds a second that its ranks spent in each phase in the last minute


@dataclass(slots=True)
class Rank:
    """One training process; times are Unix times."""

    run: str
    rank: str  # "" for a process of no rank
    worker: str  # its slot among the processes of one rank
    role: str
    node: str = ""
    gpu: str = ""
    uuid: str = ""
    stage: str = ""  # of a pipeline, where the job tells it: only ranks of one stage do the same work
    alive: float | None = None
    updated: float | None = None
    phase: str = ""
    phase_seconds: float | None = None  # for how long when it last told; that is not as late as now
    progress: float | None = None  # of its last step
    compute_seconds: float | None = None  # its own time in a step, without waiting
    rivals: float = 0.0  # further living processes that train as this rank of the run
    condition: str = "unknown"  # unknown, ended, alive, or one of `TROUBLES`

    @property
    def title(self) -> str:
        """The process in words."""
        return f"{f'rank {self.rank}' if self.rank else self.role or 'a process'} of {self.run}"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU."""

    index: str
    uuid: str
    up: bool
    throttled_ratio: float | None  # share of the last minute in which heat or the power supply held it back


@dataclass(frozen=True, slots=True)
class View:
    """All that the page tells; ranks in trouble come first."""

    about: About
    readings: Readings
    past: History
    collectors: Sequence[CollectorStatus]
    runs: Mapping[str, Run]
    ranks: Sequence[Rank]
    gpus: Sequence[Gpu]


class Concern(NamedTuple):
    """One line of what is wrong, of what and since when; urgent when somebody should get up for it."""

    urgent: bool
    text: str


def view(about: About, readings: Readings, past: History, collectors: Sequence[CollectorStatus] = ()) -> View:
    """Look at everything once."""
    ranks = _ranks(readings)
    names = {rank.run for rank in ranks if rank.run}
    names |= {labels["run"] for labels, _ in readings.rows("training_wall_seconds_total")}
    runs = {name: _run(name, readings, past, ranks) for name in sorted(names)}
    for rank in ranks:
        rank.condition = _condition(rank, runs.get(rank.run), about)
    gpus = [
        Gpu(labels["gpu"], labels["uuid"], up == 1, past.recent("throttled", labels["uuid"]))
        for labels, up in readings.rows("gpu_up")
    ]
    ranks.sort(key=lambda rank: TROUBLES.get(rank.condition, len(TROUBLES)))
    gpus.sort(key=lambda each: each.index.zfill(12))
    return View(about, readings, past, collectors, runs, ranks, gpus)


def _run(name: str, readings: Readings, past: History, ranks: Sequence[Rank]) -> Run:
    states = readings.rows("training_run_state", run=name)
    why = next((labels for labels, _ in readings.rows("training_run_outcome_info", run=name)), {})
    saves = readings.means("training_checkpoint_duration_seconds", run=name)
    phases = {phase: past.recent("phase", name, phase) or 0.0 for phase in PHASES}
    fastest: dict[str, float] = {}
    for rank in ranks:
        if rank.run == name and rank.alive and rank.compute_seconds:
            own = rank.compute_seconds
            fastest[rank.stage] = min(own, fastest.get(rank.stage, own))
    return Run(
        name=name,
        state=next((labels["state"] for labels, holds in states if holds), ""),
        reason=why.get("reason", ""),
        since=readings.value("training_run_state_since_timestamp_seconds", run=name),
        attempt_steps=readings.value("training_attempt_steps", run=name),
        usual_seconds=past.recent("step seconds", name, per="steps", seconds=DRAWN_SECONDS),
        pace=past.pace(name),
        save_seconds=max((spent / count for _, count, spent in saves if spent and count), default=None),
        fastest_seconds=fastest,
        phases={phase: seconds for phase, seconds in phases.items() if seconds > 0},
    )


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
        told = rank(labels)
        for attribute in ("role", "node", "gpu", "uuid"):
            setattr(told, attribute, labels.get(attribute, ""))
        told.stage = labels.get("label_stage", "")
    for labels, value in readings.rows("training_phase_active"):
        if value == 1:
            rank(labels).phase = labels["phase"]
    for labels, value in readings.rows("training_phase_active_since_timestamp_seconds"):
        told = rank(labels)
        if told.updated is not None:
            told.phase_seconds = max(0.0, told.updated - value)
    return sorted(found.values(), key=lambda each: (each.run, each.rank.zfill(12), each.worker, each.role))


def _condition(rank: Rank, run: Run | None, about: About) -> str:
    now = about.now
    if not rank.alive:
        return "unknown" if rank.alive is None else "ended"
    if rank.updated is not None and now - rank.updated > STOPPED_SECONDS:
        return "silent"
    if run is not None and run.state == "hung" and rank.progress is not None:
        return "hangs"
    # A straggler's own work takes longer than the others', which wait for it.
    fastest = run and run.fastest_seconds.get(rank.stage)
    return "slow" if fastest and fastest < STRAGGLER_RATIO * (rank.compute_seconds or 0.0) else "alive"


def concerns(seen: View) -> list[Concern]:
    """Everything that is wrong, the urgent first."""
    found = [*_of_the_exporter(seen), *_of_ranks(seen), *_of_runs(seen), *_of_gpus(seen)]
    return sorted(found, key=lambda each: not each.urgent)


def _of_ranks(seen: View) -> Iterator[Concern]:
    now = seen.about.now
    living = {rank.run for rank in seen.ranks if rank.alive and rank.rank}
    for rank in seen.ranks:
        run, of = seen.runs.get(rank.run), rank.title
        if rank.condition == "silent":
            silent = duration(now - (rank.updated or now))
            yield Concern(True, f"{of} lives but has told nothing for {silent}: stopped, or stuck")
        elif rank.condition == "hangs" and rank.run not in seen.about.hangs:
            still = duration(now - (rank.progress or now))
            yield Concern(True, f"{of} has finished no step for {still}, now in {rank.phase or '?'}")
        elif rank.condition == "slow":
            own = duration(rank.compute_seconds)
            fastest = duration(run.fastest_seconds.get(rank.stage) if run else None)
            yield Concern(False, f"{of} is slow: {own} of its own in a step, the fastest {fastest}")
        elif rank.condition == "ended" and rank.run in living and rank.rank:
            yield Concern(True, f"{of} has ended while other ranks live")
        if rank.rivals:
            more = f"{rank.rivals:.0f} more" if rank.rivals > 1 else "another"
            told = f"{more} living process trains as {of}"
            yield Concern(True, f"{told}: give one of the jobs another run name")
        usual, spent = run and run.save_seconds, rank.phase_seconds
        saves = rank.alive and rank.phase.startswith("checkpoint_save")
        if saves and usual and spent and spent > max(SLOW_SAVE_TIMES * usual, SLOW_SAVE_SECONDS):
            yield Concern(True, f"{of} has been saving for {duration(spent)}, usually {duration(usual)}")


def _of_runs(seen: View) -> Iterator[Concern]:
    hanging = {rank.run for rank in seen.ranks if rank.condition == "hangs"}
    for name, run in seen.runs.items():
        since = "" if run.since is None else f" {duration(max(0.0, seen.about.now - run.since))} ago"
        why = f": {run.reason}" if run.reason else ""
        if run.state in {"failed", "lost"}:
            what = "failed" if run.state == "failed" else "was lost"
            yield Concern(True, f"{name} {what}{since} and has not begun again{why}")
        elif name in seen.about.hangs:
            yield Concern(run.state == "hung", seen.about.hangs[name])
        elif run.state == "stalled":
            yield Concern(False, f"{name} has finished no step for long{why}")
        elif run.state == "hung" and name not in hanging:
            yield Concern(True, f"{name} hangs{why}")
        if run.pace is not None and run.pace[0] > SLOWER_RATIO * run.pace[1]:
            now, before = map(duration, run.pace)
            yield Concern(False, f"{name} is slower: {now} a step, {before} in the hour before")
        if seen.past.growth("nonfinite", name):
            yield Concern(True, f"values of {name} were not finite (NaN, infinite) a short while ago")


def _of_gpus(seen: View) -> Iterator[Concern]:
    value, present = seen.readings.value, len(seen.gpus)
    expected = value("gpu_devices_expected")
    if value("gpu_nvml_up") == 0 and expected:
        yield Concern(True, "NVML does not answer, though there are GPUs")
    if expected is not None and 0 < present < expected:
        yield Concern(True, f"{present} of {expected:.0f} GPUs are there")
    for gpu in seen.gpus:
        if not gpu.up:
            yield Concern(True, f"GPU {gpu.index} does not answer")
        if value("gpu_reset_required", uuid=gpu.uuid):
            yield Concern(True, f"GPU {gpu.index} must be reset before the driver works with it")
        elif value("gpu_recovery_action", uuid=gpu.uuid):
            yield Concern(True, f"the driver asks for a recovery of GPU {gpu.index}")
        margin = value("gpu_temperature_margin_celsius", uuid=gpu.uuid, threshold="nearest")
        if gpu.throttled_ratio and gpu.throttled_ratio > THROTTLED_RATIO:
            held = share(gpu.throttled_ratio)
            yield Concern(False, f"heat or power held GPU {gpu.index} back for {held} of the last minute")
        elif margin is not None and margin < NEAR_LIMIT_CELSIUS:
            yield Concern(False, f"GPU {gpu.index} is {margin:.0f} °C from its limit")


def _of_the_exporter(seen: View) -> Iterator[Concern]:
    if seen.about.not_ready is not None:
        yield Concern(True, str(diagnoses.NOT_READY.describe(reason=seen.about.not_ready)))
    for job in seen.about.silent_jobs:
        if job.silence is not None:
            told = f"run {job.run} records nothing: {job.silence.found}; remedy: {job.silence.remedy}"
            yield Concern(True, told)
    for status in seen.collectors:
        if status.success is False:
            reason = status.message or status.reason
            described = diagnoses.COLLECTOR_FAILS.describe(collector=status.name, reason=reason)
            yield Concern(False, described.found)
    value = seen.readings.value
    if dropped := seen.readings.total("exporter_series_dropped_total"):
        yield Concern(False, str(diagnoses.SERIES_DROPPED.describe(count=f"{dropped:.0f}")))
    if withheld := value("exporter_ledger_withheld_ranks"):
        yield Concern(False, str(diagnoses.TOTALS_WITHHELD.describe(count=f"{withheld:.0f}")))
    for entry in ("ledger", "owner.lock"):
        if value("exporter_feed_foreign_entry", entry=entry):
            foreign = diagnoses.FOREIGN_ENTRY_SHOWN.describe(entry=entry)
            yield Concern(False, str(foreign))
    if value("exporter_config_last_reload_successful") == 0:
        yield Concern(False, str(diagnoses.NOT_RELOADED.describe()))
