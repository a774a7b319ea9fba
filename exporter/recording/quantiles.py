"""Quantiles of one window: exact while it is small, then within 1 % in bounded memory.

Used by the recording thread of the training process. Up to `EXACT_SAMPLES` samples are kept as they are.
Beyond that they are counted in bins whose bounds grow by a constant factor, so that the middle of a bin is
within `RELATIVE_ERROR` of each sample in it. The state is a function of the multiset of samples alone, so
merging is associative and commutative.

Source: Masson, Rim, Lee: DDSketch, PVLDB 12(12), 2019.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate
from math import ceil, exp, log

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


class Quantiles:
    """A mergeable summary of finite numbers that answers quantiles."""

    __slots__ = ("_exact", "_negative", "_positive", "_zeros", "count")

    def __init__(self, samples: Iterable[float] = ()) -> None:
        self.count = 0
        self._exact: list[float] | None = []
        self._positive: dict[int, int] = {}
        self._negative: dict[int, int] = {}
        self._zeros = 0
        self.add(sorted(samples))

    @property
    def is_exact(self) -> bool:
        """Whether answers are computed from the samples themselves."""
        return self._exact is not None

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
        if positives < len(samples):
            _count(samples[positives:], self._positive)
        if negatives:
            _count([-sample for sample in samples[negatives - 1 :: -1]], self._negative)

    def merge(self, other: Quantiles) -> None:
        """Take in all that another summary has seen; the other is left as it is."""
        if other._exact is not None:
            self.add(sorted(other._exact))
            return
        if self._exact is not None:
            mine, self._exact, self.count = sorted(self._exact), None, 0
            self.add(mine)
        self.count += other.count
        self._zeros += other._zeros
        for bins, others in ((self._positive, other._positive), (self._negative, other._negative)):
            for index, count in others.items():
                bins[index] = bins.get(index, 0) + count
            _collapse(bins)

    def quantiles(self, ratios: Iterable[float]) -> list[float]:
        """Answer several quantiles at once, linearly interpolated between order statistics.

        Args:
            ratios: Each between 0 and 1.

        Returns:
            One number for each ratio; none at all when nothing was added.
        """
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


def _middle(index: int) -> float:
    return min(exp((index - 1) * _LOG_GROWTH) * _MIDDLE, _LARGEST)


def _count(samples: list[float], bins: dict[int, int]) -> None:
    """Count sorted positive samples into their bins, a bin at a time: far fewer logarithms than samples."""
    start, end = 0, len(samples)
    while start < end:
        index = ceil(log(samples[start]) / _LOG_GROWTH)
        exponent = index * _LOG_GROWTH
        upper = exp(exponent) if exponent < 709 else _LARGEST  # exp overflows from 709.78
        after = max(bisect_right(samples, upper, start), start + 1)
        bins[index] = bins.get(index, 0) + after - start
        start = after
    _collapse(bins)


def _collapse(bins: dict[int, int]) -> None:
    """Fold the smallest magnitudes into the smallest one that is kept."""
    if len(bins) > MAX_BINS:
        ordered = sorted(bins)
        kept = ordered[-MAX_BINS]
        for index in ordered[:-MAX_BINS]:
            bins[kept] += bins.pop(index)
