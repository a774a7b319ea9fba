"""Medians, without the standard library's `statistics`, which would cost every training process 1.5 MiB.

Used by the recording thread of the training process.
"""

from __future__ import annotations

from collections.abc import Iterable


def median(values: Iterable[float]) -> float:
    """Give the middle of some numbers, or the mean of the two in the middle.

    Args:
        values: At least one.
    """
    ordered = sorted(values)
    half, odd = divmod(len(ordered), 2)
    return ordered[half] if odd else (ordered[half - 1] + ordered[half]) / 2
