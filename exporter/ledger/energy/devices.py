"""Energy of every device since the last division among the runs.

The collectors correct wraps, resets and jumps of their counters; this module adds the increments. After a restart of the
sidecar within the same boot, the energy continues from the saved raw register.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from exporter.collectors.energy.counter import RegisterReading, joules_between
from exporter.collectors.energy.idle_power import IdlePower
from exporter.collectors.job import EnergyReading
from exporter.ledger.energy.records import DeviceRecord, DevicesRecord

CROSSCHECK_SECONDS = 300.0
MAX_MOMENTS = 600


@dataclass(frozen=True, slots=True)
class DeviceKey:
    """Device with a source of energy readings."""

    component: str
    device: str
    source: str


@dataclass(frozen=True, slots=True)
class _CrosscheckMoment:
    """Two independent energy counts of a device at a monotonic time."""

    read_at: float
    joules: float
    power_joules: float


@dataclass(slots=True, eq=False)
class DeviceEnergy:
    """Energy of a device from a source, in joules since the last division."""

    reading: EnergyReading  # the latest
    saved_record: DeviceRecord | None = None  # by the previous sidecar, in the same boot
    bridged_joules: float = 0.0  # used without a running sidecar
    pending_joules: float = 0.0  # since the last division
    idle: IdlePower = field(default_factory=IdlePower)
    gaps: dict[str, float] = field(default_factory=dict)  # joules attributed to no run, by reason
    _joules: float | None = None  # of the last reading with a value
    _read_at: float = 0.0
    _moments: deque[_CrosscheckMoment] = field(default_factory=lambda: deque(maxlen=MAX_MOMENTS))

    def mark_divided(self, waiting_joules: float = 0.0) -> None:
        """Mark the energy as divided, except for *waiting_joules*."""
        self.pending_joules, self.bridged_joules = waiting_joules, 0.0

    def add(self, reading: EnergyReading, working: bool | None) -> None:
        """Add the energy since the last reading; *working* is None if the activity of the device is unknown."""
        self.reading = reading
        if reading.joules is None:
            return
        if self._joules is None:
            self.bridged_joules += self._since_restart(reading)
            if reading.history:
                self.pending_joules += reading.joules - reading.history[0].joules
        elif reading.time > self._read_at:
            increment_joules = reading.joules - self._joules
            if increment_joules < 0:  # the collector restarted at 0
                increment_joules = reading.joules
            self.pending_joules += increment_joules
            self.idle.record(increment_joules / (reading.time - self._read_at), is_working=working)
        self._joules, self._read_at = reading.joules, reading.time
        self._note_crosscheck(reading, reading.joules)

    def add_gap(self, reason: str, joules: float) -> None:
        """Add energy that was attributed to no run."""
        self.gaps[reason] = self.gaps.get(reason, 0.0) + joules

    def _since_restart(self, reading: EnergyReading) -> float:
        saved_record = self.saved_record
        if saved_record is None:
            return 0.0
        joules: float | None = None
        if saved_record.register_joules is not None and reading.register_joules is not None:
            saved_mark = RegisterReading(
                saved_record.register_joules, saved_record.read_at, saved_record.watts
            )
            # The energy of the history is divided as usual, so the register at the start of the history is used.
            history_joules, mark_at = 0.0, reading.time
            if reading.history and reading.joules is not None:
                history_joules, mark_at = reading.joules - reading.history[0].joules, reading.history[0].time
            mark = RegisterReading(reading.register_joules - history_joules, mark_at)
            joules = joules_between(saved_mark, mark, range_joules=reading.range_joules)
        return saved_record.pending_joules + (joules or 0.0)

    def _note_crosscheck(self, reading: EnergyReading, joules: float) -> None:
        moments, power = self._moments, reading.power_joules
        if power is None or (moments and (power < moments[-1].power_joules or joules < moments[-1].joules)):
            moments.clear()
        if power is not None and not (moments and moments[-1].read_at == reading.time):
            moments.append(_CrosscheckMoment(reading.time, joules, power))
            while reading.time - moments[0].read_at > CROSSCHECK_SECONDS:
                moments.popleft()

    def crosscheck(self) -> float | None:
        """Return the counter's energy divided by the integral of power, or None before both cover `CROSSCHECK_SECONDS`."""
        if not self._moments:
            return None
        first, last = self._moments[0], self._moments[-1]
        power = last.power_joules - first.power_joules
        if last.read_at - first.read_at < 0.9 * CROSSCHECK_SECONDS or power <= 0:
            return None
        return (last.joules - first.joules) / power

    def record(self) -> DeviceRecord:
        """Return the state to be saved."""
        reading, saved_record = self.reading, self.saved_record
        pending_joules = self.pending_joules + self.bridged_joules
        if self._joules is None and saved_record is not None:
            return saved_record
        return DeviceRecord(
            reading.component,
            reading.device,
            reading.source,
            reading.register_joules,
            reading.time,
            reading.watts,
            pending_joules,
        )


class EnergyDevices:
    """Energy of all devices of the machine. Iteration yields the present devices in order."""

    def __init__(self, boot: str) -> None:
        self.passed_at: float | None = None  # monotonic time of the last pass, in this boot
        self._boot = boot
        self._devices: dict[DeviceKey, DeviceEnergy] = {}
        self._saved_records: dict[DeviceKey, DeviceRecord] = {}
        self._present_devices: list[DeviceEnergy] = []

    def __iter__(self) -> Iterator[DeviceEnergy]:
        return iter(self._present_devices)

    def update(
        self, readings: Sequence[EnergyReading], now: float, *, working: Callable[[str], bool | None]
    ) -> None:
        """Add the readings of a pass; *working* returns whether a device is in use, None if unknown."""
        self._present_devices = []
        for reading in readings:
            key = DeviceKey(reading.component, reading.device, reading.source)
            device = self._devices.get(key)
            if device is None:
                device = self._devices[key] = DeviceEnergy(reading, self._saved_records.get(key))
            device.add(reading, working(reading.device))
            self._present_devices.append(device)
        self.passed_at = now

    def resume(self, record: DevicesRecord) -> None:
        """Continue from a saved record of the same boot, before the first update."""
        if record.boot == self._boot:
            self.passed_at = record.passed_at
            self._saved_records = {
                DeviceKey(device.component, device.device, device.source): device for device in record.devices
            }

    def mark_divided(self) -> None:
        """Mark all energy as divided."""
        for device in self._devices.values():
            device.mark_divided()

    def record(self) -> DevicesRecord:
        """Return the state to be saved. Absent devices are included, because they may return."""
        records = {**self._saved_records, **{key: device.record() for key, device in self._devices.items()}}
        return DevicesRecord(self._boot, self.passed_at, tuple(records.values()))
