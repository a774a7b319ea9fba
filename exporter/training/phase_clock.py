"""Phases: what the main thread spends its time on; each moment counts for one phase, so that they sum to wall time.

Used by the recording thread of the training process. The innermost open phase is the active one; before the first step
it is `init` where none is open, afterwards `other`. A phase inside the same phase is part of it.
"""

from __future__ import annotations

from collections import deque
from math import floor
from operator import sub

from exporter.training.phases import PHASES
from exporter.training.series import PHASE_BUCKETS, Counter, Families, Histogram

TYPE_CHECKING = False
if TYPE_CHECKING:
    from exporter.training.runs import Block, Plan

BINS_PER_SECOND = 10
MOST_BINS = 25
"""Bins of the timeline that are kept: two and a half seconds."""
INIT, OTHER = "init", "other"


class Entry:
    """A phase that is open.

    Attributes:
        phase: Its name.
        seconds: Of it, without what was done within it.
    """

    __slots__ = ("phase", "seconds")

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.seconds = 0.0


class PhaseClock:
    """The phases of the main thread.

    Args:
        families: Where they are counted.
        began: Monotonic time at which the process's recording began.

    Attributes:
        seconds: Exclusive seconds by phase, up to `last`.
        last: Time up to which is counted.
        since: Time since which the active phase is active.
        work: Seconds of all phases that are work.
        waits: Seconds of all phases in which a rank waits.
    """

    def __init__(self, families: Families, began: float) -> None:
        self._families = families
        self._stack: list[Entry] = []
        self._base = INIT
        self._active = INIT
        self._own: Entry | None = None
        self.seconds: dict[str, float] = {INIT: 0.0}
        self.last = self.since = began
        self.work = self.waits = 0.0
        self._bin = floor(began * BINS_PER_SECOND) + 1
        self._bin_end = self._bin / BINS_PER_SECOND
        self._bin_seconds: dict[str, float] = {}
        self._bins: deque[tuple[float, tuple[tuple[str, float], ...]]] = deque(maxlen=MOST_BINS)
        self._entries_of: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        self._enter(INIT)

    def restart(self, at: float) -> None:
        """Count from zero; what is open stays open."""
        self.seconds = {self._active: 0.0}
        self.last = self.since = max(at, self.last)
        self.work = self.waits = 0.0
        self._bins.clear()
        self._bin_seconds = {}
        self._bin = floor(self.last * BINS_PER_SECOND) + 1
        self._bin_end = self._bin / BINS_PER_SECOND
        for entry in self._stack:
            entry.seconds = 0.0

    @property
    def active(self) -> str:
        """The phase that is active."""
        return self._active

    def begin(self, phase: str, at: float) -> Entry | None:
        """Begin a phase; None where it is part of the same one."""
        if phase == self._active and self._stack:
            return None
        self.advance(at)
        entry = Entry(phase)
        self._stack.append(entry)
        self._enter(phase)
        self._switch()
        return entry

    def end(self, entry: Entry, at: float) -> None:
        """End a phase; it need not be the innermost."""
        self.advance(at)
        if self._stack and self._stack[-1] is entry:
            self._stack.pop()
        elif entry in self._stack:
            self._stack.remove(entry)
        else:
            return
        if PHASES[entry.phase].recurring:
            self._histogram(entry.phase).observe(entry.seconds)
        self._switch()

    def training_begins(self, at: float) -> None:
        """Note that the initialisation is over."""
        if self._base == INIT:
            self.advance(at)
            self._base = OTHER
            self._switch()

    def advance(self, at: float) -> None:
        """Count the time up to a moment; one before the last is taken as the last."""
        while at >= self._bin_end:
            self._count(self._bin_end - self.last)
            self.last = self._bin_end
            self._close_bin(at)
        passed = at - self.last
        if passed > 0:
            self._count(passed)
            self.last = at

    @property
    def bin_end(self) -> float:
        """When the present bin of the timeline ends."""
        return self._bin_end

    def inside(self, phase: str) -> bool:
        """Whether the active phase is this one, so that another like it would be part of it."""
        return self._active == phase and bool(self._stack)

    def fold(
        self, plan: Plan, durations: list[list[float]], began: float, ended: float, longest: float
    ) -> float:
        """Count iterations that look alike, all of them before the present bin ends.

        Args:
            plan: What their marks mean.
            durations: Of each block, in each iteration.
            began: When the first began.
            ended: When what belongs to the last ended.
            longest: None of the durations is more.

        Returns:
            Seconds of work in the iterations.
        """
        self.advance(began)
        totals = {block: sum(times) for block, times in zip(plan.blocks, durations, strict=True)}
        work = inside = 0.0
        for block, times in zip(plan.blocks, durations, strict=True):
            own = totals[block]
            recurring = PHASES[block.phase].recurring
            if block.inner:
                own = max(own - sum([totals[inner] for inner in block.inner]), 0.0)
                if recurring and longest > PHASE_BUCKETS[0]:
                    times = _without(times, plan, durations, block)  # noqa: PLW2901  # its own time
            self._seconds_of(block.phase, own)
            if PHASES[block.phase].work and block.enter < plan.end:
                work += own
            inside += own
            self._entries(block.phase).add_many(len(times))
            if recurring:
                self._histogram(block.phase).observe_all(times, own, longest)
        self._count(ended - began - inside)
        self.last = self.since = ended
        return work

    def timeline(self) -> tuple[tuple[float, tuple[tuple[str, float], ...]], ...]:
        """Give the bins that are over, the oldest first."""
        return tuple(self._bins)

    def publish(self, offset: float) -> None:
        """Bring the families up to date.

        Args:
            offset: Of the wall clock from the monotonic one.
        """
        for phase, seconds in self.seconds.items():
            counter = self._families.counter("training.phase", "seconds", phase=phase)
            counter.add(seconds - counter.value)
            self._families.gauge("training.phase_active", phase=phase).set(float(phase == self._active))
        since = self._families.gauge("training.phase_active_since_timestamp", "seconds")
        since.set(round(self.since + offset, 3))

    def _count(self, passed: float) -> None:
        if passed <= 0:
            return
        if self._own is not None:
            self._own.seconds += passed
        self._seconds_of(self._active, passed)

    def _seconds_of(self, phase: str, passed: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + passed
        self._bin_seconds[phase] = self._bin_seconds.get(phase, 0.0) + passed
        if PHASES[phase].work:
            self.work += passed
        if PHASES[phase].waiting:
            self.waits += passed

    def _close_bin(self, at: float) -> None:
        self._bins.append((self._bin_end, tuple(sorted(self._bin_seconds.items()))))
        self._bin_seconds = {}
        self._bin += 1
        behind = floor(at * BINS_PER_SECOND) - self._bin - MOST_BINS
        if behind > 0:  # a long phase: of its bins only those that will be kept are cut
            self._bin += behind
        self._bin_end = self._bin / BINS_PER_SECOND
        if behind > 0:
            start = (self._bin - 1) / BINS_PER_SECOND
            self._count(start - self.last)
            self.last = start
            self._bin_seconds = {}

    def _enter(self, phase: str) -> None:
        self._entries(phase).add()
        self.seconds.setdefault(phase, 0.0)

    def _entries(self, phase: str) -> Counter:
        found = self._entries_of.get(phase)
        if found is None:
            found = self._entries_of[phase] = self._families.counter("training.phase_entries", phase=phase)
        return found

    def _histogram(self, phase: str) -> Histogram:
        found = self._histograms.get(phase)
        if found is None:
            found = self._families.histogram("training.phase_duration", PHASE_BUCKETS, phase=phase)
            self._histograms[phase] = found
        return found

    def _switch(self) -> None:
        self._own = self._stack[-1] if self._stack else None
        active = self._base if self._own is None else self._own.phase
        if active != self._active:
            self._active = active
            self.since = self.last
        self.seconds.setdefault(active, 0.0)


def _without(times: list[float], plan: Plan, durations: list[list[float]], block: Block) -> list[float]:
    """Take the time of what is right inside a block off its own, iteration by iteration."""
    for inner in block.inner:
        times = list(map(sub, times, durations[plan.blocks.index(inner)]))
    return [max(seconds, 0.0) for seconds in times]
