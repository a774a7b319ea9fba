"""Energy counter of a device, from a register that can wrap, restart, step back or jump.

Corrections are counted by reason:

- `wrap`: the register passed its range. No energy is lost.
- `reset`: the register fell to a value that it can have reached from 0 since the last reading.
- `backwards`: the register fell to a higher value.
- `jump`: the increase exceeds the possible energy of the interval.

After a wrap, the energy of the interval is known. After any other correction, it is estimated: as the last known power times the length
of the interval, or as 0 if no power is known.
"""

from __future__ import annotations

from dataclasses import dataclass

CORRECTION_REASONS = ("wrap", "reset", "backwards", "jump")
"""Reasons of a correction, see above."""

MAX_WATTS = 4000.0
"""Upper bound of the power of a package, its memory, a module of packages or a GPU."""
MAX_INTERVAL_SECONDS = 600.0
"""Longest interval between two readings for which energy is computed."""
SLACK_JOULES = 1.0
"""Tolerance of the highest possible increase, for the resolution of the register and of the clock."""


class EnergyCounter:
    """Total of a register that wraps at `range_joules` (0: never).

    A decrease is a wrap if the resulting energy is possible at the maximum power. Otherwise the register restarted or is
    wrong.
    """

    def __init__(self, *, range_joules: float = 0.0, max_watts: float = MAX_WATTS) -> None:
        self.joules = 0.0  # since the first reading; never decreases
        self.watts: float | None = None  # mean power between the last two readings
        self.register_joules: float | None = None  # last reading
        self.time = 0.0  # monotonic time of the last reading
        self.corrections: dict[str, float] = dict.fromkeys(CORRECTION_REASONS, 0.0)
        self.range_joules = range_joules
        self._max_watts = max_watts

    def update(self, register_joules: float, time: float) -> float | None:
        """Add the energy since the last reading, and return the seconds in between.

        The last power determines how often the register has wrapped. Returns None and adds no energy for the first reading,
        after an interval longer than `MAX_INTERVAL_SECONDS`, and for a time before the last reading.
        """
        seconds = time - self.time
        if self.register_joules is None or seconds > MAX_INTERVAL_SECONDS or seconds < 0:
            self.register_joules, self.time, self.watts = register_joules, time, None
            return None
        if seconds == 0:
            return 0.0
        increase_joules = self._measure_increase(self.register_joules, register_joules, seconds)
        if increase_joules is None:
            self.joules += (self.watts or 0.0) * seconds
        else:
            self.joules += increase_joules
            self.watts = increase_joules / seconds
        self.register_joules, self.time = register_joules, time
        return seconds

    def forget(self) -> None:
        """Discard the last reading, and keep the total."""
        self.register_joules = None

    def _measure_increase(self, previous: float, current: float, seconds: float) -> float | None:
        """Return the energy between two values of the register, or None if the second value is implausible. Count the corrections.

        If the last power is known, further wraps are assumed, so that the power of the interval is nearest to the last power and at
        most the maximum power.
        """
        has_fallen = current < previous
        increase_joules = current - previous + (self.range_joules if has_fallen else 0.0)
        max_joules = self._max_watts * seconds + SLACK_JOULES
        if increase_joules > max_joules or increase_joules < 0:
            if not has_fallen:
                self.corrections["jump"] += 1
            else:
                self.corrections["reset" if current <= max_joules else "backwards"] += 1
            return None
        extra_wraps = 0
        if self.range_joules > 0 and self.watts is not None:
            expected_wraps = round((self.watts * seconds - increase_joules) / self.range_joules)
            max_wraps = int((max_joules - increase_joules) / self.range_joules)
            extra_wraps = max(0, min(expected_wraps, max_wraps))
        self.corrections["wrap"] += extra_wraps + (1 if has_fallen else 0)
        return increase_joules + extra_wraps * self.range_joules


@dataclass(frozen=True, slots=True)
class RegisterReading:
    """Reading of an energy register, valid within one boot of the machine."""

    joules: float
    time: float  # seconds of the monotonic clock
    watts: float | None = None  # mean power before the reading


def joules_between(earlier: RegisterReading, later: RegisterReading, *, range_joules: float) -> float | None:
    """Return the energy between two readings of one register, such as the last before and the first after a restart.

    Returns None if the interval is negative or longer than `MAX_INTERVAL_SECONDS`, or if the later value is implausible.
    """
    counter = EnergyCounter(range_joules=range_joules)
    counter.register_joules, counter.time, counter.watts = earlier.joules, earlier.time, earlier.watts
    seconds = counter.update(later.joules, later.time)
    is_estimated = any(counter.corrections[reason] for reason in ("reset", "backwards", "jump"))
    return None if seconds is None or is_estimated else counter.joules
