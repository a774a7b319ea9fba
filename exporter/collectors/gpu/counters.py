"""Monotonic counters computed from raw counters that wrap, restart and glitch.

Runs in the sidecar. After a reload of the driver counters start at 0, a 32-bit register wraps, and a failing GPU returns
unrelated numbers. A step that no hardware can make (backwards, or faster than the fastest rate) is not accepted at once:
the next number decides whether the step was a glitch or a new start.
"""

from __future__ import annotations

from dataclasses import dataclass, field

REASONS = ("wrap", "reset", "glitch")
"""Reasons for a correction: wrap of a register, reset of the counter, glitch of a single number."""

_SLACK_SECONDS = 0.25
_TOLERANCE = 1.1
_WIDTH = 1 << 32
_MAX_DOUBTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterRule:
    """Interpretation of a raw counter."""

    scale: float = 1.0  # the family's unit per raw unit
    most_per_second: float | None = None  # fastest possible rate in the family's unit; None for no limit
    from_zero: bool = False  # True if the total starts at 0 and not at the raw counter's value
    of_process: bool = False  # True for counters of the NVML child, which start at 0 in each child


@dataclass(frozen=True, slots=True)
class RawReading:
    """Raw number with monotonic time."""

    raw: float
    time: float


@dataclass(slots=True)
class MonotonicCounter:
    """Total that never falls."""

    rule: CounterRule
    total: float = 0  # in the raw unit
    resets: dict[str, int] = field(default_factory=dict)  # corrections by reason
    _last: RawReading | None = None
    _suspect: RawReading | None = None
    _doubts: int = 0  # consecutive numbers that continue neither the last number nor the suspect
    _child: int | None = None

    def advance(self, raw: float, time: float, child: int) -> float:
        """Add the number of a child at a monotonic time; return the increase of the total, in the raw unit."""
        previous_total, reading, last = self.total, RawReading(raw, time), self._last
        if self.rule.of_process:
            since = last.raw if last is not None and child == self._child else 0
            self.total += max(0, raw - since)
            self._last, self._child = reading, child
        elif last is None:
            self.total = 0 if self.rule.from_zero else raw
            self._last = reading
            return 0
        elif self._continues(last, reading):
            self._accept(raw - last.raw, reading, "" if self._suspect is None else "glitch")
        elif self._wraps(last, reading):
            self._accept(raw + _WIDTH - last.raw, reading, "wrap")
        elif self._suspect is not None and self._continues(self._suspect, reading):
            self._restart(last, self._suspect, reading)
        else:
            self._suspect = reading
            self._doubts += 1
        return self.total - previous_total

    @property
    def raw(self) -> float | None:
        """Last accepted raw number; None before the first number, and while the total is in doubt."""
        return None if self._last is None or self._suspect is not None else self._last.raw

    def value(self) -> float | None:
        """Return the total in the family's unit; None if the total is in doubt."""
        return None if self._doubts >= _MAX_DOUBTS else self.total * self.rule.scale

    def _accept(self, grown: float, reading: RawReading, reason: str) -> None:
        if reason:
            self.resets[reason] = self.resets.get(reason, 0) + 1
        self.total += grown
        self._last, self._suspect, self._doubts = reading, None, 0

    def _restart(self, last: RawReading, suspect: RawReading, reading: RawReading) -> None:
        grown = reading.raw - suspect.raw
        if suspect.raw < last.raw and suspect.raw <= self._most(suspect.time - last.time):
            grown += (
                suspect.raw
            )  # the raw counter started at 0; otherwise the increments in between are unknown
        self._accept(grown, reading, "reset")

    def _continues(self, last: RawReading, reading: RawReading) -> bool:
        return 0 <= reading.raw - last.raw <= self._most(reading.time - last.time)

    def _wraps(self, last: RawReading, reading: RawReading) -> bool:
        if not reading.raw < _WIDTH // 2 <= last.raw < _WIDTH:
            return False
        # Without a known rate, only a counter close to 2^32 can wrap.
        limited = self.rule.most_per_second is not None
        max_increase = self._most(reading.time - last.time) if limited else _WIDTH // 8
        return reading.raw + _WIDTH - last.raw <= max_increase

    def _most(self, seconds: float) -> float:
        if self.rule.most_per_second is None:
            return float("inf")
        return self.rule.most_per_second / self.rule.scale * (seconds * _TOLERANCE + _SLACK_SECONDS)
