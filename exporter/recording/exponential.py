"""Exponential buckets of native histograms, in Prometheus' schema 3.

Runs on the recording thread and in the sidecar. Bucket `i` counts numbers above 2^((i-1)/8) and up to 2^(i/8). Adjacent bounds differ
by 9 %.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import MutableMapping, Sequence
from math import ceil, log2

SCHEMA = 3
LOWEST_BUCKET = -40 << SCHEMA
"""Bucket of all numbers up to 2^-40, about 1e-12."""
HIGHEST_BUCKET = 64 << SCHEMA
"""Bucket of numbers up to 2^64."""
OVERFLOW_BUCKET = HIGHEST_BUCKET + 1
"""Bucket of all larger numbers."""

_BUCKETS_PER_DOUBLING = 1 << SCHEMA
_LOW, _HIGH = 2.0**-40, 2.0**64


def bucket_of(value: float) -> int:
    """Return the bucket of a number."""
    if value <= _LOW:
        return LOWEST_BUCKET
    return ceil(log2(value) * _BUCKETS_PER_DOUBLING) if value <= _HIGH else OVERFLOW_BUCKET


def upper_bound(bucket: int) -> float:
    """Return the upper bound of a bucket."""
    return float(2.0 ** (bucket / _BUCKETS_PER_DOUBLING))


def count_into(counts: MutableMapping[int, int], sorted_numbers: Sequence[float]) -> None:
    """Add numbers in ascending order to the counts of their buckets."""
    start = 0
    while start < len(sorted_numbers):
        bucket = bucket_of(sorted_numbers[start])
        if bucket == OVERFLOW_BUCKET:
            end = len(sorted_numbers)
        else:
            end = bisect_right(sorted_numbers, upper_bound(bucket), start + 1)
        counts[bucket] = counts.get(bucket, 0) + end - start
        start = end
