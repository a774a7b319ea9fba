"""TdpModel: a guess at the energy of the CPUs, for machines on which it cannot be measured.

Used in the sidecar by the RAPL collector, only where the configuration asks for it; published with
source="tdp_model" and measured="false". /proc/stat comes in, read by psutil. No threads.

    P = TDP (0.1 + 0.9 load³)

The form is the one that codecarbon uses for whole machines; against wall meters such models are wrong by up to
40 %. Source: arXiv 2509.22092.
"""

from __future__ import annotations

from collections.abc import Sequence

import psutil

from exporter.collectors.energy.counter import LONGEST_SECONDS
from exporter.collectors.host.cpu import busy_seconds
from exporter.collectors.job import EnergyReading

IDLE_SHARE = 0.1
EXPONENT = 3

SOURCE = "tdp_model"
DEVICE = "machine"
PACKAGE = "all"


class TdpModel:
    """The model of all packages together.

    Args:
        tdp_watts: The sum of the packages' thermal design power.

    Attributes:
        resumed: Whether an earlier total was looked for.
    """

    def __init__(self, tdp_watts: float) -> None:
        self.resumed = False
        self._tdp_watts = tdp_watts
        self._joules = 0.0
        self._watts: float | None = None
        self._before: tuple[float, float] | None = None  # monotonic time, busy seconds

    def update(self, now: float) -> None:
        """Add the time since the last update; the first one, and one after a long pause, only begin.

        Raises:
            OSError: The load cannot be read.
        """
        busy = busy_seconds()
        before, self._before = self._before, (now, busy)
        if before is None or not 0 < now - before[0] <= LONGEST_SECONDS:
            self._watts = None
            return
        seconds = now - before[0]
        load = min(1.0, max(0.0, (busy - before[1]) / (seconds * (psutil.cpu_count() or 1))))
        self._watts = self._tdp_watts * (IDLE_SHARE + (1 - IDLE_SHARE) * load**EXPONENT)
        self._joules += self._watts * seconds

    def reading(self, now: float) -> EnergyReading:
        """Give the total."""
        return EnergyReading(
            component="cpu",
            device=DEVICE,
            source=SOURCE,
            measured=False,
            joules=self._joules,
            watts=self._watts,
            at=now,
            idle_watts=self._tdp_watts * IDLE_SHARE,
            name=f"{self._tdp_watts:g} W TDP",
            index=PACKAGE,
        )

    def row(self) -> tuple[float | None, ...]:
        """Write the total, for a page."""
        return (self._joules,)

    def resume(self, row: Sequence[float | None]) -> None:
        """Go on from what `row` has written."""
        self.resumed = True
        self._joules += (row[0] or 0.0) if row else 0.0
