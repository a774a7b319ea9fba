"""Energy of a device from a register that wraps, is reset, steps back or jumps.

Corrections are counted by reason: `wrap` (no energy is lost), `reset` (the register restarted below the range),
`backwards` and `jump` (no device can use that much). After the last three, the energy of an interval is the last known
power times the length of the interval.
"""

from __future__ import annotations

from dataclasses import dataclass

REASONS = ("wrap", "reset", "backwards", "jump")

MAX_WATTS = 4000.0
"""Upper bound of the power of a package, its memory, a module of packages or a GPU."""
LONGEST_SECONDS = 600.0
"""Longest interval between two readings for which energy is computed."""
SLACK_JOULES = 1.0
"""Tolerance between a register and the clock."""


class EnergyCounter:
    """Energy counted by a register that wraps at a range (0: never).

    A fall of the register is a wrap if the device can have used the energy up to the range.
    """

    def __init__(self, *, range_joules: float = 0.0, max_watts: float = MAX_WATTS) -> None:
        self.joules = 0.0  # since counting began; never falls
        self.watts: float | None = None  # mean power between the last two readings
        self.register: float | None = None  # last reading
        self.at = 0.0  # monotonic time of the last reading
        self.resets: dict[str, float] = dict.fromkeys(REASONS, 0.0)
        self.range_joules = range_joules
        self._max_watts = max_watts

    def update(self, register: float, at: float) -> float | None:
        """Add the energy since the last reading and return the seconds in between.

        The last power determines the number of wraps of the register. Returns None for the first reading and after a longer pause
        than `LONGEST_SECONDS`, when no energy is added.
        """
        seconds = at - self.at
        if self.register is None or seconds > LONGEST_SECONDS or seconds < 0:
            self.register, self.at, self.watts = register, at, None
            return None
        if seconds == 0:
            return 0.0
        grown = self._grown(register - self.register, register, seconds)
        if grown is None:
            self.joules += (self.watts or 0.0) * seconds
        else:
            self.joules += grown
            self.watts = grown / seconds
        self.register, self.at = register, at
        return seconds

    def forget(self) -> None:
        """Discard the last reading; the total remains."""
        self.register = None

    def _grown(self, step: float, register: float, seconds: float) -> float | None:
        """Return the energy since the last reading; None if the register cannot be right."""
        wrapped = step < 0
        grown = step + self.range_joules if wrapped else step
        limit = self._max_watts * seconds + SLACK_JOULES
        if grown > limit or grown < 0:
            if not wrapped:
                self.resets["jump"] += 1
            else:
                self.resets["reset" if register <= limit else "backwards"] += 1
            return None
        more = 0
        if self.range_joules > 0 and self.watts is not None:
            expected = round((self.watts * seconds - grown) / self.range_joules)
            more = max(0, min(expected, int((limit - grown) / self.range_joules)))
        self.resets["wrap"] += wrapped + more
        return grown + more * self.range_joules


@dataclass(frozen=True, slots=True)
class RegisterMark:
    """Reading of an energy register, valid within one boot of the machine."""

    joules: float
    at: float  # monotonic seconds
    watts: float | None = None  # mean power before the reading


def joules_between(earlier: RegisterMark, later: RegisterMark, *, range_joules: float) -> float | None:
    """Return the energy between two readings of one register, such as the last before and the first after a restart.

    Returns None after more than `LONGEST_SECONDS` and if the register cannot be right.
    """
    counter = EnergyCounter(range_joules=range_joules)
    counter.register, counter.at, counter.watts = earlier.joules, earlier.at, earlier.watts
    counted = counter.update(later.joules, later.at)
    bridged = any(counter.resets[reason] for reason in ("reset", "backwards", "jump"))
    return None if counted is None or bridged else counter.joules
