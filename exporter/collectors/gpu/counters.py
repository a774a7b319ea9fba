"""Counters of a GPU that never fall, made of numbers that do.

Used in the sidecar. A driver that is loaded anew begins at 0; a register of 32 bits wraps; a GPU in trouble gives a
number that has nothing to do with the others. A step that no hardware can make (backwards, or faster than the fastest)
is not believed at once: the next number decides whether it was a glitch, or the counter has begun anew there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

REASONS = ("wrap", "reset", "glitch")
"""Why a number did not follow on: a register's width, a new beginning, a single wrong number."""

_SLACK_SECONDS = 0.25
_TOLERANCE = 1.1
_WIDTH = 1 << 32
_MOST_DOUBTS = 2


@dataclass(frozen=True, slots=True)
class CounterRule:
    """How a counter is read."""

    scale: float = 1.0  # what one of its units is in the family's
    # The fastest that it can count, in the family's unit; None where there is no such limit.
    most_per_second: float | None = None
    from_zero: bool = False  # whether the total begins at 0 and not at what the driver has counted so far
    of_process: bool = False  # whether it counts since the NVML child began, so that a new child begins at 0


@dataclass(slots=True)
class Counter:
    """One counter."""

    rule: CounterRule  # how to read it
    total: float = 0  # in its raw unit; never falls
    resets: dict[str, int] = field(default_factory=dict)  # by reason, how often a number did not follow on
    _last: tuple[float, float] | None = None  # number and time
    _suspect: tuple[float, float] | None = None
    _doubts: int = 0  # numbers in a row that follow on from nothing
    _child: int | None = None

    def advance(self, raw: float, time: float, child: int) -> float:
        """Take a number of a child's, with its monotonic time; gives by how much the total grew, in the raw unit."""
        before = self.total
        if self.rule.of_process:
            since = self._last[0] if self._last is not None and child == self._child else 0
            self.total += max(0, raw - since)
            self._last, self._child = (raw, time), child
        elif self._last is None:
            self.total = 0 if self.rule.from_zero else raw
            self._last = (raw, time)
            return 0
        elif self._follows(self._last, raw, time):
            self._accept(raw - self._last[0], raw, time, "" if self._suspect is None else "glitch")
        elif self._wraps(self._last, raw, time):
            self._accept(raw + _WIDTH - self._last[0], raw, time, "wrap")
        elif self._suspect is not None and self._follows(self._suspect, raw, time):
            self._begin_anew(self._last, self._suspect, raw, time)
        else:
            self._suspect = (raw, time)
            self._doubts += 1
        return self.total - before

    def value(self) -> float | None:
        """Give the total in the family's unit; None while it is in doubt."""
        return None if self._doubts >= _MOST_DOUBTS else self.total * self.rule.scale

    def keep(self) -> tuple[float, float, float] | None:
        """Give what a later life needs to go on: the total, the last number and its time; None where it needs nothing."""
        if self._last is None or not (self.total or self._last[0] or self.rule.from_zero):
            return None
        return self.total, *self._last

    def resume(self, total: float, raw: float, time: float) -> None:
        """Go on from what was kept; a counter of the old child's begins anew with the next one."""
        self.total = total
        self._last = (raw, time)

    def _accept(self, grown: float, raw: float, time: float, reason: str) -> None:
        if reason:
            self.resets[reason] = self.resets.get(reason, 0) + 1
        self.total += grown
        self._last, self._suspect, self._doubts = (raw, time), None, 0

    def _begin_anew(
        self, last: tuple[float, float], suspect: tuple[float, float], raw: float, time: float
    ) -> None:
        grown = raw - suspect[0]
        if suspect[0] < last[0] and suspect[0] <= self._most(suspect[1] - last[1]):
            grown += suspect[0]  # it began at 0; else nobody knows what it counted in between
        self._accept(grown, raw, time, "reset")

    def _follows(self, last: tuple[float, float], raw: float, time: float) -> bool:
        return 0 <= raw - last[0] <= self._most(time - last[1])

    def _wraps(self, last: tuple[float, float], raw: float, time: float) -> bool:
        if not raw < _WIDTH // 2 <= last[0] < _WIDTH:
            return False
        # Without a fastest pace, only a counter that was close to its end is believed to have wrapped.
        most = self._most(time - last[1]) if self.rule.most_per_second is not None else _WIDTH // 8
        return raw + _WIDTH - last[0] <= most

    def _most(self, seconds: float) -> float:
        if self.rule.most_per_second is None:
            return float("inf")
        return self.rule.most_per_second / self.rule.scale * (seconds * _TOLERANCE + _SLACK_SECONDS)
