"""Conditions that need attention, with the run, rank or GPU and the time of the start.

Thresholds equal those of the alert rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from exporter import diagnoses
from exporter.status.numbers import age, duration, share
from exporter.status.readings import Increase
from exporter.status.view import Gpu, Run, StackGroup, View

SLOWER_RATIO = 1.25
SLOW_SAVE_TIMES = 10.0
SLOW_SAVE_SECONDS = 10.0
"""Minimum duration of a slow save."""
THROTTLED_RATIO = 0.05
NEAR_LIMIT_CELSIUS = 5.0
RECENT_SECONDS = 600.0
"""Window of the alerts on NaN, failed saves and ECC errors: older events are not urgent."""
XID_URGENT_SECONDS = 4200.0
"""Window of the alert on critical Xids plus the `keep_firing_for` of the alert."""
CRITICAL_XIDS = frozenset((46, 48, 54, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158))
"""Xids of the alert GpuXidCritical."""
WARNING_XIDS = frozenset((94, *range(144, 150), 150))
"""Xids of the alert GpuXidWarning."""


@dataclass(frozen=True, slots=True)
class Concern:
    """A condition that needs attention."""

    urgent: bool
    text: str
    stacks: tuple[StackGroup, ...] = ()


def concerns(seen: View) -> list[Concern]:
    """Return all concerns, the urgent first."""
    found = [*_of_the_exporter(seen), *_of_ranks(seen), *_of_runs(seen), *_of_gpus(seen)]
    return sorted(found, key=lambda each: not each.urgent)


def _of_ranks(seen: View) -> Iterator[Concern]:
    now = seen.about.now
    living = {rank.run for rank in seen.ranks if rank.alive and rank.rank}
    for rank in seen.ranks:
        run, name = seen.runs.get(rank.run), rank.title
        updated = "" if rank.updated is None else f" {age(rank.updated, now)}"
        if rank.condition == "silent":
            silent = duration(now - (rank.updated or now))
            yield Concern(True, f"{name} is alive but has not reported for {silent}: stopped or blocked")
        elif rank.condition == "hangs" and rank.run not in seen.about.hangs:
            still = duration(now - (rank.progress or now))
            phase = f", phase {rank.phase}" if rank.phase else ""
            yield Concern(True, f"{name} has finished no step for {still}{phase}")
        elif rank.condition == "slow":
            own = duration(rank.compute_seconds)
            fastest = duration(run.fastest_seconds.get(rank.stage) if run else None)
            yield Concern(False, f"{name} is slow: {own} of own work per step, the fastest rank {fastest}")
        elif rank.condition == "ended" and rank.run in living and rank.rank:
            yield Concern(True, f"{name} ended{updated} before the other ranks")
        if rank.rivals:
            more = f"{rank.rivals:.0f} more processes train" if rank.rivals > 1 else "a second process trains"
            yield Concern(True, f"{more} as {name}: choose a different run name for either job")
        usual, spent = run and run.save_seconds, rank.phase_seconds
        saves = rank.alive and rank.phase.startswith("checkpoint_save")
        if saves and usual and spent and spent > max(SLOW_SAVE_TIMES * usual, SLOW_SAVE_SECONDS):
            yield Concern(True, f"{name} has been saving for {duration(spent)}, usually {duration(usual)}")


def _of_runs(seen: View) -> Iterator[Concern]:
    hanging = {rank.run for rank in seen.ranks if rank.condition == "hangs"}
    for name, run in seen.runs.items():
        if run.state in {"failed", "lost"}:
            outcome = "failed" if run.state == "failed" else "was lost"
            yield Concern(True, f"{name} {outcome}{_since(seen, run)} and has not restarted{_reason(run)}")
        elif name in seen.about.hangs:
            hang = seen.about.hangs[name]
            yield Concern(run.state == "hung", hang.sentence, hang.groups)
        elif run.state == "stalled":
            yield Concern(False, f"{name} stalled{_since(seen, run)}: a step is overdue{_reason(run)}")
        elif run.state == "hung" and name not in hanging:
            yield Concern(True, f"{name} hung{_since(seen, run)}: a step is overdue{_reason(run)}")
        if not run.ended:
            yield from _of_a_living_run(seen, run)


def _of_a_living_run(seen: View, run: Run) -> Iterator[Concern]:
    name = run.name
    if run.pace is not None and run.pace[0] > SLOWER_RATIO * run.pace[1]:
        now, before = map(duration, run.pace)
        yield Concern(False, f"{name} is slower: {now} per step, {before} in the hour before")
    if increase := seen.past.increase("nonfinite", name):
        values = "loss or gradient norm" if increase.count == 1 else "losses or gradient norms"
        text = f"{increase.count:.0f} {values} of {name} NaN or infinite, {_times(seen, increase)}"
        yield Concern(_is_recent(seen, increase), text)
    if increase := seen.past.increase("failed saves", name):
        saves = "save" if increase.count == 1 else "saves"
        text = f"{increase.count:.0f} {saves} of {name} failed, {_times(seen, increase)}"
        yield Concern(_is_recent(seen, increase), text)


def _since(seen: View, run: Run) -> str:
    return "" if run.since is None else f" {age(run.since, seen.about.now)}"


def _reason(run: Run) -> str:
    return f": {run.reason}" if run.reason else ""


def _is_recent(seen: View, increase: Increase) -> bool:
    return seen.about.now - increase.last < RECENT_SECONDS


def _times(seen: View, increase: Increase) -> str:
    first, last = (age(at, seen.about.now) for at in (increase.first, increase.last))
    return first if increase.count == 1 or first == last else f"first {first}, last {last}"


def _of_gpus(seen: View) -> Iterator[Concern]:
    value, present = seen.readings.value, len(seen.gpus)
    expected = value("gpu_devices_expected")
    if value("gpu_nvml_up") == 0 and expected:
        yield Concern(True, "NVML does not answer, but GPUs are expected")
    if expected is not None and 0 < present < expected:
        yield Concern(True, f"only {present} of {expected:.0f} GPUs found")
    for gpu in seen.gpus:
        if not gpu.up:
            yield Concern(True, f"{_name(seen, gpu)} does not answer")
        if value("gpu_reset_required", uuid=gpu.uuid):
            yield Concern(True, f"{_name(seen, gpu)} needs a reset before the driver can use the card")
        elif value("gpu_recovery_action", uuid=gpu.uuid):
            yield Concern(True, f"the driver requests a recovery of {_name(seen, gpu)}")
        yield from _of_xids(seen, gpu)
        yield from _of_memory_errors(seen, gpu)
        margin = value("gpu_temperature_margin_celsius", uuid=gpu.uuid, threshold="nearest")
        if gpu.throttled_ratio and gpu.throttled_ratio > THROTTLED_RATIO:
            held = share(gpu.throttled_ratio)
            yield Concern(False, f"heat or power slowed {_name(seen, gpu)} for {held} of the last minute")
        elif margin is not None and margin < NEAR_LIMIT_CELSIUS:
            yield Concern(False, f"{_name(seen, gpu)} is {margin:.0f} °C below the limit")


def _name(seen: View, gpu: Gpu) -> str:
    ranks = [rank.title for rank in seen.ranks if gpu.uuid and rank.uuid == gpu.uuid and rank.alive]
    return f"GPU {gpu.index}{f' ({ranks[0]})' if ranks else ''}"


def _of_xids(seen: View, gpu: Gpu) -> Iterator[Concern]:
    for labels, at in seen.readings.rows("gpu_xid_last_timestamp_seconds", uuid=gpu.uuid):
        xid = int(labels["xid"]) if labels["xid"].isdecimal() else 0
        if xid not in CRITICAL_XIDS | WARNING_XIDS:
            continue
        urgent = xid in CRITICAL_XIDS and seen.about.now - at < XID_URGENT_SECONDS
        count = seen.readings.value("gpu_xid_errors_total", uuid=gpu.uuid, xid=labels["xid"]) or 1
        times = f", {count:.0f} times" if count > 1 else ""
        yield Concern(urgent, f"{_name(seen, gpu)} reported Xid {xid} {age(at, seen.about.now)}{times}")


def _of_memory_errors(seen: View, gpu: Gpu) -> Iterator[Concern]:
    if seen.readings.value("gpu_remapped_rows_failed", uuid=gpu.uuid):
        yield Concern(True, f"{_name(seen, gpu)}: a memory row could not be remapped; replace the card")
    elif seen.readings.value("gpu_remapped_rows_pending", uuid=gpu.uuid):
        yield Concern(False, f"{_name(seen, gpu)}: a remapped memory row needs a reset of the card")
    count = seen.readings.total("gpu_ecc_errors_total", uuid=gpu.uuid, kind="uncorrected")
    if not count:
        return
    increase = seen.past.increase("uncorrected", gpu.uuid)
    last = f"last {age(increase.last, seen.about.now)}" if increase else "none in the recorded hour"
    errors = "error" if count == 1 else "errors"
    text = f"{_name(seen, gpu)}: {count:.0f} uncorrected ECC {errors} since the driver was loaded, {last}"
    yield Concern(increase is not None and _is_recent(seen, increase), text)


def _of_the_exporter(seen: View) -> Iterator[Concern]:
    if seen.about.not_ready is not None:
        yield Concern(True, str(diagnoses.NOT_READY.describe(reason=seen.about.not_ready)))
    for job in seen.about.silent_jobs:
        if job.silence is not None:
            text = f"run {job.run} records nothing: {job.silence.found}; remedy: {job.silence.remedy}"
            yield Concern(True, text)
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
    for labels, _ in seen.readings.rows("exporter_feed_foreign_entry"):
        yield Concern(False, str(diagnoses.FOREIGN_ENTRY_SHOWN.describe(entry=labels["entry"])))
    if value("exporter_config_last_reload_successful") == 0:
        yield Concern(False, str(diagnoses.NOT_RELOADED.describe()))
