"""Checkpoints: saves in progress, successful saves, and the work that they cover.

The step identifies a save. An asynchronous save may be confirmed at any time and in any order. A save covers the work that was
done before the save began.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from exporter.recording.conversion import safe_repr
from exporter.recording.value_class import Value, value_class
from exporter.recording.windows import median
from exporter.training.metrics import Families, amount
from exporter.training.progress import is_count
from exporter.training.records import SaveReported

MAX_PENDING_SAVES = 1000
"""Limit of unconfirmed asynchronous saves; above the limit the oldest is dropped."""
INTERVALS = 5
"""Successful saves whose median interval is published."""
SAVE_KINDS = ("sync", "async", "local")
MAX_SEGMENTS = 64
"""Limit of separate segments of uncovered work."""


@value_class
class SavePolicy(Value):
    """Properties of the saves that begin now."""

    strategy: str = "sync"  # sync or async
    enabled: bool = True  # False if the job's saves are switched off


@dataclass(slots=True)
class Segment:
    """Seconds of work of some steps of a loop that no checkpoint covers yet; `save` counts the saves before."""

    loop: int
    first: int
    last: int
    seconds: float
    save: int


class Work:
    """Work of completed and failed iterations, and the part that saves cover."""

    def __init__(self) -> None:
        self._saves = self._committed = 0
        self.reset()

    def reset(self) -> None:
        """Count from zero; saves in progress cover no work from before the reset."""
        self.seconds = self.failed_seconds = self.committed_seconds = 0.0
        self.committed_step: int | None = None
        self._segments: list[Segment] = []

    def done(self, loop: int, first: int, last: int, seconds: float) -> None:
        """Count consecutive completed iterations."""
        self.seconds += seconds
        if self._segments:
            newest = self._segments[-1]
            if newest.last < first and newest.loop == loop and newest.save == self._saves:
                newest.last = last
                newest.seconds += seconds
                return
        self._segments.append(Segment(loop, first, last, seconds, self._saves))
        if len(self._segments) > MAX_SEGMENTS:  # merge the two oldest segments; a save commits both together
            removed = self._segments.pop(0)
            oldest = self._segments[0]
            oldest.seconds += removed.seconds
            if (
                removed.loop == oldest.loop and removed.last < oldest.first
            ):  # otherwise the step number decreased
                oldest.first = removed.first

    def save_begins(self) -> int:
        """Record the begin of a save; returns the number for `commit`."""
        self._saves += 1
        return self._saves

    def commit(self, save: int, step: int | None) -> None:
        """Record the success of a save; ignored if a later save has already succeeded."""
        if save > self._committed:
            self._committed = save
            self._keep([segment for segment in self._segments if segment.save >= save], step)

    def commit_steps(self, step: int) -> None:
        """Record the success of a save of a step whose begin was not recorded."""
        for segment in self._segments:
            steps = segment.last - segment.first + 1
            done = min(max(step - segment.first, 0), steps)
            segment.seconds -= segment.seconds * done / steps
            segment.first += done
        self._keep([segment for segment in self._segments if segment.first <= segment.last], step)

    def _keep(self, segments: list[Segment], step: int | None) -> None:
        self._segments = segments
        uncommitted = sum([segment.seconds for segment in segments])
        self.committed_seconds = max(self.committed_seconds, self.seconds - uncommitted)
        self.committed_step = step

    def segments(self) -> tuple[tuple[int, int, int, float], ...]:
        """Return the segments that no save covers, in order."""
        return tuple([(each.loop, each.first, each.last, each.seconds) for each in self._segments])


@dataclass(eq=False, slots=True)
class Save:
    """Save of a step; began at a monotonic time with `completed` steps done."""

    step: int
    strategy: str
    began: float
    completed: int
    number: int
    confirmed: bool = False


class Checkpoints:
    """Saves of a process."""

    def __init__(self, families: Families, work: Work) -> None:
        self._families = families
        self._work = work
        self.under_way: dict[int, Save] = {}  # unconfirmed saves by step
        self._successes: deque[float] = deque(maxlen=INTERVALS)
        self.furthest: int | None = None  # the last step of this loop that is safe

    def begin(self, step: int, strategy: str, at: float, completed: int) -> Save:
        """Record the begin of a save."""
        save = Save(step, strategy, at, completed, self._work.save_begins())
        self.under_way.pop(step, None)
        self.under_way[step] = save
        if len(self.under_way) > MAX_PENDING_SAVES:
            del self.under_way[next(iter(self.under_way))]
        self._count(strategy)
        return save

    def pending(self, step: object) -> Save | None:
        """Return the unconfirmed save of a step, or None."""
        return self.under_way.get(step) if isinstance(step, int) else None

    def succeed(self, save: Save, at: float, wall: float) -> None:
        """Record the success of a save, at a monotonic time and the same Unix time."""
        self.under_way.pop(save.step, None)
        save.confirmed = True
        self._work.commit(save.number, save.completed)
        self._succeeded(save.strategy, save.step, at, wall, max(at - save.began, 0.0))

    def fail(self, save: Save) -> None:
        """Record the failure of a save; ignored if the save is confirmed."""
        if not save.confirmed:
            if self.under_way.get(save.step) is save:
                del self.under_way[save.step]
            self._count(save.strategy, "failed")

    def blocked(self, kind: str, seconds: float) -> None:
        """Count the time for which a save blocked the training."""
        self._families.histogram("training.checkpoint_duration", kind=kind, part="blocking").observe(seconds)

    def report(self, save: SaveReported) -> str | None:
        """Record a completed save; returns the problem of an invalid report, otherwise None."""
        if not is_count(save.step):
            return f"a step of 0 or more, not {safe_repr(save.step)}"
        if save.kind not in SAVE_KINDS:
            return f"kind to be one of {', '.join(SAVE_KINDS)}, not {safe_repr(save.kind)}"
        seconds, blocking, size = save.seconds, save.blocking_seconds, save.bytes
        for name, value in (("seconds", seconds), ("blocking_seconds", blocking), ("bytes", size)):
            if value is not None and amount(value) is None:
                return f"{name} of 0 or more, not {safe_repr(value)}"
        kind = str(save.kind)
        if blocking is not None:
            self.blocked(kind, amount(blocking) or 0.0)
        if not save.ok:
            self._count(kind, "failed")
            return None
        step = int(amount(save.step) or 0)
        self._succeeded(kind, step, save.at, save.wall, amount(seconds))
        if kind != "local":
            if size is not None:
                self._families.gauge("training.checkpoint_last", "bytes").set(amount(size))
            self._work.commit_steps(step)
        return None

    def _count(self, kind: str, result: str = "") -> None:
        """Count a save; both results of a new kind start at 0, so that the first failure is a visible increase."""
        for each in ("ok", "failed"):
            self._families.counter("training.checkpoints", kind=kind, result=each).add(each == result)

    def _succeeded(self, kind: str, step: int, at: float, wall: float, seconds: float | None) -> None:
        families = self._families
        self._count(kind, "ok")
        if seconds is not None:
            families.histogram("training.checkpoint_duration", kind=kind, part="total").observe(seconds)
        if kind == "local":
            return  # a local save is lost with the node
        families.gauge("training.checkpoint_last_success_timestamp", "seconds").set(wall)
        # Asynchronous saves may succeed out of order: the training resumes from the furthest step.
        self.furthest = step if self.furthest is None else max(step, self.furthest)
        families.gauge("training.checkpoint_last_step").set(self.furthest)
        self._successes.append(at)
        if len(self._successes) > 1:
            gaps = [max(later - earlier, 0.0) for earlier, later in pairwise(self._successes)]
            families.gauge("training.checkpoint_interval", "seconds").set(median(gaps))
