"""Window clock, double-double sums, window aggregates, quantiles and the median.

The objects are not thread-safe: the caller holds a lock, or is the only user of the object.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate
from math import ceil, exp, floor, fsum, inf, isfinite, log
from operator import mul

from exporter.recording.values import AGGREGATIONS, Aggregation

MAX_CLOCK_JUMP_RATIO = 0.1
"""Jump of the wall clock, as a ratio of the window, above which the window is closed early and the clock is realigned."""
MIN_WINDOW_RATIO = 0.1
"""Shortest window that the clock starts, as a ratio of the configured length."""
EXACT_SAMPLES = 1024
"""Number of samples up to which quantiles are exact."""
RELATIVE_ERROR = 0.01
"""Largest relative error of an order statistic of more samples."""
MAX_BINS = 4096
"""Maximum number of bins per sign, which span a factor of 1e35. Smaller magnitudes are counted in the smallest bin."""
SMALLEST_MAGNITUDE = 1e-300
"""Magnitude below which a sample counts as zero, because bins of subnormal numbers exceed the relative error."""

_MAX_FLOAT = 1.7976931348623157e308
_GROWTH = (1 + RELATIVE_ERROR * 0.99) / (1 - RELATIVE_ERROR * 0.99)
"""Ratio of a bin's bounds. One percent of the error is reserved for rounding."""
_LOG_GROWTH = log(_GROWTH)
_MIDDLE_FACTOR = 2 * _GROWTH / (_GROWTH + 1)
"""Factor from a bin's lower bound to the value with equal relative error to both bounds."""


class WindowClock:
    """Clock of windows that end at multiples of their length on the wall clock, so that the windows of ranks with synchronized clocks coincide.

    The end is measured on the monotonic clock, so that a jump of the wall clock does not stretch the window.

    Attributes:
        start: Unix time at which the open window started.
        end: Unix time at which the open window ends.
        due_monotonic: Monotonic time at which the open window ends.
    """

    def __init__(self, seconds: float, *, wall: float, monotonic: float) -> None:
        self._seconds = seconds
        self.start = wall
        self._align(wall, monotonic)

    def overdue_seconds(self, *, wall: float, monotonic: float) -> float | None:
        """Return the seconds since the end of the window, or None before the end.

        Before the end, return 0 if the wall clock has jumped: the window is then closed early.
        """
        if monotonic >= self.due_monotonic:
            return monotonic - self.due_monotonic
        return 0.0 if self._has_jumped(wall, monotonic) else None

    def advance(self, *, wall: float, monotonic: float) -> tuple[float, float]:
        """Realign the clock, start the next window, and return the start and the end of the closed window, in Unix time."""
        has_jumped = self._has_jumped(wall, monotonic)
        closed_window = (self.start, min(wall, self.end) if has_jumped else self.end)
        self._align(wall, monotonic)
        # After a suspension the next window starts at the latest boundary, not at the end of the closed window.
        self.start = wall if has_jumped else max(closed_window[1], self.end - self._seconds)
        return closed_window

    def _has_jumped(self, wall: float, monotonic: float) -> bool:
        """Return True if the wall clock has moved against the monotonic clock by more than `MAX_CLOCK_JUMP_RATIO` of the window."""
        return abs(wall - monotonic - self._offset) > MAX_CLOCK_JUMP_RATIO * self._seconds

    def _align(self, wall: float, monotonic: float) -> None:
        """Set the end of the window to the next multiple of its length, such as 12:01:00 for 60 s at 12:00:17."""
        self._offset = wall - monotonic
        # A nearer boundary is skipped, because the window that ends there would be too short.
        self.end = (floor(wall / self._seconds + MIN_WINDOW_RATIO) + 1) * self._seconds
        self.due_monotonic = monotonic + self.end - wall


class DoubleDoubleSum:
    """Nearly exact running sum: a double-double, the unevaluated sum of `value` and a much smaller float."""

    def __init__(self, samples: list[float] | None = None) -> None:
        self.value = 0.0
        self._low = 0.0
        if samples:
            self.add(samples)

    def add_sum(self, other: DoubleDoubleSum) -> None:
        """Add the samples of another sum. This is faster than adding the samples to each of several sums."""
        self.add([other.value, other._low])  # of the same class

    def add(self, samples: list[float]) -> None:
        """Add finite samples. A sum beyond the range of floats becomes infinite."""
        try:
            high = fsum((self.value, self._low, *samples))
            self._low = fsum((self.value, self._low, -high, *samples))
            self.value = high
        except (OverflowError, ValueError):
            self.value, self._low = sum(samples, self.value), 0.0


class Window:
    """Aggregates of an open window; keeps deviations and quantiles only if requested.

    Attributes:
        needs_order: True if a quantile is requested. Then `add` needs all samples in ascending order.
        squared_deviations: Sum of the squared deviations from the mean, if STDDEV is requested.
    """

    def __init__(self, aggregations: frozenset[Aggregation]) -> None:
        specs = [
            (aggregation, spec) for aggregation, spec in AGGREGATIONS.items() if aggregation in aggregations
        ]
        self._computations = [
            (aggregation, spec.compute) for aggregation, spec in specs if spec.compute is not None
        ]
        self._quantile_ratios = [
            (aggregation, spec.ratio) for aggregation, spec in specs if spec.ratio is not None
        ]
        self._quantiles = Quantiles()
        self.needs_order = bool(self._quantile_ratios)
        self.samples = 0
        self._sum = DoubleDoubleSum()
        self.low = self.high = self.last = 0.0
        self._needs_deviations = Aggregation.STDDEV in aggregations
        self._mean = self.squared_deviations = 0.0

    @property
    def total(self) -> float:
        """Sum of the samples."""
        return self._sum.value

    def add(self, samples: list[float], sorted_samples: list[float], sum_of_samples: DoubleDoubleSum) -> None:
        """Add finite samples. Unless `needs_order`, *sorted_samples* may contain only the minimum and the maximum."""
        self.low = min(self.low, sorted_samples[0]) if self.samples else sorted_samples[0]
        self.high = max(self.high, sorted_samples[-1]) if self.samples else sorted_samples[-1]
        self.last = samples[-1]
        self._sum.add_sum(sum_of_samples)
        if self._needs_deviations:
            self._add_deviations(samples)
        if self.needs_order:
            self._quantiles.add(sorted_samples)
        self.samples += len(samples)

    def values(self) -> dict[Aggregation, float]:
        """Return the values of the requested aggregations except HISTOGRAM. Values beyond the range of floats are omitted.

        The result is empty without samples.
        """
        if not self.samples:
            return {}
        results = {aggregation: compute(self) for aggregation, compute in self._computations}
        quantiles = self._quantiles.quantiles(ratio for _, ratio in self._quantile_ratios)
        results.update(zip((aggregation for aggregation, _ in self._quantile_ratios), quantiles, strict=True))
        return {aggregation: value for aggregation, value in results.items() if isfinite(value)}

    def _add_deviations(self, samples: list[float]) -> None:
        """Merge the squared deviations of a batch with those of the window (Chan, Golub, LeVeque 1979)."""
        sample_count, batch_count = self.samples, len(samples)
        try:
            mean = fsum(samples) / batch_count
        except OverflowError:
            self.squared_deviations = inf
            return
        deviations = [sample - mean for sample in samples]
        shift = mean - self._mean
        between_batches = shift * shift * sample_count * batch_count / (sample_count + batch_count)
        self.squared_deviations += sum(map(mul, deviations, deviations)) + between_batches
        self._mean += shift * batch_count / (sample_count + batch_count)


class Quantiles:
    """Quantiles of finite numbers: exact up to `EXACT_SAMPLES`, then within 1 % in bounded memory.

    Larger sets are counted in bins whose bounds grow by a constant factor. The middle of a bin differs by at most `RELATIVE_ERROR` from the
    samples in the bin. The only exception is the smallest bin if more than `MAX_BINS` bins would be needed: it then contains smaller
    magnitudes, too. The result does not depend on the order of the samples.

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
        negatives_end = bisect_right(samples, -SMALLEST_MAGNITUDE)
        positives_start = bisect_left(samples, SMALLEST_MAGNITUDE)
        self._zeros += positives_start - negatives_end
        _add_to_bins(samples[positives_start:], self._positive)
        if negatives_end:
            _add_to_bins([-sample for sample in reversed(samples[:negatives_end])], self._negative)

    def quantiles(self, ratios: Iterable[float]) -> list[float]:
        """Return the quantiles of ratios from 0 to 1, linearly interpolated, or an empty list without samples."""
        if not self.count:
            return []
        value_at = sorted(self._exact).__getitem__ if self._exact is not None else self._order_statistics()
        results = []
        for ratio in ratios:
            below, fraction = divmod(ratio * (self.count - 1), 1)
            low = value_at(int(below))
            # Not low + fraction * (high - low), because the difference of two large numbers may overflow.
            results.append(low * (1 - fraction) + value_at(int(below) + 1) * fraction if fraction else low)
        return results

    def _order_statistics(self) -> Callable[[int], float]:
        """Return the function from a position in the ascending order to the middle of its bin."""
        bins = [
            (-_bin_middle(index), self._negative[index]) for index in sorted(self._negative, reverse=True)
        ]
        bins += [(0.0, self._zeros)] if self._zeros else []
        bins += [(_bin_middle(index), self._positive[index]) for index in sorted(self._positive)]
        ends = list(accumulate(count for _, count in bins))
        return lambda position: bins[bisect_right(ends, position)][0]


def median(numbers: Iterable[float]) -> float:
    """Return the median of one or more numbers."""
    # Not `statistics.median`, because the import of `statistics` would cost 0.7 MB in every job.
    sorted_numbers = sorted(numbers)
    middle = len(sorted_numbers) // 2
    return (
        sorted_numbers[middle]
        if len(sorted_numbers) % 2
        else sorted_numbers[middle - 1] / 2 + sorted_numbers[middle] / 2
    )


def _bin_middle(index: int) -> float:
    """Return the value that differs from both bounds of a bin by the same relative error."""
    return min(exp((index - 1) * _LOG_GROWTH) * _MIDDLE_FACTOR, _MAX_FLOAT)


def _add_to_bins(samples: list[float], bins: dict[int, int]) -> None:
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
