"""Numbers and durations as text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from math import isfinite

DASH = "\u2013"
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def duration(seconds: float | None) -> str:
    """Return a duration in a single unit."""
    if seconds is None or not isfinite(seconds):
        return DASH
    if seconds < 0.1:
        return f"{max(0.0, seconds) * 1e3:.3g} ms"
    if seconds < 10:
        return f"{seconds:.3g} s" if seconds < 1 else f"{seconds:.1f} s"
    for limit, length, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def age(at: float, now: float) -> str:
    """Return the time since `at`, such as "5.0 s ago"."""
    return f"{duration(max(0.0, now - at))} ago"


def ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers as ranges, such as "0-2, 4, 6-7"."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def clock(at: float) -> str:
    """Return the time of day in UTC; with the date if `at` is before today."""
    form = "%H:%M:%S UTC" if time.time() - at < 43200 else "%Y-%m-%d %H:%M UTC"
    return time.strftime(form, time.gmtime(at))


def _three_digits(value: float) -> str:
    """Return three digits, and all digits before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def size(count: float) -> str:
    """Return bytes in binary units."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{_three_digits(count / 1024**power)} {unit}"
    return f"{count:.0f} B"


def number(value: float, unit: str = "") -> str:
    """Return a number, with a decimal prefix if the number is large."""
    if not isfinite(value):
        return DASH
    tail = f" {unit}" if unit else ""
    if value == int(value) and abs(value) < 1e5:
        return f"{value:.0f}{tail}"
    for factor, prefix in _PREFIXES:
        if abs(value) >= factor and (abs(value) >= 1e4 or unit):
            digits = _three_digits(value / factor)
            return f"{digits} {prefix}{unit}" if unit else f"{digits}{prefix}"
    return f"{value:.4g}{tail}"


def share(ratio: float) -> str:
    """Return a ratio in per cent."""
    return f"{100 * ratio:.1f} %" if 0 < ratio < 0.1 else f"{100 * ratio:.0f} %"


def energy(joules: float) -> str:
    """Return joules, or kilowatt-hours for large energies."""
    return f"{joules / 3.6e6:.3g} kWh" if joules >= 3.6e5 else number(joules, "J")


def watts(value: float) -> str:
    """Return watts."""
    return number(value, "W")


def grams(value: float) -> str:
    """Return grams."""
    return number(value, "g")


_WORDS: Mapping[str, Callable[[float], str]] = {
    "seconds": duration,
    "bytes": size,
    "ratio": share,
    "joules": energy,
    "watts": watts,
}


def quantity(value: float | None, unit: str) -> str:
    """Return a number in a base unit of Prometheus."""
    return DASH if value is None else _WORDS.get(unit, number)(value)
