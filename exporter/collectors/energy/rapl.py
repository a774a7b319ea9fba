"""RAPL: energy of the CPUs and of the memory behind them, from their own registers or power meters.

A register of 262 kJ wraps every nine minutes at 500 W. A sidecar that is started again in the same boot counts what was
used meanwhile. Of one package only one `source` counts at a time, so that a sum without it is right.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from exporter.collectors.energy.devices import Device, Register, find_devices, tdp_model
from exporter.collectors.job import EnergyReading, Keeper, Rows
from exporter.collectors.kernel_files import procfs, read_optional, source
from exporter.errors import CollectError
from exporter.families import Collected, table

(CPU_ENERGY, DRAM_ENERGY, CPU_POWER, IDLE_POWER) = SPECS = table("""
host_cpu_energy_joules_total{package,source}: Energy of a CPU package since counting began, over restarts of
    the exporter; corrected for wraps and resets. Absent without registers, and without the right to read
    them (root only since Linux 5.10). <- /sys/class/powercap/intel-rapl:*/energy_uj; hwmon: power meter CPU
    of ACPI over time; tdp_model only where configured
host_dram_energy_joules_total{package,source}: Energy of the memory behind a CPU package, likewise. Absent
    also on CPUs that do not measure it (AMD, desktops). <- /sys/class/powercap/intel-rapl:*:*/energy_uj,
    name dram
host_cpu_power_watts{package,source}: Mean power of a CPU package between the last two readings. Absent
    before the second. <- energy / time
host_cpu_power_idle_watts{package,method}: Power of a CPU package without work, by the way in which it is
    known: config, before_start (tenth percentile while no run was alive), min_seen (once the most seen was
    twice as much). A method is absent as long as it knows nothing. <- configuration, host_cpu_power_watts
""")

MIRROR_JOULES = 2.0
"""Registers that do not differ by more are one register: it moves while they are read one after the other."""

_PUBLISHED = {"cpu": CPU_ENERGY, "dram": DRAM_ENERGY}


class RaplCollector:
    """Counts the energy of CPUs and memory.

    `idle_watts` is of one package, `tdp_watts` of all: with it a model stands in where no register can be read.
    """

    name = "rapl"
    specs = SPECS

    def __init__(
        self,
        *,
        sys: Path = Path("/sys"),
        keeper: Keeper | None = None,
        counts: Callable[[], bool] = lambda: True,
        working: Callable[[], bool | None] = lambda: None,
        idle_watts: float | None = None,
        tdp_watts: float | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.readings: tuple[EnergyReading, ...] = ()  # the last ones, for the attribution to runs
        self._sys = sys
        self._boot_id = procfs() / "sys/kernel/random/boot_id"
        self._page = (keeper or Keeper()).page("rapl")
        self._counts = counts
        self._working = working
        self._idle_watts = idle_watts
        self._model = None if tdp_watts is None else tdp_model(tdp_watts)
        self._monotonic = monotonic
        self._boot = ""
        self._rested = False  # whether another exporter has counted meanwhile
        self._kept: Rows | None = None
        self._devices: dict[str, Device] = {}
        self._passed_at: float | None = None

    def collect(self) -> Collected:
        """Read all registers once."""
        collected = Collected()
        if not self._counts():
            self._rest()
            collected.unsupported.append("another exporter on this machine counts its energy: absent here")
            return collected
        if not self._load(collected):
            return collected
        now = self._monotonic()
        for found in find_devices(self._sys, self._idle_watts, collected):
            if found.key not in self._devices:
                self._add(found)
        since = 0.0 if self._passed_at is None else max(0.0, now - self._passed_at)
        self._passed_at = now
        measured = [device for device in self._devices.values() if device is not self._model]
        for device in measured:
            self._read(device, collected, now, since=since)
        if self._model is not None:
            self._model.readable = False
            if not any(device.readable and device.component == "cpu" for device in measured):
                if self._model.key not in self._devices:
                    self._add(self._model)
                self._read(self._model, collected, now, since=since)
        shown = self._save(collected)
        self.readings = tuple(
            device.reading(now)
            for device in self._devices.values()
            if not self._is_mirror(device) and (device.readable or device is not self._model)
        )
        self._publish(collected, shown=shown)
        return collected

    def _rest(self) -> None:
        """Count nothing; what the other exporter counts meanwhile is not ours later either."""
        self.readings = ()
        self._rested = True
        self._passed_at = None
        for device in self._devices.values():
            device.forget()

    def _load(self, collected: Collected) -> bool:
        """Learn what was counted before; False where another sidecar keeps it.

        As long as that cannot be read, counting goes on from 0 and nothing of it is shown.
        """
        self._boot = self._boot or read_optional(self._boot_id) or ""
        if self._kept is not None:
            return True
        try:
            self._kept = self._page.load()
        except CollectError as error:
            collected.fail(error)
            return True
        if self._kept is None:
            collected.unsupported.append("another sidecar keeps this machine's energy totals: absent here")
            return False
        if self._rested:
            self._kept = {name: row for name, row in self._kept.items() if name[0] != "register"}
        for device in self._devices.values():
            device.resume(self._kept, self._boot)
        return True

    def _add(self, device: Device) -> None:
        self._devices[device.key] = device
        if self._kept is not None:
            device.resume(self._kept, self._boot)

    def _read(self, device: Device, collected: Collected, now: float, *, since: float) -> None:
        device.readable = False
        reason = "error"
        with source(collected, device.path):
            try:
                device.update(now)
                device.readable = True
            except PermissionError as error:
                reason = "permission"
                message = (
                    f"{error.filename}: {error.strerror}: since Linux 5.10 only root may read energy registers; let the"
                    f" exporter, with `chmod a+r {error.filename}` at every boot (tmpfiles.d), CAP_DAC_READ_SEARCH or as root"
                )
                raise CollectError(message, reason="permission") from error
        if not device.readable:
            device.gaps[reason] += since
        elif device.counter.watts is not None and device.component == "cpu":
            device.idle.note(device.counter.watts, working=self._working())

    def _is_mirror(self, device: Device) -> bool:
        """Some of AMD's first dies all show the register of the whole package."""
        seen = device.counter.mark()[0]
        for other in self._devices.values():
            if other is device or seen is None:
                break
            shown, socket = other.counter.mark()[0], other.index.partition("-")[0]
            same = other.component == device.component and socket == device.index.partition("-")[0]
            if same and shown is not None and abs(shown - seen) <= MIRROR_JOULES:
                return True
        return False

    def _save(self, collected: Collected) -> bool:
        if self._kept is None:
            return False
        if not self._devices:
            return True
        # Devices that are not there at the moment may come back; registers of other boots may not.
        self._kept = {name: row for name, row in self._kept.items() if name[0] != "register"}
        for device in self._devices.values():
            self._kept |= device.rows(self._boot)
        try:
            self._page.save(self._kept)
        except CollectError as error:
            collected.fail(error)
            return False
        return True

    def _publish(self, collected: Collected, *, shown: bool) -> None:
        for reading in self.readings:
            labels = reading.index, reading.source
            if shown and reading.component in _PUBLISHED:
                collected.add(_PUBLISHED[reading.component], reading.joules, *labels)
            if reading.component == "cpu":
                collected.add(CPU_POWER, reading.watts, *labels)
        for device in self._devices.values():
            if isinstance(device, Register) and device.component == "cpu" and not self._is_mirror(device):
                for method, watts in device.idle.by_method().items():
                    collected.add(IDLE_POWER, watts, device.index, method)
