"""The two clocks that the NVML child can run on: the machine's, and one that runs as fast as the program does.

Used in the NVML child, and by the replay's library in it. The virtual one makes a replay give the same messages at
any speed of the machine.
"""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Clock(Protocol):
        """What both have."""

        def now(self) -> float:
            """Monotonic seconds."""

        def wall(self) -> float:
            """Unix seconds."""

        def delay(self, seconds: float) -> None:
            """Let time go by, as a call does that takes long."""


VIRTUAL_EPOCH = 1_700_000_000.0
"""Unix time at which a virtual clock starts."""


class RealClock:
    """The machine's."""

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def wall(self) -> float:
        """Unix seconds."""
        return time.time()

    def delay(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)


class VirtualClock:
    """One that stands still unless it is told to go on; starts at 0."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Monotonic seconds."""
        return self._now

    def wall(self) -> float:
        """Unix seconds."""
        return VIRTUAL_EPOCH + self._now

    def delay(self, seconds: float) -> None:
        """Go on by so much."""
        self._now += seconds
