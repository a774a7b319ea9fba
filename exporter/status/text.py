"""Numbers as a person reads them: durations, bytes, joules, shares.

Used by the status page. What is not known is a dash.
"""

from __future__ import annotations

from math import isfinite

DASH = "\u2013"
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def duration(seconds: float | None) -> str:
    """A span of time in one unit."""
    if seconds is None or not isfinite(seconds):
        return DASH
    if seconds < 0.1:
        return f"{max(0.0, seconds) * 1e3:.3g} ms"
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
    for limit, length, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def size(count: float | None) -> str:
    """Bytes in binary units."""
    if count is None:
        return DASH
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.3g} {unit}"
    return f"{count:.0f} B"


def number(value: float | None, unit: str = "") -> str:
    """A number with a decimal prefix where it is large."""
    if value is None or not isfinite(value):
        return DASH
    tail = f" {unit}" if unit else ""
    if value == int(value) and abs(value) < 1e5:
        return f"{value:.0f}{tail}"
    for factor, prefix in _PREFIXES:
        if abs(value) >= factor and (abs(value) >= 1e4 or unit):
            return f"{value / factor:.3g} {prefix}{unit}" if unit else f"{value / factor:.3g}{prefix}"
    return f"{value:.4g}{tail}"


def share(ratio: float | None) -> str:
    """A ratio in per cent."""
    if ratio is None:
        return DASH
    return f"{100 * ratio:.1f} %" if 0 < ratio < 0.1 else f"{100 * ratio:.0f} %"


def energy(joules: float | None) -> str:
    """Joules, or kilowatt-hours where they are many."""
    if joules is None:
        return DASH
    return f"{joules / 3.6e6:.3g} kWh" if joules >= 3.6e5 else number(joules, "J")


def quantity(value: float | None, unit: str) -> str:
    """A number in a base unit of Prometheus."""
    if unit == "seconds":
        return duration(value)
    if unit == "bytes":
        return size(value)
    if unit == "ratio":
        return share(value)
    if unit == "joules":
        return energy(value)
    return number(value)
