"""Windows: the seconds that a clock cuts, what the samples in one add up to, and their quantiles.

Used by the recording thread of the training process alone, so nothing here locks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate
from math import ceil, exp, floor, fsum, inf, isfinite, log
from operator import mul

from exporter.recording.values import AGGREGATIONS, Aggregation

STEP_TOLERANCE = 0.1
"""A step of the wall clock above this share of a window closes it and aligns anew."""
EXACT_SAMPLES = 1024
RELATIVE_ERROR = 0.01
MAX_BINS = 4096
"""Bins kept per sign. They span a factor of 1e35 between the largest and the smallest magnitude; smaller
samples count as the smallest magnitude kept."""
SMALLEST_MAGNITUDE = 1e-300
"""Below it a sample counts as zero: bins of subnormal numbers could not keep the relative error."""

_LARGEST = 1.7976931348623157e308
_GROWTH = (1 + RELATIVE_ERROR * 0.99) / (1 - RELATIVE_ERROR * 0.99)  # the last percent of it absorbs rounding
_LOG_GROWTH = log(_GROWTH)
_MIDDLE = 2 * _GROWTH / (_GROWTH + 1)  # times the lower bound of a bin: equally far, relatively, from both


class WindowClock:
    """Cuts time into windows aligned to multiples of their length on the wall clock, so that all ranks' are the same.

    A window's end is waited for on the monotonic clock (`due`): a wall clock that is set never stretches it.
    """

    def __init__(self, seconds: float, *, wall: float, monotonic: float) -> None:
        self._seconds = seconds
        self.started = wall
        self._align(wall, monotonic)

    def late(self, *, wall: float, monotonic: float) -> float | None:
        """Say for how many seconds the window has been over; 0 after a step of the wall clock, None if it is not."""
        if monotonic >= self.due:
            return monotonic - self.due
        return 0.0 if self._stepped(wall, monotonic) else None

    def advance(self, *, wall: float, monotonic: float) -> tuple[float, float]:
        """Begin the next window, aligned anew; gives start and end of the one that is over, which a step has ended now."""
        stepped = self._stepped(wall, monotonic)
        over = (self.started, min(wall, self.ended) if stepped else self.ended)
        self._align(wall, monotonic)
        # After a suspension the present window began at the last boundary, not where the old one ended.
        self.started = wall if stepped else max(over[1], self.ended - self._seconds)
        return over

    def _stepped(self, wall: float, monotonic: float) -> bool:
        return abs(wall - monotonic - self._offset) > STEP_TOLERANCE * self._seconds

    def _align(self, wall: float, monotonic: float) -> None:
        self._offset = wall - monotonic
        # A boundary that is nearly reached is skipped: the clock was slewed while the last window ran, and a
        # window of a few milliseconds would be of no use.
        self.ended = (floor(wall / self._seconds + STEP_TOLERANCE) + 1) * self._seconds
        self.due = monotonic + self.ended - wall


class ExactSum:
    """A running sum in twice the precision of a float, so that no sample is lost to rounding."""

    def __init__(self) -> None:
        self.value = 0.0
        self._low = 0.0

    def add(self, samples: list[float]) -> None:
        """Add finite samples; beyond the range of floats the sum becomes infinite."""
        try:
            high = fsum((self.value, self._low, *samples))
            self._low = fsum((self.value, self._low, -high, *samples))
            self.value = high
        except (OverflowError, ValueError):
            self.value, self._low = sum(samples, self.value), 0.0


class Window:
    """What the samples of one open window add up to; only what the wanted aggregations need is computed.

    Attributes:
        needs_order: Whether a quantile is wanted, so that `add` needs all samples sorted.
        deviation: Sum of their squared deviations from the mean, where STDDEV is wanted.
    """

    def __init__(self, aggregations: frozenset[Aggregation]) -> None:
        rows = [(each, row) for each, row in AGGREGATIONS.items() if each in aggregations]
        self._wanted = [(each, row.compute) for each, row in rows if row.compute is not None]
        self._ratios = [(each, row.ratio) for each, row in rows if row.ratio is not None]
        self._quantiles = Quantiles()
        self.needs_order = bool(self._ratios)
        self.samples = 0
        self._sum = ExactSum()
        self.low = self.high = self.last = 0.0
        self._spread = Aggregation.STDDEV in aggregations
        self._mean = self.deviation = 0.0

    @property
    def total(self) -> float:
        """Their sum."""
        return self._sum.value

    def add(self, samples: list[float], ordered: list[float]) -> None:
        """Take in at least one finite sample; of `ordered`, the same ascending, two ends do where no quantile is wanted."""
        self.low = min(self.low, ordered[0]) if self.samples else ordered[0]
        self.high = max(self.high, ordered[-1]) if self.samples else ordered[-1]
        self.last = samples[-1]
        self._sum.add(samples)
        if self._spread:
            self._add_spread(samples)
        if self.needs_order:
            self._quantiles.add(ordered)
        self.samples += len(samples)

    def values(self) -> dict[Aggregation, float]:
        """Compute each windowed aggregation; nothing when the window is empty or a value is out of range."""
        if not self.samples:
            return {}
        found = {each: compute(self) for each, compute in self._wanted}
        answers = self._quantiles.quantiles(ratio for _, ratio in self._ratios)
        found.update(zip((each for each, _ in self._ratios), answers, strict=True))
        # A sum beyond the floating range is no number to show: absent, like every other lack of data.
        return {each: value for each, value in found.items() if isfinite(value)}

    def _add_spread(self, samples: list[float]) -> None:
        """Merge the squared deviations of a batch into the window's (Chan, Golub, LeVeque 1979)."""
        count, batch = self.samples, len(samples)
        try:
            mean = fsum(samples) / batch
        except OverflowError:
            self.deviation = inf
            return
        deviations = [sample - mean for sample in samples]
        shift = mean - self._mean
        self.deviation += sum(map(mul, deviations, deviations)) + shift * shift * count * batch / (
            count + batch
        )
        self._mean += shift * batch / (count + batch)


class Quantiles:
    """A summary of finite numbers that answers quantiles: exact while small, then within 1 % in bounded memory.

    Beyond `EXACT_SAMPLES` samples are counted in bins whose bounds grow by a constant factor, so that the middle of a bin
    is within `RELATIVE_ERROR` of each sample in it. The state is a function of the multiset of samples alone.

    Source: Masson, Rim, Lee: DDSketch, PVLDB 12(12), 2019.
    """

    def __init__(self, samples: Iterable[float] = ()) -> None:
        self.count = 0
        self._exact: list[float] | None = []
        self._positive: dict[int, int] = {}
        self._negative: dict[int, int] = {}
        self._zeros = 0
        self.add(sorted(samples))

    def add(self, samples: list[float]) -> None:
        """Add finite samples, sorted ascending."""
        self.count += len(samples)
        if self._exact is not None:
            if self.count <= EXACT_SAMPLES:
                self._exact += samples
                return
            samples, self._exact = sorted(self._exact + samples), None
        negatives = bisect_right(samples, -SMALLEST_MAGNITUDE)
        positives = bisect_left(samples, SMALLEST_MAGNITUDE)
        self._zeros += positives - negatives
        _count(samples[positives:], self._positive)
        _count([-sample for sample in reversed(samples[:negatives])], self._negative)

    def quantiles(self, ratios: Iterable[float]) -> list[float]:
        """Answer several quantiles, each from 0 to 1, linearly interpolated; none when nothing was added."""
        if not self.count:
            return []
        at = sorted(self._exact).__getitem__ if self._exact is not None else self._order_statistics()
        answers = []
        for ratio in ratios:
            below, fraction = divmod(ratio * (self.count - 1), 1)
            low = at(int(below))
            # (1 - f) a + f b, not a + f (b - a): the difference of two huge numbers may overflow
            answers.append(low * (1 - fraction) + at(int(below) + 1) * fraction if fraction else low)
        return answers

    def _order_statistics(self) -> Callable[[int], float]:
        bins = [(-_middle(index), self._negative[index]) for index in sorted(self._negative, reverse=True)]
        bins += [(0.0, self._zeros)] if self._zeros else []
        bins += [(_middle(index), self._positive[index]) for index in sorted(self._positive)]
        ends = list(accumulate(count for _, count in bins))
        return lambda position: bins[bisect_right(ends, position)][0]


def median(numbers: Iterable[float]) -> float:
    """Give the median of at least one number; that of `statistics` loads two thirds of a megabyte into every job."""
    return Quantiles(numbers).quantiles((0.5,))[0]


def _middle(index: int) -> float:
    return min(exp((index - 1) * _LOG_GROWTH) * _MIDDLE, _LARGEST)


def _count(samples: list[float], bins: dict[int, int]) -> None:
    """Count sorted positive samples into their bins, a bin at a time: far fewer logarithms than samples."""
    start, end = 0, len(samples)
    while start < end:
        index = ceil(log(samples[start]) / _LOG_GROWTH)
        upper = exp(min(index * _LOG_GROWTH, 709.78))  # beyond which it overflows
        after = max(bisect_right(samples, upper, start), start + 1)
        bins[index] = bins.get(index, 0) + after - start
        start = after
    if len(bins) > MAX_BINS:  # fold the smallest magnitudes into the smallest one that is kept
        ordered = sorted(bins)
        kept = ordered[-MAX_BINS]
        for index in ordered[:-MAX_BINS]:
            bins[kept] += bins.pop(index)
