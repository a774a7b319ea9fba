"""Devices: the energy that every device has used since it was last divided among the runs; arithmetic and rows.

Rows of a page:

("total", component, device, source)    as EnergyCounter.row
("mark", boot, component, device, source)    as EnergyCounter.mark
("idle", component, device, source)     as IdlePower.row
("pending", boot, component, device, source)    joules that are not divided
("pass", boot)                          monotonic time of the last pass
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from exporter.collectors.energy.counter import EnergyCounter
from exporter.collectors.energy.idle_power import IdlePower
from exporter.collectors.job import EnergyReading, Rows

CROSSCHECK_SECONDS = 300.0
MOST_MOMENTS = 600


@dataclass(slots=True, eq=False)
class Device:
    """One device, by one source; energy is in joules since the last division."""

    reading: EnergyReading  # the last one
    counter: EnergyCounter = field(default_factory=EnergyCounter)
    bridged: float = 0.0  # used while no sidecar ran
    pending: float = 0.0  # used since
    seen: bool = False  # its total was read in this life of the sidecar
    # time, joules, integral of power
    moments: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=MOST_MOMENTS))
    idle: IdlePower = field(default_factory=IdlePower)

    def settle(self, waiting: float = 0.0) -> None:
        """Forget what was pending, except for so much: it is divided, or was nobody's."""
        self.pending, self.bridged = waiting, 0.0

    def take(self, reading: EnergyReading, working: bool | None) -> None:
        """Count a reading; `working` tells whether somebody works on the device, None where that is not known."""
        self.reading = reading
        if reading.joules is None:
            return
        seen, self.seen = self.seen, True
        if reading.at == self.counter.mark()[1]:
            return
        before = self.counter.joules
        if reading.register_joules is None:
            self.counter.update(reading.joules, reading.at)
        else:  # the raw counter continues while no sidecar runs
            self.counter.range_joules = reading.range_joules
            self.counter.update(reading.register_joules, reading.at)
        grown = self.counter.joules - before
        if not seen:
            self.bridged += grown
        else:
            self.pending += grown
            if self.counter.watts is not None:
                self.idle.note(self.counter.watts, working=working)
        moments, power = self.moments, reading.power_joules
        if power is None or (moments and (power < moments[-1][2] or reading.joules < moments[-1][1])):
            moments.clear()
        if power is not None:
            moments.append((reading.at, reading.joules, power))
            while reading.at - moments[0][0] > CROSSCHECK_SECONDS:
                moments.popleft()

    def crosscheck(self) -> float | None:
        """Energy by counter over energy by power; None before there is enough of both."""
        if not self.moments:
            return None
        (first, joules, power), (last, later, more) = self.moments[0], self.moments[-1]
        if last - first < 0.9 * CROSSCHECK_SECONDS or more <= power:
            return None
        return (later - joules) / (more - power)


class Devices:
    """All devices of the machine in this boot; those that are present, in order."""

    def __init__(self, boot: str) -> None:
        self.passed_at: float | None = None  # monotonic time of the last pass, in this boot
        self._boot = boot
        self._devices: dict[tuple[str, ...], Device] = {}  # by component, device, source
        self._rows: Rows = {}
        self._present: list[Device] = []

    def __iter__(self) -> Iterator[Device]:
        return iter(self._present)

    def update(
        self, readings: Sequence[EnergyReading], now: float, *, working: Callable[[str], bool | None]
    ) -> None:
        """Take the readings of one pass; `working` tells whether somebody works on a device, None if unknown."""
        self._present = []
        for reading in readings:
            key = (reading.component, reading.device, reading.source)
            device = self._devices.get(key)
            if device is None:
                device = self._devices[key] = Device(reading)
                device.idle.resume(self._rows.get(("idle", *key), ()))
                if total := self._rows.get(("total", *key)):
                    device.counter.resume(total, self._rows.get(("mark", self._boot, *key), ()))
                    device.bridged = self._rows.get(("pending", self._boot, *key), (0.0,))[0] or 0.0
            device.take(reading, working(reading.device))
            self._present.append(device)
        self.passed_at = now

    def resume(self, rows: Rows) -> None:
        """Go on from what was written; to be called before any device has appeared."""
        self._rows = rows
        (self.passed_at,) = rows.get(("pass", self._boot), (None,))

    def settle(self) -> None:
        """Forget what was pending: it is divided, or was nobody's."""
        for device in self._devices.values():
            device.settle()

    def rows(self) -> Rows:
        """Write everything."""
        # Devices that are not there at the moment may come back.
        rows: Rows = {name: values for name, values in self._rows.items() if name[0] in {"total", "idle"}}
        for key, device in self._devices.items():
            rows |= {
                ("total", *key): device.counter.row(),
                ("mark", self._boot, *key): device.counter.mark(),
                ("idle", *key): device.idle.row(),
            }
            if device.pending + device.bridged > 0:
                rows |= {("pending", self._boot, *key): (device.pending + device.bridged,)}
        if self.passed_at is not None:
            rows["pass", self._boot] = (self.passed_at,)
        return rows
