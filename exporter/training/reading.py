"""Reading: what the feed carries of the training besides its families.

Used by whoever holds the lock of `exporter.training.recording`.
"""

from __future__ import annotations

from exporter.recording.values import TrainingReading
from exporter.training.interpreter import Interpreter


def read(interpreter: Interpreter) -> TrainingReading:
    """Tell all, up to the time to which the phases were counted."""
    job, clock = interpreter.job, interpreter.clock
    looping, progress, work = job.looping, job.progress, job.work
    iteration = looping.iteration
    underway = 0.0 if iteration is None or iteration.work is None else clock.work - iteration.work
    return TrainingReading(
        facts=job.facts.pairs(),
        phase=clock.active,
        phase_since=interpreter.records.wall(clock.since),
        phases={phase: seconds for phase, seconds in clock.seconds.items() if seconds},
        last_progress=None if progress.last is None else interpreter.records.wall(progress.last),
        first_step=looping.first_step,
        loop=looping.count,
        step=None if looping.loop is None else looping.loop.completed,
        steps=progress.steps,
        work_seconds=work.seconds,
        open_seconds=underway,
        failed_seconds=work.failed_seconds,
        committed_step=work.committed_step,
        committed_seconds=work.committed_seconds,
        segments=work.segments(),
        finished=job.finished,
        failure=job.failure,
        longest_step_seconds=progress.longest,
        timeline=clock.timeline(),
        flops_per_token=progress.flops_per_token,
        hardware_flops_per_token=progress.hardware_flops_per_token,
        peak_flops=job.facts.peak_flops,
    )
