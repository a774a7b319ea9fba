"""Checkpoints: saves in progress, successful saves, and the work that the saves cover.

The step identifies a save. Asynchronous saves may be confirmed at any time and in any order. A save covers the work that was
completed before its start.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from exporter.recording.conversion import safe_repr
from exporter.recording.value_class import Value, value_class
from exporter.recording.values import WorkSegment
from exporter.recording.windows import median
from exporter.training.metrics import Families, to_amount
from exporter.training.progress import is_count
from exporter.training.records import SaveReported

MAX_PENDING_SAVES = 1000
"""Limit of unconfirmed asynchronous saves. Above the limit, the oldest save is dropped."""
INTERVAL_SAVES = 5
"""Number of latest successful saves whose intervals have the published median."""
SAVE_KINDS = ("sync", "async", "local")
"""Values of the label `kind`. A `local` save is stored on the node, and is lost with the node."""
MAX_SEGMENTS = 64
"""Limit of the segments of uncovered work. Above the limit, the two oldest segments are merged."""


@value_class
class SavePolicy(Value):
    """Properties of the saves that start now."""

    strategy: str = "sync"  # sync or async
    enabled: bool = True  # False if the job is configured to record no saves


@dataclass(slots=True)
class Segment:
    """Work of consecutive steps of a loop that no checkpoint covers."""

    loop: int  # number of the loop
    first: int  # step
    last: int  # step, included
    seconds: float
    started_saves: int  # number of saves that started before the work


class Work:
    """Work of the completed and the failed iterations, in seconds. *Committed* work is covered by a successful save."""

    def __init__(self) -> None:
        self._started_saves = self._committed_save = 0
        self.reset()

    def reset(self) -> None:
        """Count from zero. A save in progress then covers no work."""
        self.seconds = self.failed_seconds = self.committed_seconds = 0.0
        self.committed_step: int | None = None
        self._segments: list[Segment] = []

    def add_completed(self, loop: int, first: int, last: int, seconds: float) -> None:
        """Add the work of consecutive completed steps of a loop."""
        self.seconds += seconds
        if self._segments:
            latest_segment = self._segments[-1]
            if (
                latest_segment.last < first
                and latest_segment.loop == loop
                and latest_segment.started_saves == self._started_saves
            ):
                latest_segment.last = last
                latest_segment.seconds += seconds
                return
        self._segments.append(Segment(loop, first, last, seconds, self._started_saves))
        if len(self._segments) > MAX_SEGMENTS:  # merge the two oldest segments; a save commits both together
            first_segment = self._segments.pop(0)
            second_segment = self._segments[0]
            second_segment.seconds += first_segment.seconds
            # After a resume or in another loop, the steps of the two segments are not in ascending order.
            if first_segment.loop == second_segment.loop and first_segment.last < second_segment.first:
                second_segment.first = first_segment.first

    def begin_save(self) -> int:
        """Record the start of a save. Return its number, for `commit`."""
        self._started_saves += 1
        return self._started_saves

    def commit(self, number: int, step: int | None) -> None:
        """Record the success of a save and its completed steps, unless a later save has already succeeded."""
        if number > self._committed_save:
            self._committed_save = number
            self._keep([segment for segment in self._segments if segment.started_saves >= number], step)

    def commit_steps(self, step: int) -> None:
        """Record the success of a save whose start was not recorded. The save covers the work of the steps before *step*.

        In a segment that is covered in part, all steps are assumed to have the same work: of the steps 10 to 19, *step* 15 covers one half.
        """
        for segment in self._segments:
            steps = segment.last - segment.first + 1
            covered_steps = min(max(step - segment.first, 0), steps)
            segment.seconds -= segment.seconds * covered_steps / steps
            segment.first += covered_steps
        self._keep([segment for segment in self._segments if segment.first <= segment.last], step)

    def _keep(self, segments: list[Segment], step: int | None) -> None:
        """Set the segments that a save has not covered. All other work is committed."""
        self._segments = segments
        uncommitted_seconds = sum([segment.seconds for segment in segments])
        self.committed_seconds = max(self.committed_seconds, self.seconds - uncommitted_seconds)
        self.committed_step = step

    def segments(self) -> tuple[WorkSegment, ...]:
        """Return the work that no save covers, the oldest first."""
        return tuple(
            [
                WorkSegment(segment.loop, segment.first, segment.last, segment.seconds)
                for segment in self._segments
            ]
        )


@dataclass(eq=False, slots=True)
class Save:
    """Save of a step."""

    step: int
    strategy: str
    start_time: float  # monotonic
    completed_steps: int  # of the training when the save started
    number: int  # from `Work.begin_save`
    is_confirmed: bool = False


class Checkpoints:
    """Saves of a process: their counts and durations, and the work that they cover."""

    def __init__(self, families: Families, work: Work) -> None:
        self._families = families
        self._work = work
        self.pending_saves: dict[int, Save] = {}  # unconfirmed saves by step
        self._successes: deque[float] = deque(maxlen=INTERVAL_SAVES)
        self.begin_loop()

    def begin_loop(self) -> None:
        """Start a training loop, whose step number may be lower than that of the loop before."""
        self._furthest_step: int | None = None  # number of the last confirmed save, as the job reports it
        self._covered_steps = 0  # completed steps that a confirmed save covers

    def begin(self, step: int, strategy: str, start_time: float, completed_steps: int) -> Save:
        """Record the start of a save. The save replaces an unconfirmed save of the same step."""
        save = Save(step, strategy, start_time, completed_steps, self._work.begin_save())
        self.pending_saves.pop(step, None)
        self.pending_saves[step] = save
        if len(self.pending_saves) > MAX_PENDING_SAVES:
            del self.pending_saves[next(iter(self.pending_saves))]
        self._count(strategy)
        return save

    def find_pending(self, step: object) -> Save | None:
        """Return the unconfirmed save of a step, or None."""
        return self.pending_saves.get(step) if isinstance(step, int) else None

    def succeed(self, save: Save, end_time: float, unix_seconds: float) -> None:
        """Record the success of a save. *end_time* (monotonic) and *unix_seconds* are the same moment."""
        self.pending_saves.pop(save.step, None)
        save.is_confirmed = True
        self._covered_steps = max(self._covered_steps, save.completed_steps)
        self._work.commit(save.number, save.completed_steps)
        self._count_success(
            save.strategy, save.step, end_time, unix_seconds, max(end_time - save.start_time, 0.0)
        )

    def fail(self, save: Save) -> None:
        """Record the failure of a save, unless the save is confirmed."""
        if not save.is_confirmed:
            if self.pending_saves.get(save.step) is save:
                del self.pending_saves[save.step]
            self._count(save.strategy, "failed")

    def observe_blocking(self, kind: str, seconds: float) -> None:
        """Add the time for which a save blocked the training to the histogram."""
        self._families.histogram("training.checkpoint_duration", kind=kind, part="blocking").observe(seconds)

    def report(self, save: SaveReported) -> str | None:
        """Record a save that the job reports after its end. Return the expected value if the report is invalid, else None."""
        if not is_count(save.step):
            return f"a step of 0 or more, not {safe_repr(save.step)}"
        if save.kind not in SAVE_KINDS:
            return f"kind to be one of {', '.join(SAVE_KINDS)}, not {safe_repr(save.kind)}"
        seconds, blocking, size = save.seconds, save.blocking_seconds, save.bytes
        for name, value in (("seconds", seconds), ("blocking_seconds", blocking), ("bytes", size)):
            if value is not None and to_amount(value) is None:
                return f"{name} of 0 or more, not {safe_repr(value)}"
        kind = str(save.kind)
        if blocking is not None:
            self.observe_blocking(kind, to_amount(blocking) or 0.0)
        if not save.ok:
            self._count(kind, "failed")
            return None
        step = int(to_amount(save.step) or 0)
        self._count_success(kind, step, save.end_time, save.unix_seconds, to_amount(seconds))
        if kind != "local":
            if size is not None:
                self._families.gauge("training.checkpoint_last", "bytes").set(to_amount(size))
            # An asynchronous save may be reported after a later save, which also covers the work.
            self._covered_steps = max(self._covered_steps, step)
            self._work.commit_steps(self._covered_steps)
        return None

    def _count(self, kind: str, result: str = "") -> None:
        """Count a save by result; without a result, only create the counters.

        Both counters of a kind start at 0, so that the first failure is a visible increase.
        """
        for label in ("ok", "failed"):
            self._families.counter("training.checkpoints", kind=kind, result=label).add(label == result)

    def _count_success(
        self, kind: str, step: int, end_time: float, unix_seconds: float, seconds: float | None
    ) -> None:
        """Count a successful save, and publish its step, its time and the interval between saves. *seconds* is None if unknown."""
        families = self._families
        self._count(kind, "ok")
        if seconds is not None:
            families.histogram("training.checkpoint_duration", kind=kind, part="total").observe(seconds)
        if kind == "local":
            return  # the training may not be able to resume from it
        families.gauge("training.checkpoint_last_success_timestamp", "seconds").set(unix_seconds)
        # Asynchronous saves may succeed out of order, and the training resumes from the furthest step.
        self._furthest_step = step if self._furthest_step is None else max(step, self._furthest_step)
        families.gauge("training.checkpoint_last_step").set(self._furthest_step)
        self._successes.append(end_time)
        if len(self._successes) > 1:
            gaps = [max(later - earlier, 0.0) for earlier, later in pairwise(self._successes)]
            families.gauge("training.checkpoint_interval", "seconds").set(median(gaps))
