"""What a device draws in each phase of the training, from its energy counter and from when which phase was.

Runs in the sidecar, on the ledger's collecting thread; arithmetic, no I/O. Readings of a counter and the bins of a
process's timeline come in, both by the machine's monotonic clock; power by phase comes out, or None where it cannot be
known.

A counter that is brought up to date ten times a second cannot be read at the edges of phases that last a few
hundredths: most of them would read zero, and the next one everything. But each increment is the sum over the phases in
it of power times time, and there are many increments: least squares find the powers. The older ones count for less.
What can go wrong, and what is done about it:

- An update lags behind what was used by up to its period, which is not known: the lag that fits best is taken.
- The timeline has bins of a tenth of a second, and an increment may begin and end within one. Where phases are so short
  that this is as much as what tells the increments apart, there is no answer: powers would be made up. So it is with
  steps of a few tenths of a second, whatever the method; with steps of seconds the error is a few percent.
- A sensor that looks a quarter of the time makes the increments fit badly: there is no answer either.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from math import sqrt

BIN_SECONDS = 0.1
KEPT_SECONDS = 60.0
"""How long a reading may wait for the timeline that belongs to it."""
HALF_LIFE_SECONDS = 600.0
LAGS_SECONDS = (0.0, 0.03, 0.06, 0.09)
LONGEST_SECONDS = 15.0
"""An increment over a longer time says little."""
FEWEST_INCREMENTS = 30
SOLVED_EVERY = 10
"""Increments between two solutions: one more changes little."""
MOST_PHASES = 12
PRECISION = 0.15
"""Standard error of the power of every phase that matters, by the mean power, that still makes an answer."""
MATTERS = 0.05
"""A phase matters that has so much of the time."""
BLUR = 0.15
"""Variance of a phase's time in an increment for which bins that are cut may be to blame, by all of it, that still
makes an answer."""
RIDGE = 1e-4
PURE = 0.98
"""An increment is a phase's own that has so much of its time."""

Timeline = Sequence[tuple[float, tuple[tuple[str, float], ...]]]


class PhasePower:
    """One device that one process uses."""

    def __init__(self) -> None:
        self._ends: list[float] = []
        self._bins: list[tuple[tuple[str, float], ...]] = []
        self._readings: deque[tuple[float, float]] = deque()  # joules, at; the first one is already used
        self._fits = [_Fit(lag) for lag in LAGS_SECONDS]
        self._added = 0
        self._solved_at = -SOLVED_EVERY
        self._powers: Mapping[str, float] | None = None

    def add_timeline(self, timeline: Timeline) -> None:
        """Take bins; those that were taken before are passed over."""
        newest = self._ends[-1] if self._ends else float("-inf")
        for end, parts in timeline:
            if end > newest + BIN_SECONDS / 2:
                self._ends.append(end)
                self._bins.append(parts)
        old = bisect_left(self._ends, self._ends[-1] - KEPT_SECONDS) if self._ends else 0
        if old > KEPT_SECONDS / BIN_SECONDS:  # now and then, not at every bin
            del self._ends[:old], self._bins[:old]
        self._work()

    def add_reading(self, joules: float, at: float) -> None:
        """Take a reading of the counter; one that was taken before is passed over."""
        if self._readings and at <= self._readings[-1][1]:
            return
        self._readings.append((joules, at))
        while self._readings and at - self._readings[0][1] > KEPT_SECONDS:
            self._readings.popleft()
        self._work()

    def powers(self) -> Mapping[str, float] | None:
        """Give watts by phase; None where they are not known well enough."""
        if self._added >= self._solved_at + SOLVED_EVERY:
            self._solved_at = self._added
            self._powers = min(self._fits, key=lambda each: each.misfit()).powers()
        return self._powers

    def quality(self) -> Mapping[str, float]:
        """Give for each phase the share of its energy from increments that are its own."""
        return self._fits[0].quality()

    def _work(self) -> None:
        """Use every reading up to which the timeline is known."""
        while len(self._readings) > 1 and self._ends and self._ends[-1] >= self._readings[1][1]:
            before, began = self._readings.popleft()
            joules, at = self._readings[0]
            self._added += 1
            if joules < before or at - began > LONGEST_SECONDS:
                continue
            for fit in self._fits:
                overlap = self._overlap(began - fit.lag, at - fit.lag)
                if overlap is not None:
                    fit.add(overlap, joules - before, at - began, self._blur(began - fit.lag, at - fit.lag))

    def _overlap(self, began: float, ended: float) -> dict[str, float] | None:
        """Add up the phases between two moments; None where the timeline has a hole there."""
        first = bisect_right(self._ends, began)
        last = bisect_left(self._ends, ended - 1e-9)
        if last >= len(self._ends):
            return None
        seconds: dict[str, float] = {}
        for place in range(first, last + 1):
            end = self._ends[place]
            inside = min(end, ended) - max(end - BIN_SECONDS, began)
            if inside <= 0:
                continue
            share = min(1.0, inside / BIN_SECONDS)
            for phase, spent in self._bins[place]:
                seconds[phase] = seconds.get(phase, 0.0) + spent * share
        whole = ended - began
        return seconds if abs(sum(seconds.values()) - whole) <= 0.1 * whole else None

    def _blur(self, *edges: float) -> dict[str, float]:
        """Tell how wrong the time of each phase may be, squared, since bins were cut in which it was not alone."""
        squares: dict[str, float] = {}
        for edge in edges:
            for phase, spent in self._bins[bisect_left(self._ends, edge)]:
                error = spent * max(0.0, BIN_SECONDS - spent) / BIN_SECONDS
                squares[phase] = squares.get(phase, 0.0) + error * error
        return squares


class _Fit:
    """Least squares for one lag: the sums from which the powers follow."""

    def __init__(self, lag: float) -> None:
        self.lag = lag
        self._phases: list[str] = []
        self._products: dict[tuple[str, str], float] = {}
        self._energy: dict[str, float] = {}
        self._squares = 0.0
        self._count = 0.0
        self._joules = 0.0
        self._seconds = 0.0
        self._time: dict[str, float] = {}
        self._blur: dict[str, float] = {}
        self._pure: dict[str, float] = {}
        self._all: dict[str, float] = {}
        self._solution: tuple[dict[str, float], dict[str, float], float] | None = None

    def add(
        self, overlap: Mapping[str, float], joules: float, seconds: float, blur: Mapping[str, float]
    ) -> None:
        keep = 0.5 ** (seconds / HALF_LIFE_SECONDS)
        for sums in (self._products, self._energy, self._time, self._blur, self._pure, self._all):
            for key in sums:
                sums[key] *= keep  # type: ignore[index]  # whatever its keys are
        self._squares = self._squares * keep + joules * joules
        self._count = self._count * keep + 1
        self._joules = self._joules * keep + joules
        self._seconds = self._seconds * keep + seconds
        known = self._phases
        for phase in overlap:
            if phase not in known and len(known) < MOST_PHASES:
                known.append(phase)
        row = [(phase, spent) for phase, spent in overlap.items() if phase in known]
        for phase, spent in row:
            self._time[phase] = self._time.get(phase, 0.0) + spent
            self._energy[phase] = self._energy.get(phase, 0.0) + spent * joules
            self._all[phase] = self._all.get(phase, 0.0) + joules * spent / seconds
            self._blur[phase] = self._blur.get(phase, 0.0) + blur.get(phase, 0.0)
            if spent >= PURE * seconds:
                self._pure[phase] = self._pure.get(phase, 0.0) + joules
            for other, there in row:
                self._products[phase, other] = self._products.get((phase, other), 0.0) + spent * there
        self._solution = None

    def misfit(self) -> float:
        """Tell the squared error of an increment; infinite before there is a fit."""
        return self._solved()[2] if self._count > 0 else float("inf")

    def quality(self) -> Mapping[str, float]:
        return {
            phase: min(1.0, self._pure.get(phase, 0.0) / joules)
            for phase, joules in self._all.items()
            if joules > 0
        }

    def powers(self) -> Mapping[str, float] | None:
        if self._count < FEWEST_INCREMENTS or self._seconds <= 0:
            return None
        powers, errors, _ = self._solved()
        limit = PRECISION * self._joules / self._seconds
        matter = [phase for phase, spent in self._time.items() if spent >= MATTERS * self._seconds]
        if any(errors.get(phase, limit) > limit or self._is_blurred(phase) for phase in matter):
            return None
        return powers

    def _is_blurred(self, phase: str) -> bool:
        square = self._products.get((phase, phase), 0.0) - self._time[phase] ** 2 / self._count
        return self._blur.get(phase, 0.0) > BLUR * max(0.0, square) + 1e-9 * self._count

    def _solved(self) -> tuple[dict[str, float], dict[str, float], float]:
        if self._solution is None:
            self._solution = self._solve()
        return self._solution

    def _solve(self) -> tuple[dict[str, float], dict[str, float], float]:
        mean = self._joules / self._seconds if self._seconds > 0 else 0.0
        phases = [phase for phase in self._phases if self._time.get(phase, 0.0) > 0]
        powers: dict[str, float] = dict.fromkeys(phases, 0.0)
        errors: dict[str, float] = {}
        free = list(phases)
        while free:
            # A little weight on the mean power decides where the increments do not.
            weight = RIDGE * sum(self._products[each, each] for each in free) / len(free)
            matrix = [
                [self._products.get((a, b), 0.0) + (weight if a == b else 0.0) for b in free] for a in free
            ]
            right = [self._energy[each] + weight * mean for each in free]
            inverse = _inverse(matrix)
            found = [sum(map(float.__mul__, row, right)) for row in inverse]
            below = min(range(len(free)), key=lambda place: found[place])
            if found[below] >= 0:
                powers.update(zip(free, found, strict=True))
                errors = {each: inverse[place][place] for place, each in enumerate(free)}
                break
            del free[below]  # no phase gives energy back
        misfit = self._squares
        for a, power in powers.items():
            misfit -= 2 * power * self._energy[a]
            misfit += sum(power * powers[b] * self._products.get((a, b), 0.0) for b in powers)
        variance = max(0.0, misfit) / max(1.0, self._count - len(phases))
        return powers, {each: sqrt(max(0.0, variance * value)) for each, value in errors.items()}, variance


def _inverse(matrix: list[list[float]]) -> list[list[float]]:
    """Invert a symmetric matrix that has an inverse, by Gauss and Jordan."""
    size = len(matrix)
    rows = [
        [*row, *(1.0 if place == column else 0.0 for column in range(size))]
        for place, row in enumerate(matrix)
    ]
    for place in range(size):
        pivot = max(range(place, size), key=lambda each: abs(rows[each][place]))
        rows[place], rows[pivot] = rows[pivot], rows[place]
        head = rows[place][place] or 1e-300
        rows[place] = [value / head for value in rows[place]]
        for other in range(size):
            if other != place and (factor := rows[other][place]):
                rows[other] = [
                    value - factor * above for value, above in zip(rows[other], rows[place], strict=True)
                ]
    return [row[size:] for row in rows]
