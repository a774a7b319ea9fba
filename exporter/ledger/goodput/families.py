"""Families of attempts and goodput: what only the sidecar can count, since it outlives the processes of the job.

Used in the sidecar by the ledger, which fills them from what rank 0 tells of its training. They are the run's, and
published by the one sidecar that reads rank 0; what they count goes on over the restarts of a task, over several runs
where a session tag ties those together (see docs/goodput.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import Metric

from exporter.families import FamilySpec
from exporter.ledger.goodput.task import Goodput
from exporter.recording.values import END_REASONS

_ABSENT = "; absent where the job does not use exporter.training, on nodes without rank 0, a while after the run's end"
_GAUGE = _ABSENT + "."
_COUNTER = _ABSENT + ", and while the ledger's state cannot be written."

ATTEMPT = FamilySpec(
    "training_attempt",
    "gauge",
    "Number of the attempt at the task that is under way, or was last; 1 for the first" + _GAUGE,
    ("run",),
    source="processes of rank 0, one after another",
)
ATTEMPT_START = FamilySpec(
    "training_attempt_start_timestamp_seconds",
    "gauge",
    "Unix time at which the attempt's process of rank 0 began" + _GAUGE,
    ("run",),
    "seconds",
    "/proc/<pid>/stat, else the begin of its recording",
)
ATTEMPT_STEPS = FamilySpec(
    "training_attempt_steps",
    "gauge",
    "Steps that the attempt has completed" + _GAUGE,
    ("run",),
    source="TrainingReading.steps",
)
TIME_TO_FIRST_STEP = FamilySpec(
    "training_time_to_first_step_seconds",
    "gauge",
    "Time from the start of the attempt to the end of its first step; absent before that, where the"
    " job does not use exporter.training, on nodes without rank 0, a while after the run's end.",
    ("run",),
    "seconds",
    "end of the first iteration - training_attempt_start_timestamp_seconds",
)
WALL = FamilySpec(
    "training_wall_seconds_total",
    "counter",
    "Time since the first attempt began, the time between attempts included; the sum of productive, uncommitted and"
    " badput" + _COUNTER,
    ("run",),
    "seconds",
    "phases of rank 0, ends and beginnings of its processes",
)
PRODUCTIVE = FamilySpec(
    "training_productive_seconds_total",
    "counter",
    "Work of steps that a successful save covers, or whose process did all that it was to do" + _COUNTER,
    ("run",),
    "seconds",
    "TrainingReading.committed_seconds",
)
UNCOMMITTED = FamilySpec(
    "training_uncommitted_seconds",
    "gauge",
    "Unsaved work: what no checkpoint covers yet and a crash would cost now. It becomes productive with the next save, or"
    " when the run ends well without one" + _COUNTER,
    ("run",),
    "seconds",
    "TrainingReading.work_seconds - .committed_seconds + .open_seconds",
)
BADPUT = FamilySpec(
    "training_badput_seconds_total",
    "counter",
    "Time in which the training did not advance for good, by what it went to: init, compile, data_stall,"
    " checkpoint_save, checkpoint_load, validation (unless the configuration counts it as productive), lost_progress,"
    " downtime, hang, other" + _COUNTER,
    ("run", "cause"),
    "seconds",
    "see docs/goodput.md",
)
LOST_STEPS = FamilySpec(
    "training_lost_steps_total",
    "counter",
    "Steps that were executed and have to be executed again" + _COUNTER,
    ("run",),
    source="steps beyond the one at which the next attempt begins",
)
_REASONS = ", ".join(END_REASONS)
RESTARTS = FamilySpec(
    "training_restarts_total",
    "counter",
    f"Attempts that followed another one, by what ended that ({_REASONS})" + _COUNTER,
    ("run", "reason"),
    source="see training_interruptions_total",
)
INTERRUPTIONS = FamilySpec(
    "training_interruptions_total",
    "counter",
    f"Attempts that ended before their time, by what ended them ({_REASONS})" + _COUNTER,
    ("run", "reason"),
    source="what the processes said, their exit status, the kernel's OOM kills, the boot of the machine",
)

SPECS = (
    ATTEMPT,
    ATTEMPT_START,
    ATTEMPT_STEPS,
    TIME_TO_FIRST_STEP,
    WALL,
    PRODUCTIVE,
    UNCOMMITTED,
    BADPUT,
    LOST_STEPS,
    RESTARTS,
    INTERRUPTIONS,
)


def goodput_families(goodputs: Iterable[Goodput]) -> list[Metric]:
    """Fill the families.

    Args:
        goodputs: Of one task for each run, all of which have begun.
    """
    samples: dict[FamilySpec, dict[tuple[str, ...], float]] = {spec: {} for spec in SPECS}
    for goodput in goodputs:
        attempt = goodput.attempt
        if attempt is None:
            continue
        values: Sequence[tuple[FamilySpec, float | None]] = (
            (ATTEMPT, attempt.number),
            (ATTEMPT_START, attempt.start),
            (ATTEMPT_STEPS, attempt.steps),
            (TIME_TO_FIRST_STEP, attempt.first_step_seconds),
            (WALL, goodput.wall),
            (PRODUCTIVE, goodput.productive),
            (UNCOMMITTED, goodput.uncommitted),
            (LOST_STEPS, goodput.lost_steps),
        )
        parts: Sequence[tuple[FamilySpec, Mapping[str, float]]] = (
            (BADPUT, goodput.badput),
            (RESTARTS, goodput.restarts),
            (INTERRUPTIONS, goodput.interruptions),
        )
        for spec, value in values:
            if value is not None:
                samples[spec][attempt.run,] = value
        for spec, by_name in parts:
            samples[spec].update({(attempt.run, name): value for name, value in by_name.items()})
    return [spec.family(found) for spec, found in samples.items() if found]
