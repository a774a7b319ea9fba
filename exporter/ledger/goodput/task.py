"""Goodput of a task: what its wall time went into, over all attempts at it; arithmetic, no clock of its own.

    wall = productive + uncommitted + badput by cause

holds at every moment. Work is *productive* once a successful save covers it, or its process has done all that it was to
do; before that it is *uncommitted*. When a process begins its training at step s, uncommitted work of steps up to s has
been saved after all, and that of later steps moves to `lost_progress`. Where it goes back behind a save, productive work
cannot become less: the repetition counts as `lost_progress` until the training is where it was. `other` is what is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from exporter.recording.values import END_REASONS, TrainingReading
from exporter.training.phases import PHASES, WORK

DOWNTIME_LAG_SECONDS = 60.0
"""Downtime is counted so much later: the process that ends it begins long before it is first heard of."""
KEPT_IDS = 64
"""Processes that are remembered so that none counts twice."""

CAUSE_OF_PHASE: Mapping[str, str] = {
    name: phase.badput for name, phase in PHASES.items() if phase.badput and phase.badput != "other"
}
"""What time in a phase is lost to; in one that is neither here nor work it is `other`."""

CAUSES = (*dict.fromkeys(CAUSE_OF_PHASE.values()), "lost_progress", "downtime", "hang", "other")
"""What wall time can be lost to."""

HANG_SECONDS, HANG_STEPS = 300.0, 5.0
"""A step that takes longer than this, and than so many of the longest before it, hangs."""

GUESS_SECONDS = 60.0
"""A process whose loop was guessed may take so long to load a checkpoint, or to tell where it goes on: it warms up."""

NOTHING_TOLD = TrainingReading(phase="init")

Segment = tuple[int, int, float]
"""Work of steps: the first, the last, seconds."""


@dataclass(slots=True, eq=False)
class Attempt:
    """What is known and counted of one process of rank 0, from its first word to its end; times are Unix times."""

    process: str
    run: str
    number: int  # 1 for the first of its task
    start: float  # of the process
    recorded: float  # of its recording
    pid: int = 0  # as the process itself has it
    machine: tuple[str, str] = ("", "")  # name and boot, to tell a restart of it
    validates: bool = False  # validation counts as productive
    tagged: bool = False  # a session tag, and not the run's name, ties it to others
    written: float = 0.0  # its last snapshot that was counted
    reading: TrainingReading = NOTHING_TOLD  # the latest, without what describes the run
    seconds: float = 0.0  # of all its phases, as counted
    spent: dict[str, float] = field(default_factory=dict)  # seconds lost, by cause, as counted; no `other`
    failed: float = 0.0  # seconds of iterations that failed, as counted
    committed: float = 0.0  # work that is safe, as counted
    committed_step: int | None = None
    first_step_seconds: float | None = None  # from its start to the end of its first step
    resumed: bool = False  # it is settled where it goes on, and what was lost before
    final: bool = False  # the process has ended in order, as its last snapshot says
    ended: float | None = None
    reason: str = ""  # of its end
    orderly: bool = False  # it did all that it was to do
    completed: bool = False  # all of its work is counted as done

    @property
    def uncommitted(self) -> float:
        """Work of completed iterations that no save covers."""
        return max(0.0, self.reading.work_seconds - self.committed)

    @property
    def covered(self) -> int | None:
        """The last step that a save covers, else the one before the first; None where that is not known."""
        return self.reading.first_step if self.committed_step is None else self.committed_step

    def hangs_for(self, seconds: float) -> str:
        """What a step that did not end is lost to."""
        longest = max(HANG_SECONDS, HANG_STEPS * (self.reading.longest_step_seconds or 0.0))
        return "hang" if seconds > longest else "lost_progress"

    def left_behind(self) -> list[Segment]:
        """Give the work that no save covers, step by step as far as that is known."""
        missing, segments = self.uncommitted, self.reading.segments
        known = sum(seconds for *_, seconds in segments)
        if missing > 0 and known > 0:
            # What the process tells of the steps and of the whole may be some roundings apart. There, a step is named
            # by the number of those before it; here by that and itself, as positions are.
            return [(first + 1, last + 1, seconds * missing / known) for _, first, last, seconds in segments]
        last = 1 if self.reading.step is None else self.reading.step
        first = last if self.covered is None else min(last, self.covered + 1)
        return [(first, last, missing)] if missing > 0 else []


@dataclass(slots=True, eq=False)
class Goodput:
    """All attempts at one task, and those at tasks of the same name before it."""

    productive: float = 0.0  # work that is safe
    validated: float = 0.0  # what of that is validation
    badput: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    wall: float = 0.0
    lost_steps: int = 0  # executed, and have to be again
    restarts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(END_REASONS, 0))
    interruptions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(END_REASONS, 0))
    attempt: Attempt | None = None  # the latest
    pending: list[Segment] = field(default_factory=list)  # of the dead, until the next tells where it goes on
    high: int | None = None  # highest step whose work is productive; None where steps cannot be compared
    position: int | None = None  # step from which the training would go on, as far as saves tell
    gap: float = 0.0  # seconds between attempts of which it is not known whether they belong to one task
    gap_counted: float = 0.0  # downtime counted since the end of the latest attempt
    target: float = 0.0  # wall time as the clocks have it
    taken: list[str] = field(default_factory=list)  # ids of processes before the latest, oldest first
    trains: bool = False  # any process has told of training

    @property
    def uncommitted(self) -> float:
        """Work at risk, of the living and of the dead."""
        waiting = sum(seconds for _, _, seconds in self.pending)
        attempt = self.attempt
        return waiting if attempt is None else waiting + attempt.uncommitted + attempt.reading.open_seconds

    @property
    def latest(self) -> Attempt:
        """The latest attempt, of which there is one."""
        assert self.attempt is not None  # noqa: S101
        return self.attempt

    def knows(self, process_id: str) -> bool:
        """Whether a process was, or is, an attempt of this task."""
        return process_id in self.taken or (self.attempt is not None and self.attempt.process == process_id)

    # Attempts -------------------------------------------------------------------------------------------

    def begin(self, attempt: Attempt, *, new_after_seconds: float) -> None:
        """Take note of a process that is not the one before.

        One without a session tag that begins `new_after_seconds` after the end of the last one, at step 0 and without
        loading a checkpoint, begins another task.
        """
        before, self.attempt = self.attempt, attempt
        start = attempt.start
        if before is not None:
            self.taken = [*self.taken, before.process][-KEPT_IDS:]
            end = start if before.ended is None else before.ended
            gap = max(0.0, start - end, self.gap_counted)
            # One that has not trained, such as an evaluation in between, completes no task.
            if before.orderly and before.reading.loop and not attempt.tagged:
                self._start_over(before)
            else:
                attempt.number = before.number + 1
                self.restarts[before.reason] += 1
                self.pending += before.left_behind()
                self.gap += gap - self.gap_counted
                attempt.resumed = False
                if attempt.tagged or self.gap <= new_after_seconds:
                    self._count_gap()
            start = max(start, end + gap)
        self.gap_counted = 0.0
        self._lose("init", attempt.recorded - start)
        self._balance()

    def update(self, reading: TrainingReading | None, *, written: float, final: bool) -> None:
        """Count what the process of the latest attempt has brought since the last time, and whether it said that it ends."""
        attempt = self.latest
        attempt.final = attempt.final or final
        # The latest word, though the clock may have been set back since the one before.
        attempt.written = written
        if reading is None:  # nothing is known but that it runs, and has not begun to train
            reading = TrainingReading(phase="init", phases={"init": max(0.0, written - attempt.recorded)})
        else:
            self.trains = True
        self._count_phases(attempt, reading)
        if reading.loop and not _may_only_warm_up(attempt, reading):
            self._resume(attempt, reading)
        self._note_position(attempt, reading)
        open_seconds = 0.0 if attempt.ended is not None else reading.open_seconds
        attempt.reading = reading.replace(facts=(), history=(), history_phases=(), open_seconds=open_seconds)
        self._commit(attempt)
        self._balance()

    def end(self, at: float, reason: str, *, status: int | None = None, believed: bool = True) -> None:
        """Take note of the end of the latest attempt, its exit status where somebody saw it, and why, of `END_REASONS`.

        Without a status, a process that exited normally and told of no failure may be `believed` to have done all that
        it was to do.
        """
        attempt = self.latest
        attempt.ended = at
        reading = attempt.reading
        said = reading.finished or (believed and attempt.final and not reading.failure)
        attempt.orderly = said if status is None else status == 0
        attempt.reason = "exit" if attempt.orderly else reason
        tail = max(0.0, at - max(attempt.written, attempt.recorded))
        self.target += tail
        lost, attempt.reading = reading.open_seconds, reading.replace(open_seconds=0.0)
        if attempt.orderly:
            self.complete()  # what it did after its last step is no work that has to be done again
            return
        self.interruptions[reason] += 1
        if reading.phase in WORK:
            lost += tail
        else:
            self.badput[CAUSE_OF_PHASE.get(reading.phase, "other")] += tail
        self.badput[attempt.hangs_for(lost)] += lost
        self._balance()

    def complete(self) -> None:
        """Count all work of the latest attempt as done for good, whether a save covers it or not."""
        attempt = self.latest
        if attempt.reading.loop:
            self._resume(attempt, attempt.reading)
        attempt.completed = True
        self._credit_rest(attempt)
        self._balance()

    def revive(self) -> None:
        """Take back the end of an attempt: its process lives, and only its lock could not be seen for a while."""
        attempt = self.latest
        attempt.ended, attempt.orderly = None, False

    def wait(self, since_end: float) -> None:
        """Count the time since the end of the latest attempt, if another one is to be expected."""
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
        lost: dict[str, float] = {}
        for phase, spent in reading.phases.items():
            if (cause := CAUSE_OF_PHASE.get(phase)) is not None:
                lost[cause] = lost.get(cause, 0.0) + spent
        for cause, spent in lost.items():
            grown = spent - attempt.spent.get(cause, 0.0)
            if grown > 0:
                attempt.spent[cause] = spent
                if cause == "validation" and attempt.validates:
                    self.productive += grown
                    self.validated += grown
                else:
                    self.badput[cause] += grown
        failed = reading.failed_seconds - attempt.failed
        if failed > 0:
            self.badput[attempt.hangs_for(failed)] += failed
            attempt.failed = reading.failed_seconds

    def _note_position(self, attempt: Attempt, reading: TrainingReading) -> None:
        before = attempt.reading
        if 0 < before.loop < reading.loop and (reading.step or 0) < (before.step or 0):
            # It counts from somewhere else: its steps are no repetition.
            self.high = self.position = None
        if attempt.first_step_seconds is None and reading.steps and reading.last_progress is not None:
            # Steps that have ended since are taken to be as long as each other.
            since = reading.work_seconds * (reading.steps - 1) / reading.steps
            attempt.first_step_seconds = max(0.0, reading.last_progress - since - attempt.start)

    def _commit(self, attempt: Attempt) -> None:
        reading = attempt.reading
        if attempt.completed:
            self._credit_rest(attempt)
            return
        committed = min(reading.committed_seconds, reading.work_seconds)
        if committed > attempt.committed:
            self._credit(attempt.covered, reading.committed_step, committed - attempt.committed)
            attempt.committed = committed
        if reading.committed_step is not None:
            attempt.committed_step = self.position = reading.committed_step

    def _credit_rest(self, attempt: Attempt) -> None:
        """All of its work is done for good."""
        work, step = attempt.reading.work_seconds, attempt.reading.step
        if work > attempt.committed:
            self._credit(attempt.covered, step, work - attempt.committed)
            attempt.committed = work
        if step is not None:
            attempt.committed_step = self.position = step

    def _credit(self, before: int | None, last: int | None, seconds: float) -> None:
        """Count work of the steps after `before` and up to `last`, which is safe now."""
        share = 0.0  # of steps whose work is productive already
        if before is not None and last is not None and last > before and self.high is not None:
            share = max(0, min(last, self.high) - before) / (last - before)
        self.badput["lost_progress"] += seconds * share
        self.productive += seconds * (1 - share)
        if last is not None:
            self.high = last if self.high is None else max(self.high, last)

    def _resume(self, attempt: Attempt, reading: TrainingReading) -> None:
        """Settle what the processes before have left, now that this one tells where it goes on."""
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
        # One that loads a checkpoint and counts from 0 all the same goes on from the latest save, whatever it says.
        said = first is not None and (first != 0 or not loads)
        going_on = first if said and first is not None else self.position or 0
        for start, last, seconds in self.pending:
            steps = last - start + 1
            kept = min(max(going_on - start + 1, 0), steps)
            if kept:
                self._credit(start - 1, start - 1 + kept, seconds * kept / steps)
            self.badput["lost_progress"] += seconds * (steps - kept) / steps
            self.lost_steps += steps - kept
        self.pending = []
        if self.position is not None:
            self.lost_steps += max(0, self.position - going_on)
        self.position = going_on
        if not said:
            self.high = self.position = None  # its steps cannot be compared with those before

    def _start_over(self, before: Attempt | None) -> None:
        """Begin another task: nothing of the one before is done again, and the time between is nobody's."""
        if before is not None:
            self.pending += before.left_behind()
        self.badput["lost_progress"] += sum(seconds for _, _, seconds in self.pending)
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
        """Let wall time be the sum of its parts: what no clock explains is `other`, and nothing falls."""
        known = self.productive + self.uncommitted + sum(self.badput.values())
        self.wall = max(self.wall, self.target, known)
        self.badput["other"] += self.wall - known


def _may_only_warm_up(attempt: Attempt, reading: TrainingReading) -> bool:
    """Tell whether the loop may be no training yet, so that where it goes on is still to come."""
    saved_or_loaded = reading.committed_step is not None or "checkpoint_load" in attempt.spent
    return reading.guessed and not saved_or_loaded and attempt.seconds < GUESS_SECONDS
