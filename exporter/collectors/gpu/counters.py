"""Monotonic counters computed from raw counters that wrap, restart and glitch.

Runs in the sidecar. Raw counters restart at 0 after a reload of the driver, 32-bit registers wrap, and a failing GPU returns unrelated
numbers. A step is impossible if it is backwards and not a wrap, or faster than the maximum rate. An impossible step is not accepted at
once: the next number decides whether it was a glitch or a restart. In 100, 3, 104, the 3 was a glitch. In 100, 3, 7, the counter has
restarted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

CORRECTION_REASONS = ("wrap", "reset", "glitch")
"""Reasons of a correction: a register wrapped, the raw counter restarted, or a single number was wrong."""

# The driver updates a counter between two readings. The maximum increase since the last reading therefore has two margins.
_RATE_MARGIN = 1.1  # factor of the maximum rate
_SLACK_SECONDS = 0.25  # added to the time between the readings
_REGISTER_RANGE = 1 << 32  # of the registers that wrap
_MAX_DOUBTS = 2
"""Number of consecutive impossible numbers after which the total is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterRule:
    """Unit, maximum rate, and start of the total of a raw counter."""

    scale: float = 1.0  # factor from the raw unit to the unit of the family
    max_per_second: float | None = None  # highest possible rate in the unit of the family; None for no limit
    starts_at_zero: bool = False  # True if the total starts at 0, False if at the first raw number
    restarts_with_child: bool = False  # True for counters of the NVML child, which start at 0 in each child


@dataclass(frozen=True, slots=True)
class RawReading:
    """Raw number, read at a monotonic time."""

    raw: float
    time: float


@dataclass(slots=True)
class MonotonicCounter:
    """Total of a raw counter. The total never decreases, and does not grow while a number is in doubt."""

    rule: CounterRule
    total: float = 0  # in the raw unit
    corrections: dict[str, int] = field(default_factory=dict)  # number of corrections by reason
    _last: RawReading | None = None
    # The latest number, if it is impossible after the last accepted number.
    _suspect: RawReading | None = None
    # Number of consecutive numbers that are impossible after both the last accepted number and the suspect.
    _doubts: int = 0
    _child: int | None = None  # child of the last number, for counters that restart with the child

    def advance(self, raw: float, time: float, child: int) -> float:
        """Add a raw number that a child read at a monotonic time. Return the increase of the total, in the raw unit."""
        previous_total, reading, last = self.total, RawReading(raw, time), self._last
        if self.rule.restarts_with_child:
            previous_raw = last.raw if last is not None and child == self._child else 0
            self.total += max(0, raw - previous_raw)
            self._last, self._child = reading, child
        elif last is None:
            self.total = 0 if self.rule.starts_at_zero else raw
            self._last = reading
            return 0
        elif self._continues(last, reading):
            self._accept(raw - last.raw, reading, "" if self._suspect is None else "glitch")
        elif self._wraps(last, reading):
            self._accept(raw + _REGISTER_RANGE - last.raw, reading, "wrap")
        elif self._suspect is not None and self._continues(self._suspect, reading):
            self._restart(last, self._suspect, reading)
        else:
            self._suspect = reading
            self._doubts += 1
        return self.total - previous_total

    @property
    def raw(self) -> float | None:
        """Last accepted raw number; None before the first number, and after an impossible number until the next accepted one."""
        return None if self._last is None or self._suspect is not None else self._last.raw

    def value(self) -> float | None:
        """Return the total in the family's unit, or None after two impossible numbers in a row."""
        return None if self._doubts >= _MAX_DOUBTS else self.total * self.rule.scale

    def _accept(self, increase: float, reading: RawReading, reason: str) -> None:
        """Add an increase of the raw counter, and count the correction unless the reason is empty."""
        if reason:
            self.corrections[reason] = self.corrections.get(reason, 0) + 1
        self.total += increase
        self._last, self._suspect, self._doubts = reading, None, 0

    def _restart(self, last: RawReading, suspect: RawReading, reading: RawReading) -> None:
        """Accept a number that continues the suspect and not the last accepted number."""
        increase = reading.raw - suspect.raw
        if suspect.raw < last.raw and suspect.raw <= self._max_increase(suspect.time - last.time):
            # The raw counter restarted at 0. Otherwise, the increase before the suspect is unknown.
            increase += suspect.raw
        self._accept(increase, reading, "reset")

    def _continues(self, last: RawReading, reading: RawReading) -> bool:
        """Return True if the step between two numbers is possible without a wrap."""
        return 0 <= reading.raw - last.raw <= self._max_increase(reading.time - last.time)

    def _wraps(self, last: RawReading, reading: RawReading) -> bool:
        """Return True if a 32-bit register may have wrapped once: from its upper half to its lower half."""
        if not reading.raw < _REGISTER_RANGE // 2 <= last.raw < _REGISTER_RANGE:
            return False
        # Without a maximum rate, a wrap is assumed only for an increase below 2^29.
        has_max_rate = self.rule.max_per_second is not None
        max_increase = self._max_increase(reading.time - last.time) if has_max_rate else _REGISTER_RANGE // 8
        return reading.raw + _REGISTER_RANGE - last.raw <= max_increase

    def _max_increase(self, seconds: float) -> float:
        """Return the largest possible increase of the raw counter in a time, in the raw unit."""
        if self.rule.max_per_second is None:
            return float("inf")
        return self.rule.max_per_second / self.rule.scale * (seconds * _RATE_MARGIN + _SLACK_SECONDS)
