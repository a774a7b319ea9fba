"""Accounting of an attempt: a process of a node's lowest rank, from its start to its exit."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from exporter.recording.values import TrainingReading

NO_READING = TrainingReading(phase="init")
"""Reading of an attempt that has not reported training."""


@dataclass(frozen=True, slots=True)
class UncommittedSteps:
    """Seconds of uncommitted work of consecutive steps, which are numbered from 1."""

    JSON_KEYS: ClassVar[Mapping[str, str]] = {"first_step": "first", "last_step": "last"}
    first_step: int
    last_step: int  # inclusive
    seconds: float


@dataclass(frozen=True, slots=True)
class Deduction:
    """Interval of an attempt's work that was counted as a hang."""

    start: float  # work seconds of the attempt before the interval
    seconds: float

    def within(self, work_seconds: float) -> float:
        """Return the seconds of the interval that lie within the first *work_seconds*."""
        return min(max(work_seconds - self.start, 0.0), self.seconds)


@dataclass(frozen=True, slots=True)
class MachineIdentity:
    """Host name and boot id, which identify a machine and a reboot."""

    name: str = field(default_factory=socket.gethostname)
    boot: str = ""


@dataclass(slots=True, eq=False)
class Attempt:
    """Accounting of a process of the node's lowest rank; times are Unix times."""

    JSON_KEYS: ClassVar[Mapping[str, str]] = {
        "process_id": "process",
        "is_validation_productive": "validates",
        "started_at": "start",
        "recorded_at": "recorded",
        "has_tag": "tagged",
        "written_at": "written",
        "phase_seconds": "seconds",
        "seconds_by_cause": "spent",
        "failed_seconds": "failed",
        "hung_seconds": "hung",
        "committed_seconds": "committed",
        "is_resumed": "resumed",
        "is_final": "final",
        "ended_at": "ended",
        "has_completed": "orderly",
        "is_credited": "completed",
    }
    process_id: str
    run: str
    number: int  # 1 for the first attempt of the task
    started_at: float  # start of the process
    recorded_at: float  # start of the recording
    pid: int = 0  # in the process's own pid namespace
    launch: str = ""  # id of the launch of `run`
    machine: MachineIdentity = field(default_factory=MachineIdentity)
    is_validation_productive: bool = False
    has_tag: bool = False  # True if a session tag connects the attempts, and not the name of the run
    written_at: float = 0.0  # time of the last counted snapshot
    reading: TrainingReading = NO_READING  # latest reading, without facts and history
    phase_seconds: float = 0.0  # counted seconds of all phases
    # counted seconds of phases by badput cause, without `other`
    seconds_by_cause: dict[str, float] = field(default_factory=dict)
    failed_seconds: float = 0.0  # counted seconds of failed iterations
    hung_seconds: float = 0.0  # work seconds of the open iteration that count as a hang
    deductions: list[Deduction] = field(default_factory=list)  # of iterations that hung and then completed
    committed_seconds: float = 0.0  # work that was counted as productive
    committed_step: int | None = None  # last step covered by a save
    first_step_seconds: float | None = None  # from the start of the process to the end of the first step
    # True once the first step is known, and the work of earlier attempts is counted as productive or lost
    is_resumed: bool = False
    is_final: bool = False  # the last snapshot was written at a normal exit
    ended_at: float | None = None  # set when the outcome is decided
    # exit reason, from END_REASONS; "exit" if the training was completed, empty before the end
    reason: str = ""
    has_completed: bool = False  # the process completed the training
    is_credited: bool = False  # all work is counted as productive, without a save

    def effective_seconds(self, work_seconds: float) -> float:
        """Return work seconds without the parts that were counted as hangs."""
        return work_seconds - sum(deduction.within(work_seconds) for deduction in self.deductions)

    @property
    def uncommitted_seconds(self) -> float:
        """Seconds of completed iterations that no save covers."""
        return max(0.0, self.effective_seconds(self.reading.work_seconds) - self.committed_seconds)

    @property
    def open_seconds(self) -> float:
        """Seconds of the open iteration that are not counted as a hang."""
        return max(0.0, self.reading.open_seconds - self.hung_seconds)

    @property
    def covered_step(self) -> int | None:
        """Last step that a save covers. Before the first save, the step before the first step of the process. None if unknown.

        Steps are numbered from 1 here. A reading numbers its first step from 0, which is the number of the step before in this numbering.
        """
        return self.reading.first_step if self.committed_step is None else self.committed_step

    def unsaved_steps(self) -> list[UncommittedSteps]:
        """Return the work that no save covers, by the step ranges that the process reports. Without such ranges, return a single range.

        The list is empty if all work is covered.
        """
        unsaved_seconds, segments = self.uncommitted_seconds, self.reading.segments
        reported_seconds = sum(segment.seconds for segment in segments)
        if unsaved_seconds > 0 and reported_seconds > 0:
            # A reading numbers its steps from 0, `UncommittedSteps` from 1.
            return [
                UncommittedSteps(
                    segment.first_step + 1,
                    segment.last_step + 1,
                    segment.seconds * unsaved_seconds / reported_seconds,
                )
                for segment in segments
            ]
        last = 1 if self.reading.step is None else self.reading.step
        first = last if self.covered_step is None else min(last, self.covered_step + 1)
        return [UncommittedSteps(first, last, unsaved_seconds)] if unsaved_seconds > 0 else []
