"""Families of attempts and goodput: what only the sidecar can count, since it outlives the processes of the job.

Used in the sidecar by the ledger, which fills them from what rank 0 tells of its training. They are the run's, and
published by the one sidecar that reads rank 0; what they count goes on over the restarts of a task, over several runs
where a session tag ties those together (see docs/goodput.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import Metric

from exporter.families import FamilySpec, family
from exporter.ledger.goodput.task import CAUSES, Goodput
from exporter.recording.values import END_REASONS

_WHERE = "where the job does not use exporter.training, on nodes without rank 0, a while after the run's end"
_GAUGE = f"; absent {_WHERE}."
_COUNTER = f"; absent {_WHERE}, and while the ledger's state cannot be written."
_REASONS = ", ".join(END_REASONS)

ATTEMPT = family(
    "training_attempt",
    "Number of the attempt at the task that is under way, or was last; 1 for the first" + _GAUGE,
    "processes of rank 0, one after another",
    "run",
)
ATTEMPT_START = family(
    "training_attempt_start_timestamp_seconds",
    "Unix time at which the attempt's process of rank 0 began" + _GAUGE,
    "/proc/<pid>/stat, else the begin of its recording",
    "run",
)
ATTEMPT_STEPS = family(
    "training_attempt_steps",
    "Steps that the attempt has completed" + _GAUGE,
    "TrainingReading.steps",
    "run",
)
TIME_TO_FIRST_STEP = family(
    "training_time_to_first_step_seconds",
    f"Time from the start of the attempt to the end of its first step; absent before that, {_WHERE}.",
    "end of the first iteration - training_attempt_start_timestamp_seconds",
    "run",
)
WALL = family(
    "training_wall_seconds_total",
    "Time since the first attempt began, the time between attempts included; the sum of productive, uncommitted and"
    " badput" + _COUNTER,
    "phases of rank 0, ends and beginnings of its processes",
    "run",
)
PRODUCTIVE = family(
    "training_productive_seconds_total",
    "Work of steps that a successful save covers, or whose process did all that it was to do" + _COUNTER,
    "TrainingReading.committed_seconds",
    "run",
)
UNCOMMITTED = family(
    "training_uncommitted_seconds",
    "Unsaved work: what no checkpoint covers yet and a crash would cost now. It becomes productive with the next save, or"
    " when the run ends well without one" + _COUNTER,
    "TrainingReading.work_seconds - .committed_seconds + .open_seconds",
    "run",
)
BADPUT = family(
    "training_badput_seconds_total",
    f"Time in which the training did not advance for good, by what it went to: {', '.join(CAUSES)}; validation may be"
    " configured to count as productive" + _COUNTER,
    "see docs/goodput.md",
    *("run", "cause"),
)
LOST_STEPS = family(
    "training_lost_steps_total",
    "Steps that were executed and have to be executed again" + _COUNTER,
    "steps beyond the one at which the next attempt begins",
    "run",
)
RESTARTS = family(
    "training_restarts_total",
    f"Attempts that followed another one, by what ended that ({_REASONS})" + _COUNTER,
    "see training_interruptions_total",
    *("run", "reason"),
)
INTERRUPTIONS = family(
    "training_interruptions_total",
    f"Attempts that ended before their time, by what ended them ({_REASONS})" + _COUNTER,
    "what the processes said, their exit status, the kernel's OOM kills, the boot of the machine",
    *("run", "reason"),
)

SPECS = (
    *(ATTEMPT, ATTEMPT_START, ATTEMPT_STEPS, TIME_TO_FIRST_STEP),
    *(WALL, PRODUCTIVE, UNCOMMITTED, BADPUT, LOST_STEPS, RESTARTS, INTERRUPTIONS),
)


def goodput_families(goodputs: Iterable[Goodput]) -> list[Metric]:
    """Fill the families of one task for each run, all of which have begun."""
    samples: dict[FamilySpec, dict[tuple[str, ...], float]] = {spec: {} for spec in SPECS}
    for goodput in goodputs:
        attempt = goodput.latest
        values: Mapping[FamilySpec, float | None] = {
            ATTEMPT: attempt.number,
            ATTEMPT_START: attempt.start,
            ATTEMPT_STEPS: attempt.steps,
            TIME_TO_FIRST_STEP: attempt.first_step_seconds,
            WALL: goodput.wall,
            PRODUCTIVE: goodput.productive,
            UNCOMMITTED: goodput.uncommitted,
            LOST_STEPS: goodput.lost_steps,
        }
        for spec, value in values.items():
            if value is not None:
                samples[spec][attempt.run,] = value
        parts: Mapping[FamilySpec, Mapping[str, float]] = {
            BADPUT: goodput.badput,
            RESTARTS: goodput.restarts,
            INTERRUPTIONS: goodput.interruptions,
        }
        for spec, by_name in parts.items():
            samples[spec].update({(attempt.run, name): value for name, value in by_name.items()})
    return [spec.family(found) for spec, found in samples.items() if found]
