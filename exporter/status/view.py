"""View: the exporter, runs, ranks and GPUs as the status page and its warnings need them.

Used in the sidecar, on a worker thread of the web server. What one family says alone is read where it is shown. A
number that nobody has is None, and is shown as missing. Nothing here knows HTML.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exporter.collectors.status import CollectorStatus
from exporter.feed.runs import Job
from exporter.status.history import KEPT_SECONDS, STEP_COUNT, STEP_SUM, THROTTLED, History
from exporter.status.readings import Readings

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
    telemetry_path: str
    not_ready: str | None = None  # why a scrape is refused
    silent_jobs: Sequence[Job] = ()  # jobs of `run` that record nothing


@dataclass(frozen=True, slots=True)
class Run:
    """One run; its state is that of `training_run_state`, "" where that is not known."""

    name: str
    state: str
    reason: str
    since: float | None
    attempt_steps: float | None
    usual_seconds: float | None  # mean of the steps of the last quarter of an hour
    pace: tuple[float, float] | None  # mean of the last minutes' steps, and of those of the hour before
    save_seconds: float | None  # mean of its checkpoints' saves


@dataclass(slots=True)
class Rank:
    """One training process; times are Unix times."""

    run: str
    rank: str  # "" for a process of no rank
    worker: str  # its slot among the processes of one rank
    role: str
    node: str = ""
    gpu: str = ""
    alive: float | None = None
    updated: float | None = None
    phase: str = ""
    phase_seconds: float | None = None  # for how long when it last told; that is not as late as now
    progress: float | None = None  # of its last step
    compute_seconds: float | None = None  # its own time in a step, without waiting
    rivals: float = 0.0  # further living processes that train as this rank of the run


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU."""

    index: str
    uuid: str
    up: bool
    throttled_ratio: float | None  # share of the last minute in which heat or the power supply held it back


@dataclass(frozen=True, slots=True)
class View:
    """All that the page tells."""

    about: About
    readings: Readings
    past: History
    collectors: Sequence[CollectorStatus]
    runs: Mapping[str, Run]
    ranks: Sequence[Rank]
    gpus: Sequence[Gpu]


def view(about: About, readings: Readings, past: History, collectors: Sequence[CollectorStatus] = ()) -> View:
    """Look at everything once."""
    ranks = _ranks(readings)
    names = {rank.run for rank in ranks if rank.run}
    names |= {labels["run"] for labels, _ in readings.rows("training_wall_seconds_total")}
    gpus = [
        Gpu(labels["gpu"], labels["uuid"], up == 1, past.recent(THROTTLED, labels["uuid"]))
        for labels, up in readings.rows("gpu_up")
    ]
    return View(
        about=about,
        readings=readings,
        past=past,
        collectors=collectors,
        runs={name: _run(name, readings, past) for name in sorted(names)},
        ranks=ranks,
        gpus=sorted(gpus, key=lambda each: each.index.zfill(12)),
    )


def _run(name: str, readings: Readings, past: History) -> Run:
    states = readings.rows("training_run_state", run=name)
    why = next((labels for labels, _ in readings.rows("training_run_state_info", run=name)), {})
    since = None
    with contextlib.suppress(ValueError):
        since = float(why.get("since", ""))
    saves = readings.means("training_checkpoint_duration_seconds", run=name)
    return Run(
        name=name,
        state=next((labels["state"] for labels, holds in states if holds), ""),
        reason=why.get("reason", ""),
        since=since,
        attempt_steps=readings.value("training_attempt_steps", run=name),
        usual_seconds=past.recent(STEP_SUM, name, per=STEP_COUNT, seconds=KEPT_SECONDS),
        pace=past.pace(name),
        save_seconds=max((spent / count for _, count, spent in saves if spent and count), default=None),
    )


def _ranks(readings: Readings) -> list[Rank]:
    found: dict[tuple[str, ...], Rank] = {}

    def rank(labels: Mapping[str, str]) -> Rank:
        run, number, worker, role = (labels.get(name, "") for name in ("run", "rank", "worker", "role"))
        return found.setdefault(
            (run, number, worker, "" if number else role), Rank(run, number, worker, role)
        )

    for family, field in _OF_RANKS.items():
        for labels, value in readings.rows(family):
            setattr(rank(labels), field, value)
    for labels, _ in readings.rows("training_rank_info"):
        told = rank(labels)
        told.role, told.node, told.gpu = (labels.get(name, "") for name in ("role", "node", "gpu"))
    for labels, value in readings.rows("training_phase_active"):
        if value == 1:
            rank(labels).phase = labels["phase"]
    for labels, value in readings.rows("training_phase_active_since_timestamp_seconds"):
        told = rank(labels)
        if told.updated is not None:
            told.phase_seconds = max(0.0, told.updated - value)
    return sorted(found.values(), key=lambda each: (each.run, each.rank.zfill(12), each.worker, each.role))
