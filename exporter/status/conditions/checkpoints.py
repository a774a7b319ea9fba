"""Conditions of checkpoints: saves that hang, fail or are overdue, and room for the next one."""

from __future__ import annotations

from collections.abc import Iterator

from exporter.status.condition import AlertSeverity, Condition, Found
from exporter.status.conditions.runs import counted, last_time
from exporter.status.numbers import duration, ranges, share, size
from exporter.status.thresholds import CHECKPOINT_HANG_RATIO, CHECKPOINT_OVERDUE_INTERVALS
from exporter.status.view import View

SHORTEST_HANG_SECONDS = 60.0
FAILED_SECONDS = 3600.0
SAVES = frozenset({"checkpoint_save_sync", "checkpoint_save_async"})
NEARLY_FULL_RATIO, PREDICTED_FROM_SECONDS, PREDICTED_SECONDS = 0.2, 3600.0, 14400.0
LEAST_CHECKPOINTS = 2.0


def _hanging(seen: View) -> Iterator[Found]:
    for name in seen.runs:
        means = seen.readings.means("training_checkpoint_duration_seconds", run=name, part="total")
        totals = [(count, spent) for _, count, spent in means if spent is not None]
        count = sum(each for each, _ in totals)
        if not count:
            continue
        usual = sum(spent for _, spent in totals) / count
        limit = max(CHECKPOINT_HANG_RATIO * usual, SHORTEST_HANG_SECONDS)
        ranks = {
            rank.rank: rank.phase_since
            for rank in seen.ranks
            if rank.run == name and rank.alive != 0 and rank.phase in SAVES and rank.phase_since is not None
        }
        late = {rank: since for rank, since in ranks.items() if seen.about.now - since > limit}
        if late:
            numbers = ranges(int(rank) for rank in late if rank.isdecimal())
            facts = {"run": name, "ranks": numbers, "usual": duration(usual)}
            yield Found((name,), facts, since=min(late.values()))


def _failed(seen: View) -> Iterator[Found]:
    for name, run in seen.runs.items():
        if run.ended or run.state == "ending":
            continue
        increase = seen.past.increase("failed saves", name, seconds=FAILED_SECONDS, known="executed steps")
        if increase is not None:
            facts = {
                "run": name,
                "count": counted(increase, "save", "saves"),
                "last": last_time(seen, increase),
            }
            yield Found((name,), facts, since=increase.first, event=True)


def _overdue(seen: View) -> Iterator[Found]:
    for name in seen.runs:
        ranks = [rank for rank in seen.ranks if rank.run == name]
        progress = max((rank.progress for rank in ranks if rank.progress is not None), default=None)
        saved = seen.readings.value("training_checkpoint_last_success_timestamp_seconds", run=name)
        interval = seen.readings.value("training_checkpoint_interval_seconds", run=name)
        if (
            progress is None
            or saved is None
            or interval is None
            or not any(rank.alive != 0 for rank in ranks)
        ):
            continue
        if progress - saved > CHECKPOINT_OVERDUE_INTERVALS * interval:
            facts = {"run": name, "trained": duration(progress - saved), "usual": duration(interval)}
            yield Found((name,), facts)


def _filling(seen: View) -> Iterator[Found]:
    for labels, room in seen.readings.rows("training_checkpoint_dir_available_bytes"):
        run, path = labels["run"], labels["path"]
        whole = seen.readings.value("training_checkpoint_dir_size_bytes", run=run, path=path)
        left = seen.past.predicted(
            "checkpoint room", run, path, seconds=PREDICTED_FROM_SECONDS, ahead=PREDICTED_SECONDS
        )
        if whole and left is not None and room / whole < NEARLY_FULL_RATIO and left < 0:
            yield Found((run, path), {"run": run, "path": path, "share": share(room / whole)})


def _no_room(seen: View) -> Iterator[Found]:
    for labels, room in seen.readings.rows("training_checkpoint_dir_available_bytes"):
        last = seen.readings.value("training_checkpoint_last_bytes", run=labels["run"])
        if last and room < LEAST_CHECKPOINTS * last:
            facts = {"run": labels["run"], "path": labels["path"], "room": size(room), "last": size(last)}
            yield Found((labels["run"], labels["path"]), facts)


CONDITIONS = (
    Condition(
        alert="CheckpointHangs",
        condition=(
            "a save that lasts threshold:training_checkpoint_hang:ratio times the usual one, and a minute at least"
        ),
        severity=AlertSeverity.CRITICAL,
        sentence="rank {ranks} of {run} is still saving a checkpoint; a save usually takes {usual}",
        remedy="check the storage and its mount, then the rank that the save waits for",
        find=_hanging,
    ),
    Condition(
        alert="TrainingCheckpointFailing",
        condition="any failed checkpoint in 1h, until the run ends",
        severity=AlertSeverity.CRITICAL,
        sentence="{count} of run {run} failed{last}",
        remedy="read the job's log; check space and permissions of the checkpoint directory",
        find=_failed,
    ),
    Condition(
        alert="TrainingCheckpointOverdue",
        condition=(
            "last step later than the last checkpoint by threshold:training_checkpoint_overdue:intervals times the usual"
            " interval"
        ),
        sentence="run {run} has trained for {trained} since its last checkpoint, usually {usual}",
        remedy="save now if the job can; check why the save did not happen",
        find=_overdue,
    ),
    Condition(
        alert="TrainingCheckpointDiskFillingUpFast",
        condition="less than 0.2 free, and none left in 14400 s at the pace of 1h",
        severity=AlertSeverity.CRITICAL,
        sentence="{path} of run {run} has {share} left and will be full within four hours",
        remedy="delete old checkpoints",
        find=_filling,
    ),
    Condition(
        alert="TrainingCheckpointWontFit",
        condition="room for fewer than 2 checkpoints",
        severity=AlertSeverity.CRITICAL,
        sentence="{path} of run {run} has {room} left; the last checkpoint had {last}",
        remedy="delete old checkpoints before the next save",
        find=_no_room,
    ),
)
