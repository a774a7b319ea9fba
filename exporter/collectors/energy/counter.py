"""Energy of one device: a register that wraps, is reset, steps back and jumps, and what it draws without work.

Corrections are counted by reason: `wrap` (nothing is lost), `reset` (it began anew elsewhere than at its range),
`backwards` and `jump` (no device can have used that). Then the time is taken at the last known power.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

REASONS = ("wrap", "reset", "backwards", "jump")

MAX_WATTS = 4000.0
"""More than any device draws: a package, its memory, a module of them, a GPU."""
LONGEST_SECONDS = 600.0
"""What happened in a longer time is not guessed."""
SLACK_JOULES = 1.0
"""By how much two looks at a register may differ from what the clock says."""


class EnergyCounter:
    """One register, which wraps at its range, 0 for never; a fall is a wrap when the device can have used so much."""

    def __init__(self, *, range_joules: float = 0.0, max_watts: float = MAX_WATTS) -> None:
        self.joules = 0.0  # used since counting began; never falls
        self.watts: float | None = None  # mean power between the last two readings
        self.resets: dict[str, float] = dict.fromkeys(REASONS, 0.0)
        self._range = range_joules
        self._max_watts = max_watts
        self._register: float | None = None
        self._at = 0.0

    def update(self, register: float, at: float) -> float | None:
        """Take a reading of joules at a monotonic time; more than one wrap since the last is found by its power.

        It returns the seconds that it has told about; None for a first one, and after too long a time.
        """
        seconds = at - self._at
        if self._register is None or seconds > LONGEST_SECONDS or seconds < 0:
            self._register, self._at, self.watts = register, at, None
            return None
        if seconds == 0:
            return 0.0
        grown = self._grown(register - self._register, register, seconds)
        if grown is None:
            self.joules += (self.watts or 0.0) * seconds
        else:
            self.joules += grown
            self.watts = grown / seconds
        self._register, self._at = register, at
        return seconds

    def forget(self) -> None:
        """Begin anew with the next reading; the total stays."""
        self._register = None

    def _grown(self, step: float, register: float, seconds: float) -> float | None:
        """Tell how much was used since the last reading; None when the register does not know."""
        wrapped = step < 0
        grown = step + self._range if wrapped else step
        limit = self._max_watts * seconds + SLACK_JOULES
        if grown > limit or grown < 0:
            if not wrapped:
                self.resets["jump"] += 1
            else:
                self.resets["reset" if register <= limit else "backwards"] += 1
            return None
        more = 0
        if self._range > 0 and self.watts is not None:
            expected = round((self.watts * seconds - grown) / self._range)
            more = max(0, min(expected, int((limit - grown) / self._range)))
        self.resets["wrap"] += wrapped + more
        return grown + more * self._range

    def row(self) -> tuple[float | None, ...]:
        """Write the total and its corrections, for a page."""
        return self.joules, *self.resets.values()

    def mark(self) -> tuple[float | None, ...]:
        """Write where the register was; only good in the same boot of the machine."""
        return self._register, self._at, self.watts

    def resume(self, row: Sequence[float | None], mark: Sequence[float | None] = ()) -> None:
        """Go on from what `row`, and in the same boot `mark`, have written; what was counted since is added."""
        joules, *counts = (value or 0.0 for value in row)
        self.joules += joules
        for reason, count in zip(REASONS, counts, strict=False):
            self.resets[reason] += count
        if self._register is None and len(mark) >= 3 and mark[0] is not None and mark[1] is not None:
            self._register, self._at, self.watts = mark[0], mark[1], mark[2]


IDLE_METHODS = ("config", "before_start", "min_seen")
IDLE_SAMPLES = 720
"""Passes without a job that are remembered: an hour at the usual interval."""
ENOUGH_IDLE_SAMPLES = 10
IDLE_PERCENTILE = 0.1
RESTS_RATIO = 2.0


class IdlePower:
    """What a device draws without work, by the ways in which that can be known, the best first.

    `config`: somebody measured it and said so; `before_start`: the tenth percentile while no process of any run was
    alive; `min_seen`: the least that was ever seen, once the most was twice as much: before, the device may never have rested.
    """

    def __init__(self, configured_watts: float | None = None) -> None:
        self._configured = configured_watts
        self._before: float | None = None
        self._least: float | None = None
        self._most = 0.0
        self._samples: deque[float] = deque(maxlen=IDLE_SAMPLES)

    def note(self, watts: float, *, working: bool | None) -> None:
        """Take the mean power of one interval, and whether a job was running, None when that is not known."""
        self._least = watts if self._least is None else min(self._least, watts)
        self._most = max(self._most, watts)
        if working is False:
            self._samples.append(watts)
            if len(self._samples) >= ENOUGH_IDLE_SAMPLES:
                self._before = sorted(self._samples)[int(IDLE_PERCENTILE * len(self._samples))]

    def by_method(self) -> dict[str, float]:
        """Give what is known, the best first."""
        rested = self._least is not None and self._most >= RESTS_RATIO * self._least
        values = (self._configured, self._before, self._least if rested else None)
        return {
            method: value for method, value in zip(IDLE_METHODS, values, strict=True) if value is not None
        }

    def best(self) -> float | None:
        """Give the value of the best method there is."""
        return next(iter(self.by_method().values()), None)

    def row(self) -> tuple[float | None, ...]:
        """Write what was seen, for a page."""
        return self._before, self._least, self._most

    def resume(self, row: Sequence[float | None]) -> None:
        """Go on from what `row` has written, where nothing was seen yet."""
        before, least, most = (*row, None, None, None)[:3]
        self._most = max(self._most, most or 0.0)
        self._before = before if self._before is None else self._before
        self._least = least if self._least is None else self._least
