"""Window clock, exact sums, window aggregates and quantiles.

Runs on the recording thread only, without locks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate
from math import ceil, exp, floor, fsum, inf, isfinite, log
from operator import mul

from exporter.recording.values import AGGREGATIONS, Aggregation

STEP_TOLERANCE = 0.1
"""Share of a window; a larger step of the wall clock closes the window and realigns the clock."""
EXACT_SAMPLES = 1024
RELATIVE_ERROR = 0.01
MAX_BINS = 4096
"""Bins per sign. They span a factor of 1e35 between the largest and the smallest magnitude; smaller samples are counted in
the smallest bin."""
SMALLEST_MAGNITUDE = 1e-300
"""Magnitude below which a sample counts as zero: bins of subnormal numbers exceed the relative error."""

_MAX_FLOAT = 1.7976931348623157e308
_GROWTH = (1 + RELATIVE_ERROR * 0.99) / (1 - RELATIVE_ERROR * 0.99)  # the last percent absorbs rounding
_LOG_GROWTH = log(_GROWTH)
_MIDDLE = 2 * _GROWTH / (_GROWTH + 1)  # times the lower bound of a bin: equally far, relatively, from both


class WindowClock:
    """Clock of windows that are aligned to multiples of their length on the wall clock, equally for all ranks.

    The end of a window is timed on the monotonic clock (`due`): a step of the wall clock never stretches a window.
    """

    def __init__(self, seconds: float, *, wall: float, monotonic: float) -> None:
        self._seconds = seconds
        self.started = wall
        self._align(wall, monotonic)

    def late(self, *, wall: float, monotonic: float) -> float | None:
        """Return the seconds since the window's end; 0 after a step of the wall clock, None before the end."""
        if monotonic >= self.due:
            return monotonic - self.due
        return 0.0 if self._stepped(wall, monotonic) else None

    def advance(self, *, wall: float, monotonic: float) -> tuple[float, float]:
        """Start the next window, realigned, and return start and end of the window that a clock step has closed."""
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
        # A boundary within a few milliseconds is skipped: the clock was slewed during the last window, and a window of
        # a few milliseconds is useless.
        self.ended = (floor(wall / self._seconds + STEP_TOLERANCE) + 1) * self._seconds
        self.due = monotonic + self.ended - wall


class ExactSum:
    """Running sum in twice the precision of a float."""

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
    """Aggregates of an open window; only the parts that the wanted aggregations need are computed.

    Attributes:
        needs_order: True if a quantile is wanted, for which `add` needs all samples sorted.
        deviation: Sum of the squared deviations from the mean, if STDDEV is wanted.
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
        """Sum of the samples."""
        return self._sum.value

    def add(self, samples: list[float], ordered: list[float]) -> None:
        """Add finite samples; `ordered` are the same in ascending order, or minimum and maximum if no quantile is wanted."""
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
        """Return each windowed aggregation; an empty mapping if the window is empty or a value is out of range."""
        if not self.samples:
            return {}
        found = {each: compute(self) for each, compute in self._wanted}
        answers = self._quantiles.quantiles(ratio for _, ratio in self._ratios)
        found.update(zip((each for each, _ in self._ratios), answers, strict=True))
        # A sum beyond the floating range is absent, like all missing data.
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
    """Quantiles of finite numbers: exact up to `EXACT_SAMPLES`, then within 1 % in bounded memory.

    Larger sets are counted in bins whose bounds grow by a constant factor: the middle of a bin is within `RELATIVE_ERROR` of
    each sample in the bin. The state depends on the multiset of samples only.

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
        """Return quantiles, each from 0 to 1, linearly interpolated; an empty list without samples."""
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
    """Return the median of at least a single number; the import of `statistics` would cost 0.7 MB in every job."""
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else ordered[middle - 1] / 2 + ordered[middle] / 2


def _middle(index: int) -> float:
    return min(exp((index - 1) * _LOG_GROWTH) * _MIDDLE, _MAX_FLOAT)


def _count(samples: list[float], bins: dict[int, int]) -> None:
    """Count sorted positive samples in bins, a bin at a time, with fewer logarithms than samples."""
    start, end = 0, len(samples)
    while start < end:
        index = ceil(log(samples[start]) / _LOG_GROWTH)
        upper = exp(min(index * _LOG_GROWTH, 709.78))  # exp overflows above
        after = max(bisect_right(samples, upper, start), start + 1)
        bins[index] = bins.get(index, 0) + after - start
        start = after
    if len(bins) > MAX_BINS:  # fold the smallest magnitudes into the smallest remaining bin
        ordered = sorted(bins)
        kept = ordered[-MAX_BINS]
        for index in ordered[:-MAX_BINS]:
            bins[kept] += bins.pop(index)
