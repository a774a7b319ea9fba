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
"""Step of the wall clock, as a share of the window, above which the window is closed and the clock realigned."""
EXACT_SAMPLES = 1024
RELATIVE_ERROR = 0.01
MAX_BINS = 4096
"""Bins per sign, which span a factor of 1e35; smaller magnitudes are counted in the smallest bin."""
SMALLEST_MAGNITUDE = 1e-300
"""Magnitude below which a sample counts as zero, because bins of subnormal numbers exceed the relative error."""

_MAX_FLOAT = 1.7976931348623157e308
_GROWTH = (1 + RELATIVE_ERROR * 0.99) / (1 - RELATIVE_ERROR * 0.99)  # the last percent absorbs rounding
_LOG_GROWTH = log(_GROWTH)
_MIDDLE = (
    2 * _GROWTH / (_GROWTH + 1)
)  # middle of a bin relative to its lower bound, at the same relative distance from both bounds


class WindowClock:
    """Clock of windows that are aligned to multiples of their length on the wall clock, equally for all ranks.

    The end of a window is timed on the monotonic clock (`due`): a step of the wall clock never stretches a window.
    """

    def __init__(self, seconds: float, *, wall: float, monotonic: float) -> None:
        self._seconds = seconds
        self.start = wall
        self._align(wall, monotonic)

    def overdue_seconds(self, *, wall: float, monotonic: float) -> float | None:
        """Return the seconds since the end of the window; 0 after a step of the wall clock, None before the end."""
        if monotonic >= self.due:
            return monotonic - self.due
        return 0.0 if self._has_stepped(wall, monotonic) else None

    def advance(self, *, wall: float, monotonic: float) -> tuple[float, float]:
        """Realign the clock, start the next window, and return start and end of the closed window."""
        has_stepped = self._has_stepped(wall, monotonic)
        closed_window = (self.start, min(wall, self.end) if has_stepped else self.end)
        self._align(wall, monotonic)
        # After a suspension the next window starts at the latest boundary, not at the end of the closed window.
        self.start = wall if has_stepped else max(closed_window[1], self.end - self._seconds)
        return closed_window

    def _has_stepped(self, wall: float, monotonic: float) -> bool:
        return abs(wall - monotonic - self._offset) > STEP_TOLERANCE * self._seconds

    def _align(self, wall: float, monotonic: float) -> None:
        self._offset = wall - monotonic
        # A boundary within a few milliseconds is skipped: the wall clock was slewed during the latest window, and so short
        # a window has no use.
        self.end = (floor(wall / self._seconds + STEP_TOLERANCE) + 1) * self._seconds
        self.due = monotonic + self.end - wall


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
    """Aggregates of an open window; computes only the requested aggregations.

    Attributes:
        needs_order: True if a quantile is requested, for which `add` requires all samples sorted.
        deviation: Sum of the squared deviations from the mean, if STDDEV is requested.
    """

    def __init__(self, aggregations: frozenset[Aggregation]) -> None:
        rows = [
            (aggregation, row) for aggregation, row in AGGREGATIONS.items() if aggregation in aggregations
        ]
        self._computations = [
            (aggregation, row.compute) for aggregation, row in rows if row.compute is not None
        ]
        self._ratios = [(aggregation, row.ratio) for aggregation, row in rows if row.ratio is not None]
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

    def add(self, samples: list[float], sorted_samples: list[float]) -> None:
        """Add finite samples; *sorted_samples* may be just the minimum and the maximum unless `needs_order`."""
        self.low = min(self.low, sorted_samples[0]) if self.samples else sorted_samples[0]
        self.high = max(self.high, sorted_samples[-1]) if self.samples else sorted_samples[-1]
        self.last = samples[-1]
        self._sum.add(samples)
        if self._spread:
            self._add_spread(samples)
        if self.needs_order:
            self._quantiles.add(sorted_samples)
        self.samples += len(samples)

    def values(self) -> dict[Aggregation, float]:
        """Return each windowed aggregation; an empty mapping if the window is empty or a value is out of range."""
        if not self.samples:
            return {}
        results = {aggregation: compute(self) for aggregation, compute in self._computations}
        quantiles = self._quantiles.quantiles(ratio for _, ratio in self._ratios)
        results.update(zip((aggregation for aggregation, _ in self._ratios), quantiles, strict=True))
        # A sum beyond the floating range is absent, like all missing data.
        return {aggregation: value for aggregation, value in results.items() if isfinite(value)}

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
    each sample in the bin. The result does not depend on the order of the samples.

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
        """Return the quantiles of ratios from 0 to 1, linearly interpolated; an empty list without samples."""
        if not self.count:
            return []
        value_at = sorted(self._exact).__getitem__ if self._exact is not None else self._order_statistics()
        results = []
        for ratio in ratios:
            below, fraction = divmod(ratio * (self.count - 1), 1)
            low = value_at(int(below))
            # not low + fraction * (high - low), because the difference of two large numbers may overflow
            results.append(low * (1 - fraction) + value_at(int(below) + 1) * fraction if fraction else low)
        return results

    def _order_statistics(self) -> Callable[[int], float]:
        bins = [(-_middle(index), self._negative[index]) for index in sorted(self._negative, reverse=True)]
        bins += [(0.0, self._zeros)] if self._zeros else []
        bins += [(_middle(index), self._positive[index]) for index in sorted(self._positive)]
        ends = list(accumulate(count for _, count in bins))
        return lambda position: bins[bisect_right(ends, position)][0]


def median(numbers: Iterable[float]) -> float:
    """Return the median of one or more numbers; the import of `statistics` would cost 0.7 MB in every job."""
    sorted_numbers = sorted(numbers)
    middle = len(sorted_numbers) // 2
    return (
        sorted_numbers[middle]
        if len(sorted_numbers) % 2
        else sorted_numbers[middle - 1] / 2 + sorted_numbers[middle] / 2
    )


def _middle(index: int) -> float:
    return min(exp((index - 1) * _LOG_GROWTH) * _MIDDLE, _MAX_FLOAT)


def _count(samples: list[float], bins: dict[int, int]) -> None:
    """Count sorted positive samples in bins, with one logarithm per bin."""
    start, end = 0, len(samples)
    while start < end:
        index = ceil(log(samples[start]) / _LOG_GROWTH)
        upper = exp(min(index * _LOG_GROWTH, 709.78))  # exp overflows above
        next_start = max(bisect_right(samples, upper, start), start + 1)
        bins[index] = bins.get(index, 0) + next_start - start
        start = next_start
    if len(bins) > MAX_BINS:  # fold the smallest magnitudes into the smallest remaining bin
        indexes = sorted(bins)
        smallest_kept = indexes[-MAX_BINS]
        for index in indexes[:-MAX_BINS]:
            bins[smallest_kept] += bins.pop(index)
