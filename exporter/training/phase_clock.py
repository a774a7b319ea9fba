"""The phase clock: each moment of the main thread counts for one phase, the innermost that is open.

Before the first step it is `init` where none is open, afterwards `other`. A phase inside the same phase is part of it.
"""

from __future__ import annotations

from collections import deque
from itertools import chain
from math import floor

from exporter.training.metrics import PHASE_BUCKETS, Families
from exporter.training.phases import PHASES

INIT, OTHER = "init", "other"


class PhaseTotals:
    """What was counted of one phase: exclusive seconds, entries and durations."""

    __slots__ = ("row", "seconds", "entries", "durations")

    def __init__(self, name: str, families: Families) -> None:
        self.row = PHASES[name]
        self.seconds = 0.0
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


class PhaseHistory:
    """What the main thread did in the last seconds, for whoever measured something else meanwhile, such as power.

    Stays in a phase are told one by one, except that those of one phase within a bin, as long as a sample of power, are one:
    what changes a thousand times a second is as good by its share of the bin.
    """

    BINS_PER_SECOND = 50
    SECONDS = 7.0
    """A sidecar that is scraped rarely looks every 5 s."""
    MOST = 2048

    def __init__(self, at: float) -> None:
        self._bin = floor(at * self.BINS_PER_SECOND)
        self._bin_end = (self._bin + 1) / self.BINS_PER_SECOND
        self._in_bin: dict[str, float] = {}
        self._places: dict[str, int] = {}
        # up to the begin of the present bin: the place of a phase and microseconds
        self._stays: deque[tuple[int, int]] = deque()
        self._told = 0

    def add(self, phase: str, began: float, until: float) -> None:
        """Take a stay, which begins where the last one ended."""
        if until >= self._bin_end:
            self._in_bin[phase] = self._in_bin.get(phase, 0.0) + self._bin_end - began
            for each in self._in_bin.items():
                self._append(*each)
            self._in_bin.clear()
            self._bin = floor(until * self.BINS_PER_SECOND)
            began = self._bin / self.BINS_PER_SECOND
            self._append(phase, began - self._bin_end)
            self._bin_end = (self._bin + 1) / self.BINS_PER_SECOND
        if until > began:
            self._in_bin[phase] = self._in_bin.get(phase, 0.0) + until - began

    def _append(self, phase: str, seconds: float) -> None:
        place, stays = self._places.setdefault(phase, len(self._places)), self._stays
        microseconds = round(seconds * 1e6)
        self._told += microseconds
        if stays and stays[-1][0] == place:
            microseconds += stays.pop()[1]
        stays.append((place, microseconds))
        while len(stays) > self.MOST or self._told - stays[0][1] > self.SECONDS * 1e6:
            self._told -= stays.popleft()[1]

    def reading(self) -> tuple[float, tuple[str, ...], tuple[int, ...]]:
        """Give the time up to which it tells, the phases, and by turns the place of one among them and microseconds."""
        return self._bin / self.BINS_PER_SECOND, tuple(self._places), tuple(chain.from_iterable(self._stays))


class PhaseClock:
    """The phases of the main thread, from the monotonic time at which the process's recording began.

    `last` is the time up to which is counted, `since` when the active phase began; `work` and `waits` are the seconds of
    all phases that are work, or in which a rank waits; `history` tells the last seconds stay by stay.
    """

    def __init__(self, families: Families, began: float) -> None:
        self._families = families
        self._totals: dict[str, PhaseTotals] = {}
        self._stack: list[PhaseEntry] = []
        self._base = self._active = self._of(INIT)
        self._active.entries.add()
        self.work = self.waits = 0.0
        self.last = self.since = began
        self.history = PhaseHistory(began)

    def reset(self, at: float) -> None:
        """Count from zero; what is open stays open."""
        for totals in self._totals.values():
            totals.seconds = 0.0
        for entry in self._stack:
            entry.own_seconds = 0.0
        self.work = self.waits = 0.0
        self.last = self.since = max(at, self.last)
        self.history = PhaseHistory(self.last)

    @property
    def active(self) -> str:
        """The phase that is active."""
        return self._active.row.name

    def seconds(self) -> dict[str, float]:
        """Exclusive seconds by phase, up to `last`; those of which there are some."""
        return {name: totals.seconds for name, totals in self._totals.items() if totals.seconds}

    def maybe_work(self) -> float:
        """Seconds that may have been work, in a job that tells no iterations: all that is in no other phase."""
        found = self._totals.get(OTHER)
        return self.work if found is None else self.work + found.seconds

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
        if at <= self.last:
            return
        passed, totals = at - self.last, self._active
        self.history.add(totals.row.name, self.last, at)
        self.last = at
        totals.seconds += passed
        if totals.row.work:
            self.work += passed
        if totals.row.waiting:
            self.waits += passed
        if self._stack:
            self._stack[-1].own_seconds += passed

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
