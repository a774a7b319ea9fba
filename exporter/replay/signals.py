"""The numbers of a replayed machine as functions of time.

Used in the NVML child, by the replay's library. A description (plain dictionaries, see `description`) comes in;
what NVML would give at a moment goes out. Pure: the same description and the same moment give the same number,
whatever was asked before, so that two child processes agree with each other.
"""

from __future__ import annotations

from bisect import bisect_right
from math import cos, inf, nan, pi, sin
from typing import Any

_RIPPLE_SECONDS = 3.1
_SHIFT_SECONDS = 1.7
"""The load of each GPU runs so much behind that of the one before it."""

_WORDS = {"nan": nan, "infinity": inf}


class Load:
    """How busy a GPU is, from 0 to 1: steps that repeat, with a ripple on them.

    Args:
        description: Its steps (`seconds`, `level`) and its `ripple`.
        shift: Seconds by which it runs ahead.
    """

    def __init__(self, description: dict[str, Any], *, shift: float) -> None:
        steps = description["steps"] or [{"seconds": 1.0, "level": 0.0}]
        self._levels = [step["level"] for step in steps]
        self._ends: list[float] = []
        self._sums: list[float] = []
        end = total = 0.0
        for step in steps:
            self._sums.append(total)
            end += step["seconds"]
            total += step["seconds"] * step["level"]
            self._ends.append(end)
        self._cycle, self._per_cycle = end, total
        self._ripple = description["ripple"]
        self._shift = shift

    def at(self, moment: float) -> float:
        """The load at a moment."""
        place = (moment + self._shift) % self._cycle
        level = self._levels[min(bisect_right(self._ends, place), len(self._levels) - 1)]
        ripple = self._ripple * sin(2 * pi * (moment + self._shift) / _RIPPLE_SECONDS)
        return float(min(max(level + ripple, 0.0), 1.0))

    def total(self, moment: float) -> float:
        """The load added up over the seconds since the beginning."""
        return self._until(moment + self._shift) - self._until(self._shift)

    def _until(self, moment: float) -> float:
        cycles, place = divmod(moment, self._cycle)
        step = min(bisect_right(self._ends, place), len(self._levels) - 1)
        begin = self._ends[step - 1] if step else 0.0
        inside = self._sums[step] + (place - begin) * self._levels[step]
        wave = self._ripple * _RIPPLE_SECONDS / (2 * pi) * (1 - cos(2 * pi * moment / _RIPPLE_SECONDS))
        return float(cycles * self._per_cycle + inside + wave)


class Reading:
    """One reading over time.

    Args:
        value: What it is in the beginning: None (not supported), a number, a word, or a signal.
    """

    def __init__(self, value: Any) -> None:
        # (from when, what, since when that counts); the latest that has begun is valid.
        self._changes: list[tuple[float, Any, float]] = [(-inf, value, 0.0)]

    def change(self, at: float, until: float | None, value: Any) -> None:
        """Let it be something else for a time; then it goes on as if nothing had been."""
        if until is not None:
            before = self._current(until)
            self._changes = [each for each in self._changes if not at <= each[0] < until]
            self._changes.append((until, before[1], before[2]))
        self._changes.append((at, value, at))
        self._changes.sort(key=lambda change: change[0])

    def at(self, moment: float, load: Load) -> float | None:
        """The number at a moment; None where there is none."""
        _, value, since = self._current(moment)
        if not isinstance(value, dict):
            number: float | None = _WORDS[value] if isinstance(value, str) else value
            return number
        if value["counter_from"] is None:
            return _level(value, load.at(moment))
        busy = load.total(moment) - load.total(since)
        grown = value["idle"] * (moment - since) + (_busy(value) - value["idle"]) * busy
        total = int(value["counter_from"] + grown)
        return total % (1 << value["bits"]) if value["bits"] else total

    def mean(self, begin: float, end: float, load: Load) -> float | None:
        """The mean between two moments, of a level; the number at the end, of a counter."""
        _, value, _ = self._current(end)
        if not isinstance(value, dict) or value["counter_from"] is not None:
            return self.at(end, load)
        return _level(value, (load.total(end) - load.total(begin)) / (end - begin))

    def _current(self, moment: float) -> tuple[float, Any, float]:
        # The first one has always been.
        place = max(place for place, change in enumerate(self._changes) if change[0] <= moment)
        return self._changes[place]


def _busy(signal: dict[str, Any]) -> float:
    return float(signal["idle"] if signal["busy"] is None else signal["busy"])


def _level(signal: dict[str, Any], load: float) -> float:
    return float(signal["idle"] + (_busy(signal) - signal["idle"]) * load)


class Readings:
    """All readings of one GPU.

    Args:
        description: Readings by name.
        load: The GPU's.
    """

    def __init__(self, description: dict[str, Any], load: Load) -> None:
        self.load = load
        self._readings = {name: Reading(value) for name, value in description.items()}

    def change(self, name: str, at: float, until: float | None, value: Any) -> None:
        """Let a reading be something else for a time."""
        self._readings.setdefault(name, Reading(None)).change(at, until, value)

    def at(self, name: str, moment: float) -> float | None:
        """A reading at a moment."""
        each = self._readings.get(name)
        return None if each is None else each.at(moment, self.load)

    def mean(self, name: str, begin: float, end: float) -> float | None:
        """The mean of a reading between two moments."""
        each = self._readings.get(name)
        return None if each is None else each.mean(begin, end, self.load)


def load_of(description: dict[str, Any], index: int) -> Load:
    """Make the load of a GPU."""
    return Load(description, shift=index * _SHIFT_SECONDS)
