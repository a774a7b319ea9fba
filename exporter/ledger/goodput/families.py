"""Families of attempts and goodput.

The sidecar that reads rank 0 publishes these families. Their totals continue after restarts of the job and of the sidecar.
"""

from __future__ import annotations

from exporter.families import Collected, FamilySpec
from exporter.ledger.goodput.accounting import BADPUT_CAUSES, Goodput
from exporter.recording.values import END_REASONS

_ABSENT = "*not instrumented*, *other node*, *expired*, or *not saved*"

ATTEMPT = FamilySpec(
    name="training_attempt",
    type="gauge",
    labels=("run",),
    help=(
        "Number of the current or last attempt, starting from 1. An attempt is a process of rank 0"
        " (docs/goodput.md)."
    ),
    absent=_ABSENT,
    source="successive processes of rank 0",
)
ATTEMPT_START = FamilySpec(
    name="training_attempt_start_timestamp_seconds",
    type="gauge",
    unit="seconds",
    labels=("run",),
    help="Unix time at which the attempt's process of rank 0 started.",
    absent=_ABSENT,
    source="/proc/<pid>/stat, otherwise the start of recording",
)
ATTEMPT_STEPS = FamilySpec(
    name="training_attempt_steps",
    type="gauge",
    labels=("run",),
    help="Steps completed by the current or last attempt.",
    absent=_ABSENT,
    source="steps of the current process of rank 0",
)
FIRST_STEP = FamilySpec(
    name="training_time_to_first_step_seconds",
    type="gauge",
    unit="seconds",
    labels=("run",),
    help="Time from the start of the attempt to the end of the first step.",
    absent="before the end of the first step, *not instrumented*, *other node*, *expired*, or *not saved*",
    source="end of the first iteration - training_attempt_start_timestamp_seconds",
)
WALL = FamilySpec(
    name="training_wall_seconds_total",
    type="counter",
    unit="seconds",
    labels=("run",),
    help=(
        "Time since the start of the first attempt, including the time between attempts. Stops at the end of"
        " the run."
    ),
    absent=_ABSENT,
    source="phases of rank 0, starts and exits of the processes of rank 0",
    details=("The value is the sum of productive, uncommitted and badput seconds.",),
)
PRODUCTIVE = FamilySpec(
    name="training_productive_seconds_total",
    type="counter",
    unit="seconds",
    labels=("run",),
    help="Work time covered by a successful save, or spent by a process that completed the training.",
    absent=_ABSENT,
    source="phases and checkpoints of rank 0",
    details=("With `goodput.validation=productive`, validation is productive too, without a save.",),
)
UNCOMMITTED = FamilySpec(
    name="training_uncommitted_seconds",
    type="gauge",
    unit="seconds",
    labels=("run",),
    help="Work time that no checkpoint covers yet and that a crash would lose.",
    absent=_ABSENT,
    source="phases and checkpoints of rank 0",
    details=(
        "The time becomes productive with the next save, or when the process completes the training.",
        (
            "The time includes the open step, also if the step is overdue, until the run counts as hung. The recording"
            " rules and the status page leave the time of an overdue step out."
        ),
        (
            "No reported checkpoint contains the steps of a completed run after `training_checkpoint_last_step`: the job"
            " may have saved them in another way."
        ),
    ),
)
BADPUT = FamilySpec(
    name="training_badput_seconds_total",
    type="counter",
    unit="seconds",
    labels=("run", "cause"),
    help="Time in which the training made no lasting progress, by cause.",
    absent=_ABSENT,
    source="see docs/goodput.md",
    details=(
        f"Causes: {', '.join(f'`{cause}`' for cause in BADPUT_CAUSES)}.",
        "With `goodput.validation=productive`, validation is part of the productive time instead.",
    ),
)
LOST_STEPS = FamilySpec(
    name="training_lost_steps_total",
    type="counter",
    labels=("run",),
    help="Executed steps that were lost, because the next attempt started at an earlier step.",
    absent=_ABSENT,
    source="steps beyond the first step of the next attempt",
)
RESTARTS = FamilySpec(
    name="training_restarts_total",
    type="counter",
    labels=("run", "reason"),
    help="Attempts after the first, by the reason for the end of the previous attempt.",
    absent=_ABSENT,
    source="see training_interruptions_total",
    details=("The label `reason` has the values of `training_interruptions_total`.",),
)
INTERRUPTIONS = FamilySpec(
    name="training_interruptions_total",
    type="counter",
    labels=("run", "reason"),
    help="Attempts that ended before the training was completed, by reason.",
    absent=_ABSENT,
    source="reports of the processes, exit status, kernel's OOM kills, boot id",
    details=(f"Reasons: {', '.join(f'`{reason}`' for reason in END_REASONS)}.",),
)
SPECS = (
    *(ATTEMPT, ATTEMPT_START, ATTEMPT_STEPS, FIRST_STEP, WALL, PRODUCTIVE),
    *(UNCOMMITTED, BADPUT, LOST_STEPS, RESTARTS, INTERRUPTIONS),
)


def add_goodput(collected: Collected, goodput: Goodput) -> None:
    """Add the families of a task with at least one attempt."""
    attempt = goodput.latest
    run = attempt.run
    collected.add(ATTEMPT, attempt.number, run)
    collected.add(ATTEMPT_START, attempt.started_at, run)
    collected.add(ATTEMPT_STEPS, attempt.reading.steps, run)
    collected.add(FIRST_STEP, attempt.first_step_seconds, run)
    collected.add(WALL, goodput.wall_seconds, run)
    collected.add(PRODUCTIVE, goodput.productive_seconds, run)
    collected.add(UNCOMMITTED, goodput.uncommitted_seconds, run)
    for cause, seconds in goodput.badput.items():
        collected.add(BADPUT, seconds, run, cause)
    collected.add(LOST_STEPS, goodput.lost_steps, run)
    for reason, count in goodput.restarts.items():
        collected.add(RESTARTS, count, run, reason)
    for reason, count in goodput.interruptions.items():
        collected.add(INTERRUPTIONS, count, run, reason)
