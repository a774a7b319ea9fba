"""Devices: the energy that every device has used since it was last divided among the runs.

Runs in the sidecar, on the energy ledger's thread; arithmetic and rows, no I/O. Readings come in, whose totals may
begin anew, fall or jump (see `EnergyCounter`, which sees to that here as it does at the registers); what is to be
divided goes out, and what the exporter tells of its own measuring.

What was used while no sidecar ran is kept apart: it belongs to runs that lived before and after, not to one that
has started since.

    ("total", component, device, source)    as EnergyCounter.row
    ("mark", boot, component, device, source)    as EnergyCounter.mark
    ("idle", component, device, source)     as IdlePower.row
    ("gap", component, device, reason)      seconds
    ("reset", device, reason)               corrections
    ("pass", boot)                          monotonic time of the last pass
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from exporter.collectors.energy.counter import LONGEST_SECONDS, EnergyCounter
from exporter.collectors.energy.idle import IdlePower
from exporter.collectors.job import EnergyReading
from exporter.collectors.keeping import Rows

MAX_WATTS = 4000.0
"""More than any device draws; a total that grows faster has jumped."""
CROSSCHECK_SECONDS = 300.0

Key = tuple[str, str, str]
"""Component, device, source."""


@dataclass(slots=True, eq=False)
class Device:
    """One device, by one source.

    Attributes:
        reading: The last one.
        counter: Follows its total.
        bridged: Joules used while no sidecar ran.
        pending: Joules used since the last division, without those.
        seen: Whether its total was read in this life of the sidecar.
        told: Gaps and resets as the reading last had them.
        history: Time, joules and integral of power, for the cross-check.
        idle: What it draws without work.
    """

    reading: EnergyReading
    counter: EnergyCounter = field(
        default_factory=lambda: EnergyCounter(range_joules=0.0, max_watts=MAX_WATTS)
    )
    bridged: float = 0.0
    pending: float = 0.0
    seen: bool = False
    told: dict[tuple[str, ...], float] = field(default_factory=dict)
    history: deque[tuple[float, float, float]] = field(default_factory=deque)
    idle: IdlePower = field(default_factory=IdlePower)

    def settle(self) -> None:
        """Forget what was pending: it is divided, or was nobody's."""
        self.pending = self.bridged = 0.0

    def crosscheck(self) -> float | None:
        """Energy by counter over energy by power; None before there is enough of both."""
        if not self.history:
            return None
        (first, joules, power), (last, later, more) = self.history[0], self.history[-1]
        if last - first < 0.9 * CROSSCHECK_SECONDS or more <= power:
            return None
        return (later - joules) / (more - power)


class Devices:
    """All devices.

    Args:
        boot: Of the machine.

    Attributes:
        passed_at: Monotonic time of the last pass, in this boot; None before one.
        gaps: Time without a reading by component, device and reason.
        resets: Corrections by device and reason.
    """

    def __init__(self, boot: str) -> None:
        self.passed_at: float | None = None
        self.gaps: dict[tuple[str, ...], float] = {}
        self.resets: dict[tuple[str, ...], float] = {}
        self._boot = boot
        self._devices: dict[Key, Device] = {}
        self._rows: Rows = {}
        self._present: tuple[Device, ...] = ()
        self._began: float | None = None
        self._measured: dict[str, float] = {}

    def __iter__(self) -> Iterator[Device]:
        return iter(self._present)

    def update(
        self, readings: Sequence[EnergyReading], now: float, *, working: Callable[[str], bool | None]
    ) -> None:
        """Take the readings of one pass.

        Args:
            readings: Of all devices.
            now: Monotonic time.
            working: Tells whether somebody works on a device; None where that is not known.
        """
        first = self._began is None
        self._began = now if self._began is None else self._began
        elapsed = 0.0 if first or self.passed_at is None else max(0.0, now - self.passed_at)
        present: list[Device] = []
        for reading in readings:
            key = (reading.component, reading.device, reading.source)
            device = self._devices.get(key)
            if device is None:
                device = self._devices[key] = Device(reading)
                self._resume(key, device)
            device.reading = reading
            present.append(device)
            if reading.joules is None:
                self._take_corrections(device)
                continue
            before = device.counter.joules
            new = reading.at != device.counter.mark()[1]
            device.counter.update(reading.joules, reading.at)
            grown = device.counter.joules - before
            if device.seen:
                device.pending += grown
            else:
                device.bridged += grown
            if device.seen and new and device.counter.watts is not None:
                device.idle.note(device.counter.watts, working=working(reading.device))
            device.seen = True
            self._take_corrections(device)
            if new:
                _remember(device)
        self._present = tuple(present)
        self._note_coverage(elapsed)
        self.passed_at = now

    def resume(self, rows: Rows) -> None:
        """Go on from what was written; to be called once, before or after devices have appeared."""
        self._rows = rows
        for key, device in self._devices.items():
            self._resume(key, device)
        for name, values in rows.items():
            value = (values[0] if values else None) or 0.0
            if name[0] == "gap" and len(name) == 4:
                gap = (name[1], name[2], name[3])
                self.gaps[gap] = self.gaps.get(gap, 0.0) + value
            elif name[0] == "reset" and len(name) == 3:
                reset = (name[1], name[2])
                self.resets[reset] = self.resets.get(reset, 0.0) + value
            elif name == ("pass", self._boot) and self.passed_at is None:
                self.passed_at = value

    def coverage(self, now: float) -> Mapping[str, float]:
        """Give the measured share of the time since counting began, by component."""
        uptime = 0.0 if self._began is None else now - self._began
        if uptime <= 0:
            return {}
        components = {device.reading.component for device in self._present}
        return {component: min(1.0, self._measured.get(component, 0.0) / uptime) for component in components}

    def settle(self) -> None:
        """Forget what was pending: it is divided, or was nobody's."""
        for device in self._devices.values():
            device.settle()

    def rows(self) -> Rows:
        """Write everything."""
        # Devices that are not there at the moment may come back.
        rows: Rows = {name: values for name, values in self._rows.items() if name[0] in {"total", "idle"}}
        for (component, name, source), device in self._devices.items():
            rows["total", component, name, source] = device.counter.row()
            rows["mark", self._boot, component, name, source] = device.counter.mark()
            rows["idle", component, name, source] = device.idle.row()
        rows.update({("gap", *gap): (seconds,) for gap, seconds in self.gaps.items()})
        rows.update({("reset", *reset): (count,) for reset, count in self.resets.items()})
        if self.passed_at is not None:
            rows["pass", self._boot] = (self.passed_at,)
        return rows

    def _resume(self, key: Key, device: Device) -> None:
        device.idle.resume(self._rows.get(("idle", *key), ()))
        total = self._rows.get(("total", *key))
        if total:
            device.counter.resume(total, self._rows.get(("mark", self._boot, *key), ()))

    def _take_corrections(self, device: Device) -> None:
        """Add up what the collector says of gaps and resets; its numbers may begin anew."""
        reading = device.reading
        corrections = {("gap", reason): value for reason, value in reading.gap_seconds.items()}
        corrections |= {("reset", reason): value for reason, value in reading.resets.items()}
        corrections |= {("own", reason): value for reason, value in device.counter.resets.items()}
        for (kind, reason), value in corrections.items():
            before = device.told.get((kind, reason))
            device.told[kind, reason] = value
            grown = 0.0 if before is None else value - before if value >= before else value
            if kind == "gap":
                gap = (reading.component, reading.device, reason)
                self.gaps[gap] = self.gaps.get(gap, 0.0) + grown
            else:
                reset = (reading.device, reason)
                self.resets[reset] = self.resets.get(reset, 0.0) + grown

    def _note_coverage(self, elapsed: float) -> None:
        components: dict[str, list[bool]] = {}
        for device in self._present:
            measured = device.reading.measured and device.reading.joules is not None
            components.setdefault(device.reading.component, []).append(measured)
        for component, measured_devices in components.items():
            share = sum(measured_devices) / len(measured_devices)
            self._measured[component] = self._measured.get(component, 0.0) + elapsed * share


def _remember(device: Device) -> None:
    reading, history = device.reading, device.history
    if reading.power_joules is None or reading.joules is None:
        history.clear()
        return
    if history and (reading.power_joules < history[-1][2] or reading.joules < history[-1][1]):
        history.clear()
    history.append((reading.at, reading.joules, reading.power_joules))
    while history[-1][0] - history[0][0] > CROSSCHECK_SECONDS or len(history) > LONGEST_SECONDS:
        history.popleft()
