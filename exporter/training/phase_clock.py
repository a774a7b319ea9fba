"""The phase clock: what the main thread spends its time on; each moment counts for one phase, so that they sum to wall time.

Used by the recording thread of the training process. The innermost open phase is the active one; before the first step
it is `init` where none is open, afterwards `other`. A phase inside the same phase is part of it.
"""

from __future__ import annotations

from collections import deque
from math import floor

from exporter.training.metrics import PHASE_BUCKETS, Families
from exporter.training.phases import PHASES

BINS_PER_SECOND = 10
MOST_BINS = 25
"""Bins of the timeline that are kept: two and a half seconds."""
INIT, OTHER = "init", "other"

Timeline = tuple[tuple[float, tuple[tuple[str, float], ...]], ...]


class PhaseTotals:
    """What was counted of one phase: exclusive seconds, of those the ones in the present bin, entries and durations."""

    __slots__ = ("row", "seconds", "bin_seconds", "entries", "durations")

    def __init__(self, name: str, families: Families) -> None:
        self.row = PHASES[name]
        self.seconds = self.bin_seconds = 0.0
        self.entries = families.counter("training.phase_entries", phase=name)
        self.durations = (
            families.histogram("training.phase_duration", PHASE_BUCKETS, phase=name)
            if self.row.recurring
            else None
        )


class PhaseEntry:
    """What may be open as a phase, None where its time counts as the phase around it, with the seconds of its own."""

    phase: PhaseTotals | None = None
    own_seconds = 0.0


class PhaseClock:
    """The phases of the main thread, from the monotonic time at which the process's recording began.

    `last` is the time up to which is counted, `since` when the active phase began; `work` and `waits` are the seconds of
    all phases that are work, or in which a rank waits.
    """

    def __init__(self, families: Families, began: float) -> None:
        self._families = families
        self._totals: dict[str, PhaseTotals] = {}
        self._stack: list[PhaseEntry] = []
        self._base = self._active = self._of(INIT)
        self._active.entries.add()
        self.work = self.waits = 0.0
        self._begin_timeline(began)

    def _begin_timeline(self, at: float) -> None:
        self.last = self.since = at
        self._bin = floor(at * BINS_PER_SECOND) + 1
        self._bin_end = self._bin / BINS_PER_SECOND
        self._bins: deque[tuple[float, tuple[tuple[str, float], ...]]] = deque(maxlen=MOST_BINS)

    def reset(self, at: float) -> None:
        """Count from zero; what is open stays open."""
        for totals in self._totals.values():
            totals.seconds = totals.bin_seconds = 0.0
        for entry in self._stack:
            entry.own_seconds = 0.0
        self.work = self.waits = 0.0
        self._begin_timeline(max(at, self.last))

    @property
    def active(self) -> str:
        """The phase that is active."""
        return self._active.row.name

    def seconds(self) -> dict[str, float]:
        """Exclusive seconds by phase, up to `last`; those of which there are some."""
        return {name: totals.seconds for name, totals in self._totals.items() if totals.seconds}

    def seconds_of_other(self) -> float:
        """Seconds after the first step in no phase."""
        found = self._totals.get(OTHER)
        return 0.0 if found is None else found.seconds

    def begin(self, phase: str, entry: PhaseEntry, at: float) -> None:
        """Begin a phase; within the same one it is part of that."""
        if phase == self._active.row.name and self._stack:
            return
        self.advance(at)
        entry.phase = self._of(phase)
        entry.phase.entries.add()
        self._stack.append(entry)
        self._activate()

    def end(self, entry: PhaseEntry, at: float) -> None:
        """End what was begun; it need not be the innermost."""
        totals, stack = entry.phase, self._stack
        if totals is None:
            return
        self.advance(at)
        entry.phase = None
        if stack[-1] is entry:
            stack.pop()
        else:
            stack.remove(entry)
        if totals.durations is not None:
            totals.durations.observe(entry.own_seconds)
        self._activate()

    def training_begins(self, at: float) -> None:
        """Note that the initialisation is over."""
        if self._base.row.name == INIT:
            self.advance(at)
            self._base = self._of(OTHER)
            self._activate()

    def advance(self, at: float) -> None:
        """Count the time up to a moment; one before the last is taken as the last."""
        while at >= self._bin_end:
            self._count(self._bin_end)
            self._close_bin(at)
        if at > self.last:
            self._count(at)

    def timeline(self) -> Timeline:
        """Give the bins that are over, the oldest first: when each ended, and the seconds of phases in it."""
        return tuple(self._bins)

    def publish(self, offset: float) -> None:
        """Bring the families up to date, with the offset of the wall clock from the monotonic one."""
        for name, totals in self._totals.items():
            counter = self._families.counter("training.phase", "seconds", phase=name)
            counter.add(totals.seconds - counter.total)
            self._families.gauge("training.phase_active", phase=name).set(float(totals is self._active))
        since = self._families.gauge("training.phase_active_since_timestamp", "seconds")
        since.set(round(self.since + offset, 3))

    def _of(self, phase: str) -> PhaseTotals:
        found = self._totals.get(phase)
        if found is None:
            found = self._totals[phase] = PhaseTotals(phase, self._families)
        return found

    def _activate(self) -> None:
        totals = (self._stack[-1].phase if self._stack else None) or self._base
        if totals is not self._active:
            self._active = totals
            self.since = self.last

    def _count(self, at: float) -> None:
        passed, totals = at - self.last, self._active
        self.last = at
        totals.seconds += passed
        totals.bin_seconds += passed
        if totals.row.work:
            self.work += passed
        if totals.row.waiting:
            self.waits += passed
        if self._stack:
            self._stack[-1].own_seconds += passed

    def _close_bin(self, at: float) -> None:
        spent = sorted((name, each.bin_seconds) for name, each in self._totals.items() if each.bin_seconds)
        self._bins.append((self._bin_end, tuple(spent)))
        self._bin += 1
        behind = floor(at * BINS_PER_SECOND) - self._bin - MOST_BINS
        if behind > 0:  # a long phase: of its bins only those that will be kept are cut
            self._bin += behind
            self._count((self._bin - 1) / BINS_PER_SECOND)
        self._bin_end = self._bin / BINS_PER_SECOND
        for totals in self._totals.values():
            totals.bin_seconds = 0.0
