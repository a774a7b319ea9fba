"""Conversion of NVML's numbers to base units, with bounds.

Runs in the NVML child; pure. A failing driver returns all ones, and numbers of structures that were not filled. Each bound
is above the hardware of the next years; a number out of bounds raises `GarbageError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BEYOND_COUNTING = (1 << 64) - (1 << 32)
"""All ones, also as a float or after an addition; no real counter reaches this number."""

Convert = Callable[[Any], Any]
"""Converts a result of NVML; raises GarbageError."""


class GarbageError(ValueError):
    """Number outside the possible range."""


def bounded(minimum: float, maximum: float, convert: Convert = lambda number: number) -> Convert:
    """Return a conversion that refuses numbers outside the bounds."""

    def checked(number: Any) -> Any:
        if not minimum <= number <= maximum:  # NaN is outside, too
            raise GarbageError(number)
        return convert(number)

    return checked


count = bounded(0, BEYOND_COUNTING - 1)
"""A counter."""
small = bounded(0, 0x7FFFFFFE)
"""A number of things, a mode or a generation."""
flag = bounded(0, 1)
size = bounded(0, 1 << 50)
"""Bytes, below 1 PiB."""
watts = bounded(0, 1e8, lambda milliwatts: milliwatts / 1000)
hertz = bounded(0, 5e4, lambda megahertz: megahertz * 1e6)
ratio = bounded(-0.5, 150, lambda percent: min(max(percent / 100, 0.0), 1.0))
"""Averages of the driver exceed 100 % by a little."""
celsius = bounded(-300, 300)
"""A temperature, or a difference of two."""
byte_rate = bounded(0, 1e8, lambda mebibytes: mebibytes * (1 << 20))
"""Bytes a second."""


def temperature(degrees: float) -> float:
    """Return a temperature; -1 is all ones, which NVML returns without the sensor."""
    if degrees == -1:
        raise GarbageError(degrees)
    return float(celsius(degrees))
