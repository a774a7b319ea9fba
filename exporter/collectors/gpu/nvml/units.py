"""Conversion of NVML's numbers to base units, with bounds.

Runs in the NVML child and performs no I/O. A failing driver returns numbers with all bits set, or the content of
uninitialized structures. A number outside the bounds raises `GarbageError`; the bounds allow for the hardware of the
next years.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MIN_UPPER_BITS_SET = (1 << 64) - (1 << 32)
"""Lowest number whose upper 32 bits are set. A larger number has all bits set, also after a conversion to float or a small subtraction."""

Convert = Callable[[Any], Any]
"""Function that converts a result of NVML. Raises GarbageError for an impossible result."""


class GarbageError(ValueError):
    """Number outside the possible range."""


def bounded(minimum: float, maximum: float, convert: Convert = lambda number: number) -> Convert:
    """Return a conversion that refuses numbers outside the bounds, which are in NVML's unit."""

    def checked(number: Any) -> Any:
        if not minimum <= number <= maximum:  # NaN is outside, too
            raise GarbageError(number)
        return convert(number)

    return checked


count = bounded(0, MIN_UPPER_BITS_SET - 1)
"""A counter."""
small = bounded(0, 0x7FFFFFFE)
"""A number of 31 bits, such as a count of items, an index or a generation."""
flag = bounded(0, 1)
size = bounded(0, 1 << 50)
"""Bytes, below 1 PiB."""
watts = bounded(0, 1e8, lambda milliwatts: milliwatts / 1000)
hertz = bounded(0, 5e4, lambda megahertz: megahertz * 1e6)
ratio = bounded(-0.5, 150, lambda percent: min(max(percent / 100, 0.0), 1.0))
"""Share from 0 to 1, from percent. The driver's averages may exceed 100 % or fall below 0 % by a little, and are limited."""
celsius = bounded(-300, 300)
"""A temperature, or a difference of two."""
byte_rate = bounded(0, 1e8, lambda mebibytes: mebibytes * (1 << 20))
"""Bytes per second, from MiB per second."""


def temperature(degrees: float) -> float:
    """Return a temperature in degrees Celsius.

    Raises GarbageError for an impossible temperature, and for -1, whose bits are all set if the sensor is missing.
    """
    if degrees == -1:
        raise GarbageError(degrees)
    return float(celsius(degrees))
