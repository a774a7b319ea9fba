"""Exponential buckets: the counts behind a native histogram, kept beside a histogram's classic buckets.

Used by the recording thread of the training process, and in the sidecar. Bucket `i` holds what is above 2^((i-1)/8) and
not above 2^(i/8). That is Prometheus' schema 3, whose bounds are 9 % apart.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import MutableMapping, Sequence
from math import ceil, log2

SCHEMA = 3
LEAST = -40 << SCHEMA
"""The bucket of what is not above 2^-40, about 1e-12."""
MOST = 64 << SCHEMA
"""The bucket up to 2^64, the last one."""
BEYOND = MOST + 1
"""Counts what has no bucket."""

_PER_DOUBLING = 1 << SCHEMA
_LOW, _HIGH = 2.0**-40, 2.0**64


def bucket_of(value: float) -> int:
    """Give the bucket of a number."""
    if value <= _LOW:
        return LEAST
    return ceil(log2(value) * _PER_DOUBLING) if value <= _HIGH else BEYOND


def upper_bound(bucket: int) -> float:
    """Give the largest number of a bucket."""
    return float(2.0 ** (bucket / _PER_DOUBLING))


def count_into(counts: MutableMapping[int, int], ordered: Sequence[float]) -> None:
    """Count ascending numbers."""
    start = 0
    while start < len(ordered):
        bucket = bucket_of(ordered[start])
        end = len(ordered) if bucket == BEYOND else bisect_right(ordered, upper_bound(bucket), start + 1)
        counts[bucket] = counts.get(bucket, 0) + end - start
        start = end
