"""An attempt: one process of rank 0, from its first word to its end, as far as it is counted.

Runs in the sidecar, on the ledger's collecting thread; values only. `goodput` counts what an attempt brings; what was
counted so far stands here, so that a sidecar that takes over from the state file counts nothing twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from exporter.recording.values import TrainingReading
from exporter.training.phases import PHASES

CAUSES = (
    "init",
    "compile",
    "data_stall",
    "checkpoint_save",
    "checkpoint_load",
    "validation",
    "lost_progress",
    "downtime",
    "hang",
    "other",
)
"""What wall time can be lost to."""

CAUSE_OF_PHASE: Mapping[str, str] = {
    name: phase.badput for name, phase in PHASES.items() if phase.badput and phase.badput != "other"
}
"""What time in a phase is lost to; in one that is neither here nor work it is `other`."""

HANG_SECONDS, HANG_STEPS = 300.0, 5.0
"""A step that takes longer than this, and than so many of the longest before it, hangs."""

Segment = tuple[int, int, float]
"""Work of steps: the first, the last, seconds."""


@dataclass(slots=True, eq=False)
class Attempt:
    """What is known and counted of one process.

    Attributes:
        process: Its id.
        run: Its run.
        number: 1 for the first of its task.
        start: Unix time at which the process began.
        recorded: Unix time at which its recording began.
        pid: As the process itself has it.
        machine: Name and boot of the machine, to tell a restart of it.
        validates: Whether validation counts as productive.
        tagged: Whether a session tag, and not the run's name, ties it to others.
        perf_tag: What its performance may be compared with.
        told: Whether it has told of its training at all.
        written: Unix time of its last snapshot that was counted.
        seconds: Time of all its phases.
        spent: Time that was lost, by cause; without `other`.
        work: Work of its completed iterations.
        committed: What of that a save covers.
        failed: Work of iterations that failed.
        open: Work of the iteration under way.
        segments: Work that no save covers.
        phase: What the main thread does.
        first_step: Step at which its training began; None as long as that is not known.
        step: Steps completed.
        steps: Steps completed in this process.
        committed_step: Of its latest save.
        loop: Training loops begun.
        longest: The longest step.
        first_step_seconds: Time from its start to the end of its first step.
        resumed: Whether it is settled where it goes on, and what was lost before.
        finished: Whether its application ended in order.
        final: Whether the process has ended in order, as its last snapshot says.
        failure: What it said of its end.
        ended: Unix time of its end; None while it lives.
        reason: Why it ended; "" as long as that is not settled, and for one that did all that it was to do.
        orderly: Whether it did.
        settled: Whether that is settled.
        completed: Whether all of its work is counted as done.
    """

    process: str
    run: str
    number: int
    start: float
    recorded: float
    pid: int = 0
    machine: tuple[str, str] = ("", "")
    validates: bool = False
    tagged: bool = False
    perf_tag: str = ""
    told: bool = False
    written: float = 0.0
    seconds: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)
    work: float = 0.0
    committed: float = 0.0
    failed: float = 0.0
    open: float = 0.0
    segments: tuple[Segment, ...] = ()
    phase: str = "init"
    first_step: int | None = None
    step: int | None = None
    steps: int = 0
    committed_step: int | None = None
    loop: int = 0
    longest: float | None = None
    first_step_seconds: float | None = None
    resumed: bool = False
    finished: bool = False
    final: bool = False
    failure: str = ""
    ended: float | None = None
    reason: str = ""
    orderly: bool = False
    settled: bool = False
    completed: bool = False

    @property
    def uncommitted(self) -> float:
        """Work of completed iterations that no save covers."""
        return max(0.0, self.work - self.committed)

    @property
    def loads(self) -> bool:
        """Whether it has loaded a checkpoint, as far as can be seen."""
        return self.spent.get("checkpoint_load", 0.0) > 0

    def hangs_after(self) -> float:
        """Tell from when on the step under way is taken for one that hangs."""
        return max(HANG_SECONDS, HANG_STEPS * (self.longest or 0.0))

    def left_behind(self) -> list[Segment]:
        """Give the work that no save covers, step by step as far as that is known."""
        missing = self.uncommitted
        if missing <= 0:
            return []
        known = sum(seconds for _, _, seconds in self.segments)
        if known <= 0:
            return [self._unknown_steps(missing)]
        # What the process tells of the steps and of the whole may be some roundings apart.
        return [(first, last, seconds * missing / known) for first, last, seconds in self.segments]

    def _unknown_steps(self, seconds: float) -> Segment:
        last = 1 if self.step is None else self.step
        before = self.first_step if self.committed_step is None else self.committed_step
        return (min(last, last if before is None else before + 1), last, seconds)


def lost_to(reading: TrainingReading) -> dict[str, float]:
    """Add up the phases of a process by what they are lost to, without work and `other`."""
    spent: dict[str, float] = {}
    for phase, seconds in reading.phases.items():
        cause = CAUSE_OF_PHASE.get(phase)
        if cause is not None:
            spent[cause] = spent.get(cause, 0.0) + seconds
    return spent
