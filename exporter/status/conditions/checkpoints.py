"""Conditions of checkpoints: hanging, failed and overdue saves, and space for the next checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from exporter.status.condition import AlertSeverity, Condition, Match
from exporter.status.conditions.runs import count_text, unsaved_steps_text
from exporter.status.formatting import clock, duration, rank_names, share, size
from exporter.status.history import Increase
from exporter.status.thresholds import CHECKPOINT_HANG_RATIO, CHECKPOINT_OVERDUE_INTERVALS
from exporter.status.view import View

MIN_HANG_SECONDS = 60.0
"""Shortest duration of a hanging save, however short the usual save is."""
FAILED_SECONDS = 3600.0
"""Time range of the alert on failed saves."""
SAVE_PHASES = frozenset({"checkpoint_save_sync", "checkpoint_save_async"})
NEARLY_FULL_RATIO = 0.2
"""Free share of a file system below which its trend is predicted."""
TREND_SECONDS = 3600.0
"""Time range of the trend of the free space."""
MIN_TREND_SECONDS = 900.0
"""Minimum time between the first and the last point of the trend."""
PREDICTED_SECONDS = 14400.0
"""Time after which the predicted free space is compared with zero."""
MIN_FREE_CHECKPOINTS = 2.0
"""Number of checkpoints for which a file system must have room."""


def _hanging_saves(view: View) -> Iterator[Match]:
    """Yield a match for each run with ranks that have been saving for `CHECKPOINT_HANG_RATIO` times the mean of the completed saves."""
    for name in view.runs:
        durations = view.samples.observations("training_checkpoint_duration_seconds", run=name, part="total")
        saves = [(series.count, series.sum) for series in durations if series.sum is not None]
        save_count = sum(count for count, _ in saves)
        if not save_count:
            continue
        mean_seconds = sum(seconds for _, seconds in saves) / save_count
        limit_seconds = max(CHECKPOINT_HANG_RATIO * mean_seconds, MIN_HANG_SECONDS)
        ranks = {
            rank.rank: rank.phase_since
            for rank in view.ranks
            if rank.run == name
            and rank.alive != 0
            and rank.phase in SAVE_PHASES
            and rank.phase_since is not None
        }
        late_ranks = {
            rank: start for rank, start in ranks.items() if view.exporter.now - start > limit_seconds
        }
        if late_ranks:
            numbers = {int(rank) for rank in late_ranks if rank.isdecimal()}
            names = rank_names(numbers) if numbers else "a process"
            facts = {
                "ranks_are": f"{names} of {name} {'are' if len(numbers) > 1 else 'is'}",
                "usual": duration(mean_seconds),
            }
            yield Match((name,), facts, start=min(late_ranks.values()))


def failures_since_last_save(view: View, run: str) -> Increase | None:
    """Return the saves that have failed since the last successful save, or None without such saves."""
    saved_at = view.samples.value("training_checkpoint_last_success_timestamp_seconds", run=run)
    levels = view.history.read_levels("failed saves", run)
    seconds = (
        FAILED_SECONDS if saved_at is None or not levels else min(FAILED_SECONDS, levels[-1][0] - saved_at)
    )
    # A failure counts only if both points around it are later than the successful save.
    if sum(levels[-1][0] - at <= seconds for at, _ in levels) < 2:
        return None
    return view.history.compute_increase(
        "failed saves", run, seconds=seconds, required_track="executed steps"
    )


def _failed_saves_text(view: View, run: str, increase: Increase) -> str:
    """Return a sentence about failed saves; for saves that still fail, with their start, the last good step and the work at risk."""
    current = failures_since_last_save(view, run)
    if current is None:
        return f"{count_text(increase, 'save', 'saves')} of run {run} failed"
    number = f"the last {current.amount:.0f} saves" if round(current.amount) > 1 else "the last save"
    text = f"{number} of run {run} failed, since {clock(current.first_at)}"
    steps = unsaved_steps_text(view, run)
    seconds = view.samples.value("training_uncommitted_seconds", run=run)
    if seconds is not None:
        seconds = max(0.0, seconds - view.runs[run].undecided_seconds)
        return f"{text}. {duration(seconds)} of work are at risk{f' ({steps})' if steps else ''}"
    return f"{text}{f' ({steps})' if steps else ''}"


def _failed_saves(view: View) -> Iterator[Match]:
    for name, run in view.runs.items():
        if run.is_ended or run.state == "ending":
            continue
        increase = view.history.compute_increase(
            "failed saves", name, seconds=FAILED_SECONDS, required_track="executed steps"
        )
        if increase is not None:
            facts = {"statement": _failed_saves_text(view, name, increase)}
            yield Match(
                (name,), facts, start=increase.first_at, last_event_at=increase.last_at, is_event=True
            )


def _overdue_saves(view: View) -> Iterator[Match]:
    """Yield a match for each run that has trained for `CHECKPOINT_OVERDUE_INTERVALS` usual intervals since its last save."""
    for name in view.runs:
        ranks = [rank for rank in view.ranks if rank.run == name]
        last_progress_at = max(
            (rank.progress_at for rank in ranks if rank.progress_at is not None), default=None
        )
        saved_at = view.samples.value("training_checkpoint_last_success_timestamp_seconds", run=name)
        interval_seconds = view.samples.value("training_checkpoint_interval_seconds", run=name)
        if (
            last_progress_at is None
            or saved_at is None
            or interval_seconds is None
            or not any(rank.alive != 0 for rank in ranks)
        ):
            continue
        trained_seconds = last_progress_at - saved_at
        if trained_seconds > CHECKPOINT_OVERDUE_INTERVALS * interval_seconds:
            facts = {
                "run": name,
                "trained": duration(trained_seconds),
                "usual": duration(interval_seconds),
            }
            yield Match((name,), facts)


def _filling_filesystems(view: View) -> Iterator[Match]:
    for labels, available_bytes in view.samples.select("training_checkpoint_dir_available_bytes"):
        run, path = labels["run"], labels["path"]
        size_bytes = view.samples.value("training_checkpoint_dir_size_bytes", run=run, path=path)
        predicted_bytes = view.history.predict(
            "checkpoint room",
            run,
            path,
            seconds=TREND_SECONDS,
            min_seconds=MIN_TREND_SECONDS,
            ahead_seconds=PREDICTED_SECONDS,
        )
        if not size_bytes or predicted_bytes is None:
            continue
        available_ratio = available_bytes / size_bytes
        if available_ratio < NEARLY_FULL_RATIO and predicted_bytes < 0:
            yield Match((run, path), {"run": run, "path": path, "share": share(available_ratio)})


def _filesystems_without_room(view: View) -> Iterator[Match]:
    for labels, available_bytes in view.samples.select("training_checkpoint_dir_available_bytes"):
        last_bytes = view.samples.value("training_checkpoint_last_bytes", run=labels["run"])
        if last_bytes and available_bytes < MIN_FREE_CHECKPOINTS * last_bytes:
            facts = {
                "run": labels["run"],
                "path": labels["path"],
                "room": size(available_bytes),
                "last": size(last_bytes),
            }
            yield Match((labels["run"], labels["path"]), facts)


CONDITIONS = (
    Condition(
        alert_name="CheckpointHangs",
        criterion=(
            "a save that lasts threshold:training_checkpoint_hang:ratio times the usual one, and a minute at least"
        ),
        severity=AlertSeverity.CRITICAL,
        sentence="{ranks_are} still saving a checkpoint; a save usually takes {usual}",
        remedy="check the storage and its mount, then the rank that the save waits for",
        find_matches=_hanging_saves,
    ),
    Condition(
        alert_name="TrainingCheckpointFailing",
        criterion="any failed checkpoint in 1h, until the run ends",
        severity=AlertSeverity.CRITICAL,
        sentence="{statement}",
        remedy="read the job's log; check space and permissions of the checkpoint directory",
        find_matches=_failed_saves,
    ),
    Condition(
        alert_name="TrainingCheckpointOverdue",
        criterion=(
            "last step later than the last checkpoint by threshold:training_checkpoint_overdue:intervals times the usual"
            " interval"
        ),
        sentence="run {run} has trained for {trained} since its last checkpoint, usually {usual}",
        remedy="save now if the job can; check why the save did not happen",
        find_matches=_overdue_saves,
    ),
    Condition(
        alert_name="TrainingCheckpointDiskFillingUpFast",
        criterion="less than 0.2 of the space is free, and the trend of 1h reaches zero within 14400 s",
        severity=AlertSeverity.CRITICAL,
        sentence="{path} of run {run} has {share} left and will be full within four hours",
        remedy="delete old checkpoints",
        find_matches=_filling_filesystems,
    ),
    Condition(
        alert_name="TrainingCheckpointWontFit",
        criterion="room for fewer than 2 checkpoints",
        severity=AlertSeverity.CRITICAL,
        sentence="{path} of run {run} has {room} left; the last checkpoint had {last}",
        remedy="delete old checkpoints before the next save",
        find_matches=_filesystems_without_room,
    ),
)
