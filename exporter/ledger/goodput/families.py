"""Families of attempts and goodput: what only the sidecar can count, since it outlives the processes of the job.

They are the run's, published by the one sidecar that reads rank 0, and go on over the restarts of a task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from exporter.families import Collected, rows
from exporter.ledger.goodput.task import CAUSES, Goodput
from exporter.recording.values import END_REASONS

_ABSENT = "where the job does not use exporter.training, on nodes without rank 0, a while after the run's end"
_TABLE = """
training_attempt{run}: Number of the attempt at the task that is under way, or was last; 1 for the first <-
    processes of rank 0, one after another
training_attempt_start_timestamp_seconds{run}: Unix time at which the attempt's process of rank 0 began <-
    /proc/<pid>/stat, else the begin of its recording
training_attempt_steps{run}: Steps that the attempt has completed <- TrainingReading.steps
training_time_to_first_step_seconds{run} [before that]: Time from the start of the attempt to the end of its
    first step <- end of the first iteration - training_attempt_start_timestamp_seconds
training_wall_seconds_total{run} [kept]: Time since the first attempt began, the time between attempts included;
    the sum of productive, uncommitted and badput <- phases of rank 0, ends and beginnings of its processes
training_productive_seconds_total{run} [kept]: Work of steps that a successful save covers, or whose process did
    all that it was to do <- TrainingReading.committed_seconds
training_uncommitted_seconds{run} [kept]: Unsaved work: what no checkpoint covers yet and a crash would cost now.
    It becomes productive with the next save, or when the run ends well without one <-
    TrainingReading.work_seconds - .committed_seconds + .open_seconds
training_badput_seconds_total{run,cause} [kept]: Time in which the training did not advance for good, by what it
    went to: CAUSES; validation may be configured to count as productive <- see docs/goodput.md
training_lost_steps_total{run} [kept]: Steps that were executed and have to be executed again <-
    steps beyond the one at which the next attempt begins
training_restarts_total{run,reason} [kept]: Attempts that followed another one, by what ended that (REASONS) <-
    see training_interruptions_total
training_interruptions_total{run,reason} [kept]: Attempts that ended before their time, by what ended them
    (REASONS) <- what the processes said, their exit status, the kernel's OOM kills, the boot of the machine
"""
_TEXT = _TABLE.replace("CAUSES", ", ".join(CAUSES)).replace("REASONS", ", ".join(END_REASONS))
_LACKING = {
    "": f"; absent {_ABSENT}.",
    "before that": f"; absent before that, {_ABSENT}.",
    "kept": f"; absent {_ABSENT}, and while the ledger's state cannot be written.",
}
SPECS = tuple(replace(spec, help=spec.help + _LACKING[words]) for spec, words in rows(_TEXT).items())


def tell_goodput(collected: Collected, goodput: Goodput) -> None:
    """Fill the families of one task, which has begun."""
    attempt = goodput.latest
    values: Mapping[str, float | None] = {
        "training_attempt": attempt.number,
        "training_attempt_start_timestamp_seconds": attempt.start,
        "training_attempt_steps": attempt.reading.steps,
        "training_time_to_first_step_seconds": attempt.first_step_seconds,
        "training_wall_seconds_total": goodput.wall,
        "training_productive_seconds_total": goodput.productive,
        "training_uncommitted_seconds": goodput.uncommitted,
        "training_lost_steps_total": goodput.lost_steps,
    }
    by_label: Mapping[str, Mapping[str, float]] = {
        "training_badput_seconds_total": goodput.badput,
        "training_restarts_total": goodput.restarts,
        "training_interruptions_total": goodput.interruptions,
    }
    for spec in SPECS:
        collected.add(spec, values.get(spec.name), attempt.run)
        for label, value in by_label.get(spec.name, {}).items():
            collected.add(spec, value, attempt.run, label)
