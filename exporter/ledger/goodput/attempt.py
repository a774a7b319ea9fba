"""Accounting of an attempt: a process of rank 0, from the first snapshot to the exit."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from exporter.recording.values import TrainingReading

NO_READING = TrainingReading(phase="init")


@dataclass(frozen=True, slots=True)
class UncommittedSteps:
    """Seconds of uncommitted work of consecutive steps."""

    first: int
    last: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Deduction:
    """Interval of an attempt's work seconds that was counted as a hang."""

    start: float
    seconds: float

    def within(self, work_seconds: float) -> float:
        """Return the part of the interval within the first *work_seconds*."""
        return min(max(work_seconds - self.start, 0.0), self.seconds)


@dataclass(frozen=True, slots=True)
class MachineIdentity:
    """Host name and boot id, by which a reboot is recognised."""

    name: str = field(default_factory=socket.gethostname)
    boot: str = ""


@dataclass(slots=True, eq=False)
class Attempt:
    """Accounting of a process of rank 0; times are Unix times."""

    process: str
    run: str
    number: int  # 1 for the task's first
    start: float  # of the process
    recorded: float  # start of the recording
    pid: int = 0  # in the process's own pid namespace
    launch: str = ""  # id of the launch of `run`
    machine: MachineIdentity = field(default_factory=MachineIdentity)
    validates: bool = False  # validation counts as productive
    tagged: bool = False  # a session tag connects the attempts, not the run's name
    written: float = 0.0  # time of the last counted snapshot
    reading: TrainingReading = NO_READING  # the latest, without facts and history
    seconds: float = 0.0  # of all phases, as counted
    spent: dict[str, float] = field(
        default_factory=dict
    )  # lost seconds by cause, as counted; without `other`
    failed: float = 0.0  # seconds of failed iterations, as counted
    hung: float = 0.0  # work seconds of the open iteration that count as a hang
    deductions: list[Deduction] = field(default_factory=list)  # of hanging iterations that completed
    committed: float = 0.0  # safe work, as counted
    committed_step: int | None = None
    first_step_seconds: float | None = None  # from the start of the process to the end of the first step
    resumed: bool = False  # True once the first step is known and the work of earlier attempts is settled
    final: bool = False  # the last snapshot was written at a normal exit
    ended: float | None = None  # set when the outcome is decided
    reason: str = ""  # exit reason, from END_REASONS
    orderly: bool = False  # the process completed the training
    completed: bool = False  # all work is counted as safe

    def effective(self, work_seconds: float) -> float:
        """Return work seconds without the parts that were counted as hangs."""
        return work_seconds - sum(deduction.within(work_seconds) for deduction in self.deductions)

    @property
    def uncommitted(self) -> float:
        """Work of completed iterations that no save covers."""
        return max(0.0, self.effective(self.reading.work_seconds) - self.committed)

    @property
    def open_seconds(self) -> float:
        """Work of the open iteration that is not counted as a hang."""
        return max(0.0, self.reading.open_seconds - self.hung)

    @property
    def covered(self) -> int | None:
        """Last step covered by a save, otherwise the step before the first; None if unknown."""
        return self.reading.first_step if self.committed_step is None else self.committed_step

    def left_behind(self) -> list[UncommittedSteps]:
        """Return the work that no save covers, by step ranges if the process reports them."""
        missing, segments = self.uncommitted, self.reading.segments
        reported_seconds = sum(seconds for *_, seconds in segments)
        if missing > 0 and reported_seconds > 0:
            # Readings number a step by the previous steps; positions here include the step.
            return [
                UncommittedSteps(first + 1, last + 1, seconds * missing / reported_seconds)
                for _, first, last, seconds in segments
            ]
        last = 1 if self.reading.step is None else self.reading.step
        first = last if self.covered is None else min(last, self.covered + 1)
        return [UncommittedSteps(first, last, missing)] if missing > 0 else []
