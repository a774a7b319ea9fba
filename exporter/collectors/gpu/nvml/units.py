"""NVML's numbers into base units; what cannot be is refused with `GarbageError`.

Used in the NVML child. A driver in trouble returns sentinels, all ones, and numbers of a structure that it did not fill;
each bound is far above what hardware of the next years can reach.
"""

from __future__ import annotations

from math import isfinite

_ALL_ONES = frozenset({0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF})

BEYOND_COUNTING = (1 << 64) - (1 << 32)
"""All ones, also as a float, and what is left of them after an addition; no counter gets there."""

_OVERSHOOT_PERCENT = 150.0
"""Averages of the driver exceed 100 by a little; more is not a percentage."""


class GarbageError(ValueError):
    """A number that cannot be what it is said to be."""


def count(number: int) -> int:
    """Check a counter."""
    if not isinstance(number, int) or not 0 <= number < BEYOND_COUNTING:
        raise GarbageError(number)
    return number


def small(number: int) -> int:
    """Check a number of things, a mode or a generation: from 0 to 2^31 - 2."""
    if not isinstance(number, int) or not 0 <= number < 0x7FFFFFFF:
        raise GarbageError(number)
    return number


def flag(number: int) -> int:
    """Check a 0 or 1."""
    if number not in (0, 1):
        raise GarbageError(number)
    return number


def ratio(percent: float) -> float:
    """Percent into 0 to 1."""
    if not isfinite(percent) or not -0.5 <= percent <= _OVERSHOOT_PERCENT:
        raise GarbageError(percent)
    return min(max(percent / 100, 0.0), 1.0)


def watts(milliwatts: float) -> float:
    """Milliwatts into watts, below 100 kW."""
    return _within(milliwatts, 0, 1e8) / 1000


def temperature(degrees: float) -> float:
    """Check a temperature in degrees Celsius; -1 is all ones, which NVML gives for one that it does not have."""
    if degrees == -1:
        raise GarbageError(degrees)
    return celsius(degrees)


def celsius(degrees: float) -> float:
    """Check a temperature, or a distance between two: -300 to 300."""
    return float(_within(degrees, -300, 300))


def hertz(megahertz: float) -> float:
    """Megahertz into hertz, below 100 GHz."""
    return _within(megahertz, 0, 1e5) * 1e6


def size(number: int) -> int:
    """Check a number of bytes, below 1 PiB."""
    return int(_within(number, 0, 1 << 50))


def _within(number: float, least: float, most: float) -> float:
    if number in _ALL_ONES or not isfinite(number) or not least <= number <= most:
        raise GarbageError(number)
    return number
