"""What on the status page needs somebody: each line says what is wrong, of what, and since when.

Used in the sidecar, on a worker thread of the web server. The page's values come in, lines go out, the worst first.
The thresholds are those of the alert rules where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from exporter.status import history
from exporter.status.elements import duration
from exporter.status.history import History
from exporter.status.readings import Readings
from exporter.status.values import Rank, Run, View
from exporter.training.phases import PHASES

STOPPED_SECONDS = 15.0
"""A living process whose snapshot is older has stopped, or hangs in the kernel."""
HANG_SECONDS = 60.0
HANG_STEPS = 10.0
"""No step for so many usual ones, and at least so long, is a hang; the same as `training_run_state` goes by."""
STRAGGLER_RATIO = 0.75
"""Of the fastest rank's own work to another's."""
SLOWER_RATIO = 1.25
SLOW_SAVE_TIMES = 10.0
SLOW_SAVE_SECONDS = 10.0
"""A save is no matter before that, however short saves are."""
THROTTLED_RATIO = 0.05
NEAR_LIMIT_CELSIUS = 5.0
LONG_PHASES = frozenset(
    row.name for row in PHASES.values() if not row.work and not row.waiting and row.badput != "other"
)
"""In these no step is expected to end."""


@dataclass(frozen=True, slots=True)
class Concern:
    """One line.

    Attributes:
        urgent: Whether somebody should get up for it.
        text: What is wrong.
    """

    urgent: bool
    text: str


def concerns(seen: View, readings: Readings, past: History) -> list[Concern]:
    """Everything that is wrong, the urgent first."""
    found = [
        *_of_the_exporter(seen, readings),
        *_of_ranks(seen),
        *_of_runs(seen, past),
        *_of_gpus(seen, readings),
    ]
    return sorted(found, key=lambda each: not each.urgent)


def is_hanging(rank: Rank, run: Run | None, *, now: float) -> bool:
    """Whether a living rank has made no step for far longer than steps take; the first one may compile."""
    if not rank.alive or rank.progress is None or rank.phase in LONG_PHASES:
        return False
    if run is not None and run.attempt_steps == 0:
        return False
    usual_seconds = (run and run.usual_seconds) or 0.0
    return now - rank.progress > max(HANG_STEPS * usual_seconds, HANG_SECONDS)


def is_stopped(rank: Rank, *, now: float) -> bool:
    """Whether a living process has long told nothing."""
    return bool(rank.alive) and rank.updated is not None and now - rank.updated > STOPPED_SECONDS


def _of_ranks(seen: View) -> Iterator[Concern]:
    now = seen.about.now
    runs = {run.name: run for run in seen.runs}
    living = {rank.run for rank in seen.ranks if rank.alive}
    for rank in seen.ranks:
        name = f"rank {rank.rank}" if rank.rank else rank.role or "a process"
        of = f"{name} of {rank.run}"
        if is_stopped(rank, now=now):
            silent = duration(now - (rank.updated or now))
            yield Concern(
                urgent=True, text=f"{of} lives but has told nothing for {silent}: stopped, or stuck"
            )
        elif is_hanging(rank, runs.get(rank.run), now=now):
            still = duration(now - (rank.progress or now))
            yield Concern(
                urgent=True, text=f"{of} has finished no step for {still}, now in {rank.phase or '?'}"
            )
        elif rank.alive is False and rank.run in living and rank.rank:
            yield Concern(urgent=True, text=f"{of} has ended while other ranks live")
        if rank.rivals:
            more = f"{rank.rivals:.0f} more" if rank.rivals > 1 else "another"
            told = f"{more} living process trains as {of}: give one of the jobs another run name"
            yield Concern(urgent=True, text=told)
        usual, spent = (run.save_seconds if (run := runs.get(rank.run)) else None), rank.phase_seconds
        saves = rank.alive and rank.phase.startswith("checkpoint_save")
        if saves and usual and spent and spent > max(SLOW_SAVE_TIMES * usual, SLOW_SAVE_SECONDS):
            told = f"{of} has been saving for {duration(spent)}, usually {duration(usual)}"
            yield Concern(urgent=True, text=told)


def _of_runs(seen: View, past: History) -> Iterator[Concern]:
    for run in seen.runs:
        yield from _of_state(run, seen)
        yield from _of_stragglers(run, seen)
        if run.pace is not None and run.pace[0] > SLOWER_RATIO * run.pace[1]:
            now, before = (duration(seconds) for seconds in run.pace)
            yield Concern(
                urgent=False, text=f"{run.name} is slower: {now} a step, {before} in the hour before"
            )
        if past.growth(history.NONFINITE, run.name):
            yield Concern(
                urgent=True, text=f"values of {run.name} were not finite (NaN, infinite) a short while ago"
            )


def _of_state(run: Run, seen: View) -> Iterator[Concern]:
    since = "" if run.since is None else f" {duration(max(0.0, seen.about.now - run.since))} ago"
    why = f": {run.reason}" if run.reason else ""
    if run.state in {"failed", "lost"}:
        what = "failed" if run.state == "failed" else "was lost"
        yield Concern(urgent=True, text=f"{run.name} {what}{since} and has not begun again{why}")
    elif run.state == "stalled":
        yield Concern(urgent=False, text=f"{run.name} has made no step for long{why}")
    elif run.state == "hung":
        told = (rank for rank in seen.ranks if rank.run == run.name)
        if not any(is_hanging(rank, run, now=seen.about.now) for rank in told):
            yield Concern(urgent=True, text=f"{run.name} hangs{why}")


def _of_stragglers(run: Run, seen: View) -> Iterator[Concern]:
    """Ranks whose own work takes longer than the others', which wait for them."""
    own = {
        rank.rank: rank.compute_seconds
        for rank in seen.ranks
        if rank.run == run.name and rank.alive and rank.compute_seconds
    }
    fastest = min(own.values(), default=0.0)
    for rank, seconds in own.items():
        if fastest < STRAGGLER_RATIO * seconds:
            told = f"rank {rank} of {run.name} is slow: {duration(seconds)} of its own in a step"
            yield Concern(urgent=False, text=f"{told}, the fastest {duration(fastest)}")


def _of_gpus(seen: View, readings: Readings) -> Iterator[Concern]:
    if readings.value("gpu_nvml_up") == 0 and seen.machine.gpus_expected:
        yield Concern(urgent=True, text="NVML does not answer, though there are GPUs")
    present, expected = len(seen.gpus), seen.machine.gpus_expected
    if expected is not None and seen.gpus and present < expected:
        yield Concern(urgent=True, text=f"{present} of {expected:.0f} GPUs are there")
    for gpu in seen.gpus:
        if gpu.up is False:
            yield Concern(urgent=True, text=f"GPU {gpu.index} does not answer")
        if readings.value("gpu_reset_required", uuid=gpu.uuid):
            yield Concern(urgent=True, text=f"GPU {gpu.index} must be reset before the driver works with it")
        elif readings.value("gpu_recovery_action", uuid=gpu.uuid):
            yield Concern(urgent=True, text=f"the driver asks for a recovery of GPU {gpu.index}")
        if (gpu.throttled_ratio or 0.0) > THROTTLED_RATIO:
            share = f"{100 * (gpu.throttled_ratio or 0.0):.0f} %"
            yield Concern(
                urgent=False, text=f"heat or power held GPU {gpu.index} back for {share} of the last minute"
            )
        elif gpu.margin_celsius is not None and gpu.margin_celsius < NEAR_LIMIT_CELSIUS:
            yield Concern(urgent=False, text=f"GPU {gpu.index} is {gpu.margin_celsius:.0f} °C from its limit")


def _of_the_exporter(seen: View, readings: Readings) -> Iterator[Concern]:
    if seen.about.not_ready is not None:
        yield Concern(urgent=True, text=f"not ready: {seen.about.not_ready}")
    for job in seen.about.silent_jobs:
        if job.silence is not None:
            told = f"run {job.run} records nothing: {job.silence.found}; remedy: {job.silence.remedy}"
            yield Concern(urgent=True, text=told)
    for status in seen.collectors:
        if status.success is False:
            yield Concern(
                urgent=False, text=f"collector {status.name} fails: {status.message or status.reason}"
            )
    dropped = readings.total("exporter_series_dropped_total")
    if dropped:
        yield Concern(urgent=False, text=f"{dropped:.0f} series did not fit on the metrics page")
    withheld = readings.value("exporter_ledger_withheld_ranks")
    if withheld:
        yield Concern(
            urgent=False, text=f"totals of {withheld:.0f} ranks are withheld: the state cannot be written"
        )
    if readings.value("exporter_config_last_reload_successful") == 0:
        yield Concern(
            urgent=False, text="the configuration could not be reloaded; the one before is in force"
        )
