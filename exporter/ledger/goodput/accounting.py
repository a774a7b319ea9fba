"""Goodput accounting of a task: wall time of all attempts by purpose. No function reads a clock.

    wall = productive + uncommitted + badput by cause

This equation holds after each update.

- Work is *productive* if a successful save covers it, or if the process has completed the training. Other work is *uncommitted*.
- Validation is productive if the options say so, and badput otherwise.
- When the next process starts training at step s, the uncommitted work of steps up to s becomes productive, because a save must have
  covered it. The uncommitted work of later steps becomes `lost_progress`.
- Productive time never decreases. If a process resumes before an earlier save, the repetition counts as `lost_progress` until the
  training reaches the step of that save.
- In a hang, the work seconds of the open step count as `hang`. When the step ends, they are deducted from the work of the step.
- Time without any other purpose is `other`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from exporter.ledger.goodput.attempt import Attempt, Deduction, UncommittedSteps
from exporter.ledger.goodput.hang import HangRule
from exporter.recording.values import END_REASONS, TrainingReading
from exporter.training.phases import PHASES, WORK_PHASES

DOWNTIME_LAG_SECONDS = 60.0
"""Delay before downtime is counted, because the next process may have started this long before its first snapshot."""
MAX_PROCESS_IDS = 64
"""Maximum number of stored ids of counted processes. A process with a stored id is not counted again."""

CAUSE_OF_PHASE: Mapping[str, str] = {
    name: phase.badput for name, phase in PHASES.items() if phase.badput and phase.badput != "other"
}
"""Badput cause by phase. The time of phases without an entry is work (`WORK_PHASES`) or `other`."""

BADPUT_CAUSES = (*dict.fromkeys(CAUSE_OF_PHASE.values()), "lost_progress", "downtime", "hang", "other")
"""Values of the label `cause` of badput."""

INFERRED_LOOP_SECONDS = 60.0
"""Time after which an inferred loop is no longer regarded as a warm-up before a checkpoint is loaded."""


@dataclass(slots=True, eq=False)
class Goodput:
    """Accounting of all attempts at a task, and of earlier tasks of the same session or run."""

    JSON_KEYS: ClassVar[Mapping[str, str]] = {
        "productive_seconds": "productive",
        "validation_seconds": "validated",
        "wall_seconds": "wall",
        "highest_step": "high",
        "saved_step": "position",
        "gap_seconds": "gap",
        "counted_gap_seconds": "gap_counted",
        "clock_seconds": "target",
        "process_ids": "taken",
        "uncommitted_steps": "pending",
    }
    productive_seconds: float = 0.0
    validation_seconds: float = 0.0  # part of `productive_seconds`
    badput: dict[str, float] = field(default_factory=dict)
    wall_seconds: float = 0.0
    lost_steps: int = 0  # executed steps that have to be repeated
    restarts: dict[str, int] = field(default_factory=dict)  # by reason for the end of the previous attempt
    interruptions: dict[str, int] = field(default_factory=dict)  # by reason
    attempt: Attempt | None = None  # the latest
    # uncommitted work of ended attempts, until the next attempt reports a first step
    uncommitted_steps: list[UncommittedSteps] = field(default_factory=list)
    highest_step: int | None = None  # highest step with productive work; None if steps are not comparable
    saved_step: int | None = None  # step of the latest save
    gap_seconds: float = 0.0  # seconds between attempts that may belong to different tasks
    counted_gap_seconds: float = 0.0  # downtime counted since the end of the latest attempt
    clock_seconds: float = 0.0  # wall time as measured: phases of the attempts, and the times between them
    process_ids: list[str] = field(default_factory=list)  # processes of earlier attempts, oldest first
    trains: bool = False  # True if any process reported training

    def __post_init__(self) -> None:
        # State of an older release may lack a cause or a reason.
        self.badput = {**dict.fromkeys(BADPUT_CAUSES, 0.0), **self.badput}
        self.restarts = {**dict.fromkeys(END_REASONS, 0), **self.restarts}
        self.interruptions = {**dict.fromkeys(END_REASONS, 0), **self.interruptions}

    @property
    def uncommitted_seconds(self) -> float:
        """Work of the current and of earlier attempts that is not covered by a save."""
        earlier_seconds = sum(segment.seconds for segment in self.uncommitted_steps)
        if self.attempt is None:
            return earlier_seconds
        return earlier_seconds + self.attempt.uncommitted_seconds + self.attempt.open_seconds

    @property
    def latest(self) -> Attempt:
        """Latest attempt, which must exist."""
        assert self.attempt is not None  # noqa: S101 - the caller has checked that an attempt exists
        return self.attempt

    def knows(self, process_id: str) -> bool:
        """Return True if a process is an attempt of this task."""
        return process_id in self.process_ids or (
            self.attempt is not None and self.attempt.process_id == process_id
        )

    # Attempts -------------------------------------------------------------------------------------------

    def start(self, attempt: Attempt, *, new_after_seconds: float) -> None:
        """Start the attempt of a new process.

        A process without a session tag starts a new task in two cases. In the first, the last attempt has trained and completed the training.
        In the second, the time between attempts exceeds `new_after_seconds`, the first step of the process is 0 or unknown, and the process
        loads no checkpoint.
        """
        previous, self.attempt = self.attempt, attempt
        started_at = attempt.started_at
        if previous is not None:
            self.process_ids = [*self.process_ids, previous.process_id][-MAX_PROCESS_IDS:]
            previous_end = started_at if previous.ended_at is None else previous.ended_at
            gap_seconds = max(0.0, started_at - previous_end, self.counted_gap_seconds)
            # A completed process that did not train, such as an evaluation, has not completed the task.
            if previous.has_completed and previous.reading.loop and not attempt.has_tag:
                self._start_over(previous)
            else:
                attempt.number = previous.number + 1
                self.restarts[previous.reason] += 1
                self.uncommitted_steps += previous.unsaved_steps()
                self.gap_seconds += gap_seconds - self.counted_gap_seconds
                attempt.is_resumed = False
                if attempt.has_tag or self.gap_seconds <= new_after_seconds:
                    self._count_gap()
            started_at = max(started_at, previous_end + gap_seconds)
        self.counted_gap_seconds = 0.0
        self._count_badput("init", attempt.recorded_at - started_at)
        self._balance()

    def update(
        self, reading: TrainingReading | None, *, written_at: float, is_final: bool, is_hanging: bool = False
    ) -> None:
        """Count a snapshot of the latest attempt.

        Args:
            reading: Reports of the process; None before the process reports training, which counts as initialization.
            written_at: Unix time of the snapshot.
            is_final: True if the snapshot was written at a normal exit.
            is_hanging: Result of the hang rule.
        """
        attempt = self.latest
        attempt.is_final = attempt.is_final or is_final
        # Assigned even if the wall clock was set back and the time decreases.
        attempt.written_at = written_at
        if reading is None:  # the process has not reported training yet
            reading = TrainingReading(
                phase="init", phases={"init": max(0.0, written_at - attempt.recorded_at)}
            )
        else:
            self.trains = True
        self._count_phases(attempt, reading)
        self._count_hang(attempt, reading, is_hanging=is_hanging)
        if reading.loop and not _may_only_warm_up(attempt, reading):
            self._resume(attempt, reading)
        self._update_position(attempt, reading)
        open_seconds = 0.0 if attempt.ended_at is not None else reading.open_seconds
        attempt.reading = reading.replace(
            facts=(), intervals=(), history_phases=(), open_seconds=open_seconds
        )
        self._commit(attempt)
        self._balance()

    def end(self, ended_at: float, reason: str, *, is_completed: bool, hang: HangRule) -> None:
        """Record the end of the latest attempt after its outcome is decided; *reason* is from `END_REASONS`.

        The time from the last snapshot to the end belongs to the phase of the last snapshot. The open iteration of an attempt that has
        not completed the training is lost, or a hang if its step was overdue.
        """
        attempt = self.latest
        attempt.ended_at, attempt.has_completed = ended_at, is_completed
        attempt.reason = "exit" if is_completed else reason
        reading = attempt.reading
        tail_seconds = max(0.0, ended_at - max(attempt.written_at, attempt.recorded_at))
        self.clock_seconds += tail_seconds
        lost_seconds, has_hung = attempt.open_seconds, attempt.hung_seconds > 0
        attempt.reading, attempt.hung_seconds = reading.replace(open_seconds=0.0), 0.0
        if is_completed:
            self.complete()
            return
        self.interruptions[reason] += 1
        if reading.phase in WORK_PHASES:
            lost_seconds += tail_seconds
        else:
            self.badput[CAUSE_OF_PHASE.get(reading.phase, "other")] += tail_seconds
        is_hang = has_hung or hang.is_hung(reading, lost_seconds)
        self.badput["hang" if is_hang else "lost_progress"] += lost_seconds
        self._balance()

    def complete(self) -> None:
        """Count all work of the latest attempt as productive, whether or not a save covers the work."""
        attempt = self.latest
        if attempt.reading.loop:
            self._resume(attempt, attempt.reading)
        attempt.is_credited = True
        self._credit_rest(attempt)
        self._balance()

    def reopen(self) -> None:
        """Reopen the latest attempt, which was ended because the lock of its process was temporarily invisible."""
        attempt = self.latest
        attempt.ended_at, attempt.has_completed = None, False

    def count_downtime(self, seconds_since_end: float) -> None:
        """Count the time since the end of the latest attempt, except for the last `DOWNTIME_LAG_SECONDS`, as downtime.

        Does nothing while the attempt runs, and after an attempt that has completed the training.
        """
        attempt = self.attempt
        if attempt is None or attempt.ended_at is None or attempt.has_completed:
            return
        downtime_seconds = seconds_since_end - DOWNTIME_LAG_SECONDS
        if downtime_seconds > self.counted_gap_seconds:
            self._count_badput("downtime", downtime_seconds - self.counted_gap_seconds)
            self.counted_gap_seconds = downtime_seconds
            self._balance()

    # Arithmetic -----------------------------------------------------------------------------------------

    def _count_phases(self, attempt: Attempt, reading: TrainingReading) -> None:
        """Count the increase of the phases that are not work, and of the seconds of failed iterations."""
        total_seconds = sum(reading.phases.values())
        self.clock_seconds += max(0.0, total_seconds - attempt.phase_seconds)
        attempt.phase_seconds = max(attempt.phase_seconds, total_seconds)
        seconds_by_cause: dict[str, float] = {}
        for phase, phase_seconds in reading.phases.items():
            if (cause := CAUSE_OF_PHASE.get(phase)) is not None:
                seconds_by_cause[cause] = seconds_by_cause.get(cause, 0.0) + phase_seconds
        for cause, cause_seconds in seconds_by_cause.items():
            increment_seconds = cause_seconds - attempt.seconds_by_cause.get(cause, 0.0)
            if increment_seconds > 0:
                attempt.seconds_by_cause[cause] = cause_seconds
                if cause == "validation" and attempt.is_validation_productive:
                    self.productive_seconds += increment_seconds
                    self.validation_seconds += increment_seconds
                else:
                    self.badput[cause] += increment_seconds
        failed_seconds = reading.failed_seconds - attempt.failed_seconds
        if failed_seconds > 0:  # an iteration raised
            cause = "hang" if attempt.hung_seconds > 0 else "lost_progress"
            self.badput[cause] += max(0.0, failed_seconds - attempt.hung_seconds)
            attempt.failed_seconds, attempt.hung_seconds = reading.failed_seconds, 0.0

    def _count_hang(self, attempt: Attempt, reading: TrainingReading, *, is_hanging: bool) -> None:
        """Count the open iteration of a hang as `hang`. After the iteration has ended, deduct the hang from its work."""
        previous = attempt.reading
        if attempt.hung_seconds > 0 and (
            reading.steps > previous.steps or reading.open_seconds < attempt.hung_seconds
        ):
            work_seconds = max(0.0, reading.work_seconds - previous.work_seconds)
            deducted_seconds = min(attempt.hung_seconds, work_seconds)
            attempt.deductions.append(Deduction(previous.work_seconds, deducted_seconds))
            attempt.hung_seconds = 0.0
        if is_hanging and reading.open_seconds > attempt.hung_seconds:
            self.badput["hang"] += reading.open_seconds - attempt.hung_seconds
            attempt.hung_seconds = reading.open_seconds

    def _update_position(self, attempt: Attempt, reading: TrainingReading) -> None:
        """Reset the step positions if a new loop counts from a lower step, and estimate the time to the first step."""
        previous = attempt.reading
        if 0 < previous.loop < reading.loop and (reading.step or 0) < (previous.step or 0):
            # A new loop of the same process counts from its own start: lower steps are not repetitions.
            self.highest_step = self.saved_step = None
        if attempt.first_step_seconds is None and reading.steps and reading.last_progress is not None:
            # Assumes that the steps after the first were equally long.
            later_steps_seconds = reading.work_seconds * (reading.steps - 1) / reading.steps
            attempt.first_step_seconds = max(
                0.0, reading.last_progress - later_steps_seconds - attempt.started_at
            )

    def _commit(self, attempt: Attempt) -> None:
        """Count the work that a new save covers as productive."""
        reading = attempt.reading
        if attempt.is_credited:
            self._credit_rest(attempt)
            return
        committed_seconds = attempt.effective_seconds(min(reading.committed_seconds, reading.work_seconds))
        if committed_seconds > attempt.committed_seconds:
            self._credit(
                attempt.covered_step, reading.committed_step, committed_seconds - attempt.committed_seconds
            )
            attempt.committed_seconds = committed_seconds
        if reading.committed_step is not None:
            attempt.committed_step = self.saved_step = reading.committed_step

    def _credit_rest(self, attempt: Attempt) -> None:
        """Count all work of an attempt as productive."""
        work_seconds, step = attempt.effective_seconds(attempt.reading.work_seconds), attempt.reading.step
        if work_seconds > attempt.committed_seconds:
            self._credit(attempt.covered_step, step, work_seconds - attempt.committed_seconds)
            attempt.committed_seconds = work_seconds
        if step is not None:
            attempt.committed_step = self.saved_step = step

    def _credit(self, step_before: int | None, last_step: int | None, seconds: float) -> None:
        """Count work of the steps after *step_before* up to *last_step* as productive, and repeated steps as lost progress.

        For example, if the training had reached step 100 and the steps 81 to 120 are committed, half of their seconds are lost. If a
        step is unknown, no step counts as repeated.
        """
        repeated_ratio = 0.0
        if (
            step_before is not None
            and last_step is not None
            and last_step > step_before
            and self.highest_step is not None
        ):
            repeated_steps = max(0, min(last_step, self.highest_step) - step_before)
            repeated_ratio = repeated_steps / (last_step - step_before)
        self.badput["lost_progress"] += seconds * repeated_ratio
        self.productive_seconds += seconds * (1 - repeated_ratio)
        if last_step is not None:
            self.highest_step = last_step if self.highest_step is None else max(self.highest_step, last_step)

    def _resume(self, attempt: Attempt, reading: TrainingReading) -> None:
        """Count the uncommitted work of earlier attempts as productive or lost, once the first step of this attempt is known.

        The attempt starts a new task instead if the time before it is not counted yet (`gap_seconds`), and the process has loaded no
        checkpoint and starts at step 0 or at an unknown step.
        """
        if attempt.is_resumed:
            return
        attempt.is_resumed = True
        if attempt.number == 1 and not self.uncommitted_steps:
            return
        first_step, has_loaded = reading.first_step, attempt.seconds_by_cause.get("checkpoint_load", 0.0) > 0
        if self.gap_seconds > 0:
            if not first_step and not has_loaded:
                self._start_over(None)
                return
            self._count_gap()
        if first_step is not None and (first_step != 0 or not has_loaded):
            resume_step, is_comparable = first_step, True
        else:
            # A process that loads a checkpoint and counts from 0 is assumed to resume from the latest save.
            resume_step, is_comparable = self.saved_step or 0, False
        for segment in self.uncommitted_steps:
            steps = segment.last_step - segment.first_step + 1
            kept_steps = min(max(resume_step - segment.first_step + 1, 0), steps)
            if kept_steps:
                self._credit(
                    segment.first_step - 1,
                    segment.first_step - 1 + kept_steps,
                    segment.seconds * kept_steps / steps,
                )
            self.badput["lost_progress"] += segment.seconds * (steps - kept_steps) / steps
            self.lost_steps += steps - kept_steps
        self.uncommitted_steps = []
        if self.saved_step is not None:
            self.lost_steps += max(0, self.saved_step - resume_step)
        self.saved_step = resume_step
        if not is_comparable:
            # The steps of this process count from a different start.
            self.highest_step = self.saved_step = None

    def _start_over(self, previous: Attempt | None) -> None:
        """Start a new task. The uncommitted work is lost, and the time between the tasks is not counted.

        *previous* is the last attempt of the previous task, or None if its work is already part of `uncommitted_steps`.
        """
        if previous is not None:
            self.uncommitted_steps += previous.unsaved_steps()
        self.badput["lost_progress"] += sum(segment.seconds for segment in self.uncommitted_steps)
        self.uncommitted_steps = []
        self.highest_step = self.saved_step = None
        self.gap_seconds = 0.0
        if self.attempt is not None:
            self.attempt.number, self.attempt.is_resumed = 1, True

    def _count_gap(self) -> None:
        """Count the time between the attempts as downtime, once they are known to belong to one task."""
        self._count_badput("downtime", self.gap_seconds)
        self.gap_seconds = 0.0

    def _count_badput(self, cause: str, seconds: float) -> None:
        """Count measured time outside the phases of all attempts as badput. A negative time, after a clock step, is ignored."""
        seconds = max(0.0, seconds)
        self.badput[cause] += seconds
        self.clock_seconds += seconds

    def _balance(self) -> None:
        """Set the wall time to the sum of all parts. Unexplained time is added to `other`, so that no counter decreases."""
        explained_seconds = self.productive_seconds + self.uncommitted_seconds + sum(self.badput.values())
        self.wall_seconds = max(self.wall_seconds, self.clock_seconds, explained_seconds)
        self.badput["other"] += self.wall_seconds - explained_seconds


def _may_only_warm_up(attempt: Attempt, reading: TrainingReading) -> bool:
    """Return True if an inferred loop may be a warm-up before the training resumes."""
    saved_or_loaded = reading.committed_step is not None or "checkpoint_load" in attempt.seconds_by_cause
    return reading.inferred_loop and not saved_or_loaded and attempt.phase_seconds < INFERRED_LOOP_SECONDS
