"""Cells of durations: intervals that fit both classic and native histogram buckets, so that a duration is searched once."""

from __future__ import annotations

from bisect import bisect_left
from functools import cache
from itertools import compress

from exporter.recording.exponential import LOWEST_BUCKET, OVERFLOW_BUCKET, bucket_of, upper_bound
from exporter.training.metrics import PHASE_BUCKETS

MIN_SECONDS, MAX_SECONDS = 1e-7, 1e5
"""Range of durations with native buckets. Shorter durations count in the lowest bucket, longer ones in the overflow bucket."""

_EXPONENTIAL = range(bucket_of(MIN_SECONDS), bucket_of(MAX_SECONDS) + 1)
_BY_BOUND = {bound: bucket_of(bound) for bound in PHASE_BUCKETS} | {
    upper_bound(bucket): bucket for bucket in _EXPONENTIAL
}
CELLS = tuple(sorted(_BY_BOUND))
"""Upper bounds of the cells in seconds: all bounds of classic and native buckets."""
_BUCKETS = (LOWEST_BUCKET, *(_BY_BOUND[bound] for bound in CELLS[1:]), OVERFLOW_BUCKET)
"""Native bucket of each cell."""


def native_buckets(cells: list[int]) -> dict[int, int]:
    """Return the count of each native bucket that is not empty."""
    counts: dict[int, int] = {}
    for bucket, count in zip(compress(_BUCKETS, cells), filter(None, cells), strict=True):
        counts[bucket] = counts.get(bucket, 0) + count
    return counts


def classic_buckets(cells: list[int], bounds: tuple[float, ...]) -> list[int]:
    """Return the count of each classic bucket, not cumulative. The last bucket has no upper bound."""
    counts, start = [], 0
    for end in _ends(bounds):
        counts.append(sum(cells[start:end]))
        start = end
    return [*counts, sum(cells[start:])]


@cache
def _ends(bounds: tuple[float, ...]) -> tuple[int, ...]:
    """Return the number of cells up to each bound."""
    return tuple([bisect_left(CELLS, bound) + 1 for bound in bounds])
