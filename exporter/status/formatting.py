"""Text formatting of numbers, durations, sizes and timestamps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from math import isfinite

DASH = "\u2013"
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def duration(seconds: float | None) -> str:
    """Return a duration in a single unit, such as "1.5 s" or "20 min"; a dash for None and for an infinite duration."""
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


def age(timestamp: float, now: float) -> str:
    """Return the time since a timestamp, such as "5.0 s ago"."""
    return f"{duration(max(0.0, now - timestamp))} ago"


def ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers as ranges, such as "0-2, 4, 6-7"."""
    starts: list[int] = []
    ends: list[int] = []
    for number in sorted(set(numbers)):
        if ends and ends[-1] == number - 1:
            ends[-1] = number
        else:
            starts.append(number)
            ends.append(number)
    intervals = zip(starts, ends, strict=True)
    return ", ".join(str(start) if start == end else f"{start}-{end}" for start, end in intervals)


def rank_names(ranks: Iterable[int]) -> str:
    """Return the names of ranks, such as "rank 3" or "ranks 0-2, 4"."""
    distinct_ranks = set(ranks)
    return f"rank{'s' if len(distinct_ranks) > 1 else ''} {ranges(distinct_ranks)}"


def exit_text(reason: str) -> str:
    """Return the exit reason of a process as a participle, such as "killed by SIGKILL"; other reasons are unchanged."""
    if reason == "inferred: the process was killed or crashed":
        return "killed or crashed, signal unknown"
    if reason.startswith("signal "):
        return f"killed by {reason.removeprefix('signal ')}"
    return reason.removeprefix("inferred: the process ")


def clock(timestamp: float) -> str:
    """Return a timestamp as the time of day in UTC, with the date if it is more than 12 hours ago."""
    time_format = "%H:%M:%S UTC" if time.time() - timestamp < 43200 else "%Y-%m-%d %H:%M UTC"
    return time.strftime(time_format, time.gmtime(timestamp))


def _three_digits(value: float) -> str:
    """Return a number with three significant digits, and with all digits before the decimal point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def size(byte_count: float) -> str:
    """Return a number of bytes in binary units, such as "1.5 GiB"."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if byte_count >= 1024**power:
            return f"{_three_digits(byte_count / 1024**power)} {unit}"
    return f"{byte_count:.0f} B"


def number(value: float, unit: str = "") -> str:
    """Return a number with a decimal prefix from 10,000 on, or from 1,000 with a unit, such as "1.5G" or "123 kJ".

    A whole number below 100,000 has no prefix. A number that is not finite becomes a dash.
    """
    if not isfinite(value):
        return DASH
    suffix = f" {unit}" if unit else ""
    if value == int(value) and abs(value) < 1e5:
        return f"{value:.0f}{suffix}"
    for factor, prefix in _PREFIXES:
        if abs(value) >= factor and (abs(value) >= 1e4 or unit):
            digits = _three_digits(value / factor)
            return f"{digits} {prefix}{unit}" if unit else f"{digits}{prefix}"
    return f"{value:.4g}{suffix}"


def share(ratio: float) -> str:
    """Return a ratio in per cent, such as "12 %" or "1.5 %"."""
    return f"{100 * ratio:.1f} %" if 0 < ratio < 0.1 else f"{100 * ratio:.0f} %"


def energy(joules: float) -> str:
    """Return an energy in watt-hours, with a decimal prefix from 1 kWh on, such as "1.5 kWh"."""
    watt_hours = joules / 3600
    for factor, prefix in _PREFIXES:
        if watt_hours >= factor:
            return f"{_three_digits(watt_hours / factor)} {prefix}Wh"
    return f"{watt_hours:.3g} Wh"


def joules(value: float) -> str:
    """Return an energy in joules, such as "123 kJ"."""
    return number(value, "J")


def watts(value: float) -> str:
    """Return a power, such as "350 W"."""
    return number(value, "W")


def grams(value: float) -> str:
    """Return a mass, such as "120 g"."""
    return number(value, "g")


_FORMATTERS: Mapping[str, Callable[[float], str]] = {
    "seconds": duration,
    "bytes": size,
    "ratio": share,
    "joules": joules,
    "watts": watts,
}


def quantity(value: float | None, unit: str) -> str:
    """Return a number in a base unit of Prometheus as text, or a dash for None."""
    return DASH if value is None else _FORMATTERS.get(unit, number)(value)
