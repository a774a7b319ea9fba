"""Energy of each device since the last division among the runs.

The collectors correct wraps, resets and jumps of their counters, and this module adds the increments. After a restart of the
sidecar without a reboot, the energy continues from the saved value of the device's register.
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
"""Interval over which two energy counts of a device are compared."""
MIN_CROSSCHECK_RATIO = 0.9
"""Minimum share of `CROSSCHECK_SECONDS` that a comparison covers."""
MAX_MOMENTS = 600
"""Maximum number of stored moments of the comparison, enough for `CROSSCHECK_SECONDS` at a reading every half second."""


@dataclass(frozen=True, slots=True)
class DeviceKey:
    """Device with a source of energy readings."""

    component: str
    device: str
    source: str


@dataclass(frozen=True, slots=True)
class _CrosscheckMoment:
    """Energy of a device by its counter and by integrated power, at a monotonic time."""

    read_at: float
    joules: float
    power_joules: float


@dataclass(slots=True, eq=False)
class DeviceEnergy:
    """Energy of a device, from one source, that is not yet divided among the runs."""

    reading: EnergyReading  # the latest
    saved_record: DeviceRecord | None = None  # by the previous sidecar, in the same boot
    # energy that the previous sidecar had not divided, and energy of the time without a sidecar
    inherited_joules: float = 0.0
    pending_joules: float = 0.0  # undivided energy that this sidecar has read
    idle: IdlePower = field(default_factory=IdlePower)
    gap_joules: dict[str, float] = field(default_factory=dict)  # attributed to no run, by reason
    _initial_inherited_joules: float = 0.0
    _joules: float | None = None  # of the last reading with a value
    _read_at: float = 0.0  # monotonic time of that reading
    _moments: deque[_CrosscheckMoment] = field(default_factory=lambda: deque(maxlen=MAX_MOMENTS))

    def mark_divided(self, waiting_joules: float = 0.0) -> None:
        """Mark the energy as divided, except for *waiting_joules*."""
        self.pending_joules, self.inherited_joules = waiting_joules, 0.0

    def take_inherited_joules(self, ratio: float) -> float:
        """Remove and return a share of the inherited energy, or the remainder if the remainder is smaller."""
        joules = min(self.inherited_joules, self._initial_inherited_joules * ratio)
        self.inherited_joules -= joules
        return joules

    def add(self, reading: EnergyReading, *, is_working: bool | None) -> None:
        """Add the energy since the last reading; *is_working* is None if the activity of the device is unknown."""
        self.reading = reading
        if reading.joules is None:
            return
        if self._joules is None:
            self.inherited_joules = self._initial_inherited_joules = self._joules_since_save(reading)
            if reading.history:
                self.pending_joules += reading.joules - reading.history[0].joules
        elif reading.time > self._read_at:
            increment_joules = reading.joules - self._joules
            if increment_joules < 0:  # the collector restarted at 0
                increment_joules = reading.joules
            self.pending_joules += increment_joules
            self.idle.record(increment_joules / (reading.time - self._read_at), is_working=is_working)
        self._joules, self._read_at = reading.joules, reading.time
        self._record_crosscheck(reading, reading.joules)

    def add_gap(self, reason: str, joules: float) -> None:
        """Add energy that was attributed to no run."""
        self.gap_joules[reason] = self.gap_joules.get(reason, 0.0) + joules

    def _joules_since_save(self, reading: EnergyReading) -> float:
        """Return the undivided energy of the saved record, plus the energy from the record to the first reading."""
        saved_record = self.saved_record
        if saved_record is None:
            return 0.0
        joules: float | None = None
        if saved_record.register_joules is not None and reading.register_joules is not None:
            saved_register = RegisterReading(
                saved_record.register_joules, saved_record.read_at, saved_record.watts
            )
            # The energy of the history is pending, so the register at the start of the history is used.
            history_joules, register_time = 0.0, reading.time
            if reading.history and reading.joules is not None:
                history_joules = reading.joules - reading.history[0].joules
                register_time = reading.history[0].time
            first_register = RegisterReading(reading.register_joules - history_joules, register_time)
            joules = joules_between(saved_register, first_register, range_joules=reading.range_joules)
        return saved_record.pending_joules + (joules or 0.0)

    def _record_crosscheck(self, reading: EnergyReading, joules: float) -> None:
        """Store the energy by both counts. The comparison restarts if a count has decreased or the power is unknown."""
        moments, power_joules = self._moments, reading.power_joules
        if power_joules is None:
            moments.clear()
            return
        has_decreased = bool(moments) and (
            power_joules < moments[-1].power_joules or joules < moments[-1].joules
        )
        if has_decreased:  # a count restarted
            moments.clear()
        if not moments or moments[-1].read_at != reading.time:
            moments.append(_CrosscheckMoment(reading.time, joules, power_joules))
            while reading.time - moments[0].read_at > CROSSCHECK_SECONDS:
                moments.popleft()

    def crosscheck(self) -> float | None:
        """Return the counter's energy divided by the integral of power.

        Returns None until the stored moments span most of `CROSSCHECK_SECONDS` (`MIN_CROSSCHECK_RATIO`), and for a device without power.
        """
        if not self._moments:
            return None
        first, last = self._moments[0], self._moments[-1]
        power_joules = last.power_joules - first.power_joules
        if last.read_at - first.read_at < MIN_CROSSCHECK_RATIO * CROSSCHECK_SECONDS or power_joules <= 0:
            return None
        return (last.joules - first.joules) / power_joules

    def record(self) -> DeviceRecord:
        """Return the state to be saved."""
        reading, saved_record = self.reading, self.saved_record
        pending_joules = self.pending_joules + self.inherited_joules
        if self._joules is None and saved_record is not None:
            return saved_record
        return DeviceRecord(
            reading.component,
            reading.device,
            reading.source,
            register_joules=reading.register_joules,
            read_at=reading.time,
            watts=reading.watts,
            pending_joules=pending_joules,
        )


class EnergyDevices:
    """Energy of all devices of the machine. Iteration yields the devices of the last update, in the order of the readings."""

    def __init__(self, boot: str) -> None:
        self.passed_at: float | None = None  # monotonic time of the last update, in this boot
        self._boot = boot
        self._devices: dict[DeviceKey, DeviceEnergy] = {}
        self._saved_records: dict[DeviceKey, DeviceRecord] = {}
        self._current_devices: list[DeviceEnergy] = []

    def __iter__(self) -> Iterator[DeviceEnergy]:
        return iter(self._current_devices)

    def update(
        self, readings: Sequence[EnergyReading], now: float, *, is_working: Callable[[str], bool | None]
    ) -> None:
        """Add the readings of a pass; *is_working* returns None for a device whose activity is unknown."""
        self._current_devices = []
        for reading in readings:
            key = DeviceKey(reading.component, reading.device, reading.source)
            device = self._devices.get(key)
            if device is None:
                device = self._devices[key] = DeviceEnergy(reading, self._saved_records.get(key))
            device.add(reading, is_working=is_working(reading.device))
            self._current_devices.append(device)
        self.passed_at = now

    def resume(self, record: DevicesRecord) -> None:
        """Continue from a saved record, before the first update. A record of an earlier boot is ignored."""
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
        """Return the state to be saved, including devices without a current reading, because they may return."""
        records = {**self._saved_records, **{key: device.record() for key, device in self._devices.items()}}
        return DevicesRecord(self._boot, self.passed_at, tuple(records.values()))
