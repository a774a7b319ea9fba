"""What on the status page needs somebody: each line says what is wrong, of what, and since when.

Used in the sidecar, on a worker thread of the web server. The thresholds are those of the alert rules where there is
one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from exporter.status.elements import duration
from exporter.status.history import NONFINITE
from exporter.status.view import Rank, Run, View
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


class Concern(NamedTuple):
    """One line; urgent when somebody should get up for it."""

    urgent: bool
    text: str


def concerns(seen: View) -> list[Concern]:
    """Everything that is wrong, the urgent first."""
    found = [*_of_the_exporter(seen), *_of_ranks(seen), *_of_runs(seen), *_of_gpus(seen)]
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
    living = {rank.run for rank in seen.ranks if rank.alive}
    for rank in seen.ranks:
        run = seen.runs.get(rank.run)
        of = f"{f'rank {rank.rank}' if rank.rank else rank.role or 'a process'} of {rank.run}"
        if is_stopped(rank, now=now):
            silent = duration(now - (rank.updated or now))
            yield Concern(True, f"{of} lives but has told nothing for {silent}: stopped, or stuck")
        elif is_hanging(rank, run, now=now):
            still = duration(now - (rank.progress or now))
            yield Concern(True, f"{of} has finished no step for {still}, now in {rank.phase or '?'}")
        elif rank.alive == 0 and rank.run in living and rank.rank:
            yield Concern(True, f"{of} has ended while other ranks live")
        if rank.rivals:
            more = f"{rank.rivals:.0f} more" if rank.rivals > 1 else "another"
            remedy = "give one of the jobs another run name"
            yield Concern(True, f"{more} living process trains as {of}: {remedy}")
        usual, spent = run and run.save_seconds, rank.phase_seconds
        saves = rank.alive and rank.phase.startswith("checkpoint_save")
        if saves and usual and spent and spent > max(SLOW_SAVE_TIMES * usual, SLOW_SAVE_SECONDS):
            yield Concern(True, f"{of} has been saving for {duration(spent)}, usually {duration(usual)}")


def _of_runs(seen: View) -> Iterator[Concern]:
    for name, run in seen.runs.items():
        ranks = [rank for rank in seen.ranks if rank.run == name]
        since = "" if run.since is None else f" {duration(max(0.0, seen.about.now - run.since))} ago"
        why = f": {run.reason}" if run.reason else ""
        if run.state in {"failed", "lost"}:
            what = "failed" if run.state == "failed" else "was lost"
            yield Concern(True, f"{name} {what}{since} and has not begun again{why}")
        elif run.state == "stalled":
            yield Concern(False, f"{name} has made no step for long{why}")
        elif run.state == "hung" and not any(is_hanging(rank, run, now=seen.about.now) for rank in ranks):
            yield Concern(True, f"{name} hangs{why}")
        # Stragglers: their own work takes longer than the others', which wait for them.
        own = {rank.rank: rank.compute_seconds for rank in ranks if rank.alive and rank.compute_seconds}
        fastest = min(own.values(), default=0.0)
        for number, seconds in own.items():
            if fastest < STRAGGLER_RATIO * seconds:
                slow = f"rank {number} of {name} is slow: {duration(seconds)} of its own in a step"
                yield Concern(False, f"{slow}, the fastest {duration(fastest)}")
        if run.pace is not None and run.pace[0] > SLOWER_RATIO * run.pace[1]:
            now, before = map(duration, run.pace)
            yield Concern(False, f"{name} is slower: {now} a step, {before} in the hour before")
        if seen.past.growth(NONFINITE, name):
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
        if (gpu.throttled_ratio or 0.0) > THROTTLED_RATIO:
            share = f"{100 * (gpu.throttled_ratio or 0.0):.0f} %"
            yield Concern(False, f"heat or power held GPU {gpu.index} back for {share} of the last minute")
        elif margin is not None and margin < NEAR_LIMIT_CELSIUS:
            yield Concern(False, f"GPU {gpu.index} is {margin:.0f} °C from its limit")


def _of_the_exporter(seen: View) -> Iterator[Concern]:
    if seen.about.not_ready is not None:
        yield Concern(True, f"not ready: {seen.about.not_ready}")
    for job in seen.about.silent_jobs:
        if job.silence is not None:
            told = f"run {job.run} records nothing: {job.silence.found}; remedy: {job.silence.remedy}"
            yield Concern(True, told)
    for status in seen.collectors:
        if status.success is False:
            yield Concern(False, f"collector {status.name} fails: {status.message or status.reason}")
    if dropped := seen.readings.total("exporter_series_dropped_total"):
        yield Concern(False, f"{dropped:.0f} series did not fit on the metrics page")
    if withheld := seen.readings.value("exporter_ledger_withheld_ranks"):
        yield Concern(False, f"totals of {withheld:.0f} ranks are withheld: the state cannot be written")
    if seen.readings.value("exporter_config_last_reload_successful") == 0:
        yield Concern(False, "the configuration could not be reloaded; the one before is in force")
