"""Goodput accounting of a task: wall time by purpose, over all attempts; arithmetic without a clock.

    wall = productive + uncommitted + badput by cause

always holds. Work is *productive* when a successful save covers the work, or when the process has completed the
training; before, work is *uncommitted*. When a process starts training at step s, uncommitted work of steps up to s
was saved after all, and work of later steps becomes `lost_progress`. If a process resumes before an earlier save,
productive work does not decrease: the repetition counts as `lost_progress` until the training reaches the earlier step. In a
hang the work seconds of the open step count as `hang`; they are deducted from the step's work when the step ends.
`other` is the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from exporter.ledger.goodput.attempt import Attempt, Deduction, UncommittedSteps
from exporter.ledger.goodput.hang import HangRule
from exporter.recording.values import END_REASONS, TrainingReading
from exporter.training.phases import PHASES, WORK

DOWNTIME_LAG_SECONDS = 60.0
"""Delay before downtime is counted: the next process starts up to this long before the first snapshot."""
MAX_IDS = 64
"""Maximum number of stored process ids, which prevent that a process counts twice."""

CAUSE_OF_PHASE: Mapping[str, str] = {
    name: phase.badput for name, phase in PHASES.items() if phase.badput and phase.badput != "other"
}
"""Badput cause of each phase; a phase that is neither here nor work is `other`."""

CAUSES = (*dict.fromkeys(CAUSE_OF_PHASE.values()), "lost_progress", "downtime", "hang", "other")
"""Causes of badput."""

INFERRED_LOOP_SECONDS = 60.0
"""Time for a process with an inferred loop to load a checkpoint or report the first step."""


@dataclass(slots=True, eq=False)
class Goodput:
    """Accounting of all attempts at a task, and of earlier tasks with the same name."""

    productive: float = 0.0  # safe work
    validated: float = 0.0  # validation, as a part of productive
    badput: dict[str, float] = field(default_factory=dict)
    wall: float = 0.0
    lost_steps: int = 0  # executed steps that have to be repeated
    restarts: dict[str, int] = field(default_factory=dict)
    interruptions: dict[str, int] = field(default_factory=dict)
    attempt: Attempt | None = None  # the latest
    pending: list[UncommittedSteps] = field(
        default_factory=list
    )  # of ended attempts, until the next attempt reports a first step
    high: int | None = None  # highest step with productive work; None if steps are not comparable
    position: int | None = None  # step of the latest save
    gap: float = 0.0  # seconds between attempts that may belong to different tasks
    gap_counted: float = 0.0  # downtime counted since the end of the latest attempt
    target: float = 0.0  # wall time by the clocks
    taken: list[str] = field(default_factory=list)  # ids of processes before the latest, oldest first
    trains: bool = False  # a process reported training

    def __post_init__(self) -> None:
        # State of an older release may lack a cause or a reason.
        self.badput = {**dict.fromkeys(CAUSES, 0.0), **self.badput}
        self.restarts = {**dict.fromkeys(END_REASONS, 0), **self.restarts}
        self.interruptions = {**dict.fromkeys(END_REASONS, 0), **self.interruptions}

    @property
    def uncommitted(self) -> float:
        """Work at risk, of the current and of earlier attempts."""
        waiting = sum(segment.seconds for segment in self.pending)
        attempt = self.attempt
        return waiting if attempt is None else waiting + attempt.uncommitted + attempt.open_seconds

    @property
    def latest(self) -> Attempt:
        """Latest attempt; the caller checks that an attempt exists."""
        assert self.attempt is not None  # noqa: S101 - the caller has checked that an attempt exists
        return self.attempt

    def knows(self, process_id: str) -> bool:
        """Return True if a process is an attempt of this task."""
        return process_id in self.taken or (self.attempt is not None and self.attempt.process == process_id)

    # Attempts -------------------------------------------------------------------------------------------

    def begin(self, attempt: Attempt, *, new_after_seconds: float) -> None:
        """Begin an attempt of a new process.

        A process without a session tag that starts `new_after_seconds` after the end of the last attempt, at step 0 and
        without loading a checkpoint, starts a new task.
        """
        previous, self.attempt = self.attempt, attempt
        start = attempt.start
        if previous is not None:
            self.taken = [*self.taken, previous.process][-MAX_IDS:]
            end = start if previous.ended is None else previous.ended
            gap = max(0.0, start - end, self.gap_counted)
            # A process that did not train, such as an evaluation, completes no task.
            if previous.orderly and previous.reading.loop and not attempt.tagged:
                self._start_over(previous)
            else:
                attempt.number = previous.number + 1
                self.restarts[previous.reason] += 1
                self.pending += previous.left_behind()
                self.gap += gap - self.gap_counted
                attempt.resumed = False
                if attempt.tagged or self.gap <= new_after_seconds:
                    self._count_gap()
            start = max(start, end + gap)
        self.gap_counted = 0.0
        self._lose("init", attempt.recorded - start)
        self._balance()

    def update(
        self, reading: TrainingReading | None, *, written: float, final: bool, hangs: bool = False
    ) -> None:
        """Count a snapshot of the latest attempt; *hangs* is the verdict of the hang rule."""
        attempt = self.latest
        attempt.final = attempt.final or final
        # Assigned even if the wall clock was set back.
        attempt.written = written
        if reading is None:  # the process runs and does not train yet
            reading = TrainingReading(phase="init", phases={"init": max(0.0, written - attempt.recorded)})
        else:
            self.trains = True
        self._count_phases(attempt, reading)
        self._count_hang(attempt, reading, hangs=hangs)
        if reading.loop and not _may_only_warm_up(attempt, reading):
            self._resume(attempt, reading)
        self._note_position(attempt, reading)
        open_seconds = 0.0 if attempt.ended is not None else reading.open_seconds
        attempt.reading = reading.replace(
            facts=(), intervals=(), history_phases=(), open_seconds=open_seconds
        )
        self._commit(attempt)
        self._balance()

    def end(self, at: float, reason: str, *, completed: bool, hang: HangRule) -> None:
        """Record the end of the latest attempt with a decided outcome; *reason* is from `END_REASONS`."""
        attempt = self.latest
        attempt.ended, attempt.orderly = at, completed
        attempt.reason = "exit" if completed else reason
        reading = attempt.reading
        tail = max(0.0, at - max(attempt.written, attempt.recorded))
        self.target += tail
        lost_seconds, hung = attempt.open_seconds, attempt.hung > 0
        attempt.reading, attempt.hung = reading.replace(open_seconds=0.0), 0.0
        if completed:
            self.complete()  # work after the last finished step need not be repeated
            return
        self.interruptions[reason] += 1
        if reading.phase in WORK:
            lost_seconds += tail
        else:
            self.badput[CAUSE_OF_PHASE.get(reading.phase, "other")] += tail
        self.badput["hang" if hung or lost_seconds > hang.limit_seconds(reading) else "lost_progress"] += (
            lost_seconds
        )
        self._balance()

    def complete(self) -> None:
        """Count all work of the latest attempt as safe, whether or not a save covers it."""
        attempt = self.latest
        if attempt.reading.loop:
            self._resume(attempt, attempt.reading)
        attempt.completed = True
        self._credit_rest(attempt)
        self._balance()

    def revive(self) -> None:
        """Reopen the latest attempt after the lock of the running process was temporarily invisible."""
        attempt = self.latest
        attempt.ended, attempt.orderly = None, False

    def wait(self, since_end: float) -> None:
        """Count the time since the end of the latest attempt as downtime, unless the attempt completed the training."""
        attempt = self.attempt
        if attempt is None or attempt.ended is None or attempt.orderly:
            return
        waited = since_end - DOWNTIME_LAG_SECONDS
        if waited > self.gap_counted:
            self._lose("downtime", waited - self.gap_counted)
            self.gap_counted = waited
            self._balance()

    # Arithmetic -----------------------------------------------------------------------------------------

    def _count_phases(self, attempt: Attempt, reading: TrainingReading) -> None:
        seconds = sum(reading.phases.values())
        self.target += max(0.0, seconds - attempt.seconds)
        attempt.seconds = max(attempt.seconds, seconds)
        seconds_by_cause: dict[str, float] = {}
        for phase, spent in reading.phases.items():
            if (cause := CAUSE_OF_PHASE.get(phase)) is not None:
                seconds_by_cause[cause] = seconds_by_cause.get(cause, 0.0) + spent
        for cause, spent in seconds_by_cause.items():
            grown = spent - attempt.spent.get(cause, 0.0)
            if grown > 0:
                attempt.spent[cause] = spent
                if cause == "validation" and attempt.validates:
                    self.productive += grown
                    self.validated += grown
                else:
                    self.badput[cause] += grown
        failed = reading.failed_seconds - attempt.failed
        if failed > 0:  # an iteration that raised
            self.badput["hang" if attempt.hung > 0 else "lost_progress"] += max(0.0, failed - attempt.hung)
            attempt.failed, attempt.hung = reading.failed_seconds, 0.0

    def _count_hang(self, attempt: Attempt, reading: TrainingReading, *, hangs: bool) -> None:
        """Count the open iteration of a hang; after the iteration ends, deduct the hang from the work."""
        previous = attempt.reading
        if attempt.hung > 0 and (reading.steps > previous.steps or reading.open_seconds < attempt.hung):
            grown = max(0.0, reading.work_seconds - previous.work_seconds)
            attempt.deductions.append(Deduction(previous.work_seconds, min(attempt.hung, grown)))
            attempt.hung = 0.0
        if hangs and reading.open_seconds > attempt.hung:
            self.badput["hang"] += reading.open_seconds - attempt.hung
            attempt.hung = reading.open_seconds

    def _note_position(self, attempt: Attempt, reading: TrainingReading) -> None:
        previous = attempt.reading
        if 0 < previous.loop < reading.loop and (reading.step or 0) < (previous.step or 0):
            # The new loop counts steps from a different start: no repetition.
            self.high = self.position = None
        if attempt.first_step_seconds is None and reading.steps and reading.last_progress is not None:
            # Steps since the first are assumed to be equally long.
            since = reading.work_seconds * (reading.steps - 1) / reading.steps
            attempt.first_step_seconds = max(0.0, reading.last_progress - since - attempt.start)

    def _commit(self, attempt: Attempt) -> None:
        reading = attempt.reading
        if attempt.completed:
            self._credit_rest(attempt)
            return
        committed = attempt.effective(min(reading.committed_seconds, reading.work_seconds))
        if committed > attempt.committed:
            self._credit(attempt.covered, reading.committed_step, committed - attempt.committed)
            attempt.committed = committed
        if reading.committed_step is not None:
            attempt.committed_step = self.position = reading.committed_step

    def _credit_rest(self, attempt: Attempt) -> None:
        """Count all work of an attempt as safe."""
        work, step = attempt.effective(attempt.reading.work_seconds), attempt.reading.step
        if work > attempt.committed:
            self._credit(attempt.covered, step, work - attempt.committed)
            attempt.committed = work
        if step is not None:
            attempt.committed_step = self.position = step

    def _credit(self, step_before: int | None, last_step: int | None, seconds: float) -> None:
        """Count work of the steps after *step_before* up to *last_step* as safe."""
        share = 0.0  # share of steps with productive work
        if (
            step_before is not None
            and last_step is not None
            and last_step > step_before
            and self.high is not None
        ):
            share = max(0, min(last_step, self.high) - step_before) / (last_step - step_before)
        self.badput["lost_progress"] += seconds * share
        self.productive += seconds * (1 - share)
        if last_step is not None:
            self.high = last_step if self.high is None else max(self.high, last_step)

    def _resume(self, attempt: Attempt, reading: TrainingReading) -> None:
        """Settle the uncommitted work of earlier attempts when the first step of this attempt is known."""
        if attempt.resumed:
            return
        attempt.resumed = True
        if attempt.number == 1 and not self.pending:
            return
        first, loads = reading.first_step, attempt.spent.get("checkpoint_load", 0.0) > 0
        if self.gap > 0:
            if not first and not loads:
                self._start_over(None)
                return
            self._count_gap()
        # A process that loads a checkpoint and counts from 0 resumes from the latest save.
        reported = first is not None and (first != 0 or not loads)
        resume_step = first if reported and first is not None else self.position or 0
        for segment in self.pending:
            steps = segment.last - segment.first + 1
            kept_steps = min(max(resume_step - segment.first + 1, 0), steps)
            if kept_steps:
                self._credit(
                    segment.first - 1, segment.first - 1 + kept_steps, segment.seconds * kept_steps / steps
                )
            self.badput["lost_progress"] += segment.seconds * (steps - kept_steps) / steps
            self.lost_steps += steps - kept_steps
        self.pending = []
        if self.position is not None:
            self.lost_steps += max(0, self.position - resume_step)
        self.position = resume_step
        if not reported:
            self.high = self.position = None  # the steps are not comparable with earlier ones

    def _start_over(self, previous: Attempt | None) -> None:
        """Start a new task: uncommitted work is lost, and the time between the tasks does not count."""
        if previous is not None:
            self.pending += previous.left_behind()
        self.badput["lost_progress"] += sum(segment.seconds for segment in self.pending)
        self.pending = []
        self.high = self.position = None
        self.gap = 0.0
        if self.attempt is not None:
            self.attempt.number, self.attempt.resumed = 1, True

    def _count_gap(self) -> None:
        self._lose("downtime", self.gap)
        self.gap = 0.0

    def _lose(self, cause: str, seconds: float) -> None:
        seconds = max(0.0, seconds)
        self.badput[cause] += seconds
        self.target += seconds

    def _balance(self) -> None:
        """Set the wall time to the sum of all parts; unexplained time is added to `other`, and no counter decreases."""
        explained_seconds = self.productive + self.uncommitted + sum(self.badput.values())
        self.wall = max(self.wall, self.target, explained_seconds)
        self.badput["other"] += self.wall - explained_seconds


def _may_only_warm_up(attempt: Attempt, reading: TrainingReading) -> bool:
    """Return True if an inferred loop may be a warm-up before the training resumes."""
    saved_or_loaded = reading.committed_step is not None or "checkpoint_load" in attempt.spent
    return reading.inferred_loop and not saved_or_loaded and attempt.seconds < INFERRED_LOOP_SECONDS
