"""Energy of the CPUs and of the memory, from RAPL registers or power meters.

A package is published from a single source, so that a sum over sources counts no energy twice. At 500 W, a register with a range
of 262 kJ wraps every nine minutes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

from exporter.collectors.energy.devices import EnergyDevice, RaplZone, find_devices, tdp_model
from exporter.collectors.job import EnergyReading
from exporter.collectors.kernel_files import source
from exporter.errors import CollectError
from exporter.families import Collected, FamilySpec

CPU_ENERGY = FamilySpec(
    name="host_cpu_energy_joules_total",
    type="counter",
    unit="joules",
    labels=("package", "source"),
    help="Energy of a CPU package since the exporter started, by source.",
    absent="without a source, or while another exporter counts the machine's energy",
    source="/sys/class/powercap/intel-rapl:*/energy_uj; hwmon: ACPI power meter of the CPU over time; tdp_model if configured",
    details=(
        (
            "`rapl`: energy register, corrected for wraps and resets. Since Linux 5.10, only root may read"
            " the register."
        ),
        "`hwmon`: power meter, integrated over time.",
        "`tdp_model`: estimate, if configured.",
    ),
)
DRAM_ENERGY = FamilySpec(
    name="host_dram_energy_joules_total",
    type="counter",
    unit="joules",
    labels=("package", "source"),
    help=(
        "Energy of the memory of a CPU package since the exporter started; not included in the energy of the"
        " package."
    ),
    absent="like host_cpu_energy_joules_total, or on CPUs without a register for memory (AMD, desktops)",
    source="/sys/class/powercap/intel-rapl:*:*/energy_uj, name dram",
)
CPU_POWER = FamilySpec(
    name="host_cpu_power_watts",
    type="gauge",
    unit="watts",
    labels=("package", "source"),
    help="Power of a CPU package, by the source of host_cpu_energy_joules_total.",
    absent="like host_cpu_energy_joules_total, or before the second reading of a register",
    source="energy / time; hwmon: ACPI power meter of the CPU",
    details=(
        "`rapl`, `tdp_model`: mean power between the last two readings.",
        "`hwmon`: last reading of the power meter.",
    ),
)
IDLE_POWER = FamilySpec(
    name="host_cpu_power_idle_watts",
    type="gauge",
    labels=("package", "method"),
    unit="watts",
    help="Idle power of a CPU package, by method.",
    absent="without RAPL, while another exporter counts the machine's energy, or for a method that has no value yet",
    source="configuration, host_cpu_power_watts",
    details=(
        "`config`: configured value.",
        "`before_start`: tenth percentile of the power while no run was alive.",
        "`min_seen`: lowest power, once the highest power is twice as high.",
    ),
)
SPECS = (CPU_ENERGY, DRAM_ENERGY, CPU_POWER, IDLE_POWER)

MIRROR_JOULES = 2.0
"""Largest difference between two readings of the same register under different names."""


class RaplCollector:
    """Collector of the energy of CPUs and memory.

    Args:
        sys: Root of sysfs.
        counts_energy: Returns False while another exporter counts the energy of this machine.
        is_working: Returns whether a job is running; None if unknown.
        idle_watts: Configured idle power of a package.
        tdp_watts: Configured TDP of all packages together. If no CPU power can be measured, a model computes the power from this value.
        monotonic: The clock.
    """

    name = "rapl"
    specs = SPECS

    def __init__(
        self,
        *,
        sys: Path = Path("/sys"),
        counts_energy: Callable[[], bool] = lambda: True,
        is_working: Callable[[], bool | None] = lambda: None,
        idle_watts: float | None = None,
        tdp_watts: float | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.readings: tuple[EnergyReading, ...] = ()  # of the last pass, for the attribution to runs
        self._sys = sys
        self._counts_energy = counts_energy
        self._is_working = is_working
        self._idle_watts = idle_watts
        self._model = None if tdp_watts is None else tdp_model(tdp_watts)
        self._monotonic = monotonic
        self._devices: dict[str, EnergyDevice] = {}
        self._last_pass_time: float | None = None

    def collect(self) -> Collected:
        """Read the registers and meters, unless another exporter on this machine counts the energy."""
        collected = Collected()
        if not self._counts_energy():
            self._pause()
            collected.unsupported.append(
                "another exporter on this machine counts the energy; the families of CPUs and memory are absent here"
            )
            return collected
        now = self._monotonic()
        for energy_device in find_devices(self._sys, self._idle_watts, collected):
            self._devices.setdefault(energy_device.key, energy_device)
        interval_seconds = 0.0 if self._last_pass_time is None else max(0.0, now - self._last_pass_time)
        self._last_pass_time = now
        sensors = [device for device in self._devices.values() if device is not self._model]
        for device in sensors:
            self._read(device, collected, now, interval_seconds=interval_seconds)
        if self._model is not None:
            self._model.is_readable = False
            if not any(device.is_readable and device.component == "cpu" for device in sensors):
                self._devices.setdefault(self._model.key, self._model)
                self._read(self._model, collected, now, interval_seconds=interval_seconds)
        self.readings = tuple(
            device.reading(now)
            for device in self._devices.values()
            if not self._is_mirror(device) and (device.is_readable or device is not self._model)
        )
        self._publish(collected)
        return collected

    def _pause(self) -> None:
        """Discard the last readings. The energy until the next pass is counted by another exporter."""
        self.readings = ()
        self._last_pass_time = None
        for device in self._devices.values():
            device.forget()

    def _read(
        self, device: EnergyDevice, collected: Collected, now: float, *, interval_seconds: float
    ) -> None:
        """Read a device. After a failure, add the interval to the gaps. Otherwise, record the power of a CPU for the idle power."""
        device.is_readable = False
        reason = "error"
        with source(collected, device.path):
            try:
                device.update(now)
                device.is_readable = True
            except PermissionError as error:
                reason = "permission"
                message = (
                    f"{error.filename}: {error.strerror}: since Linux 5.10 only root may read energy registers; run"
                    f" `chmod a+r {error.filename}` at every boot (tmpfiles.d), or the exporter with CAP_DAC_READ_SEARCH"
                    " or as root"
                )
                raise CollectError(message, reason="permission") from error
        if not device.is_readable:
            device.gap_seconds[reason] += interval_seconds
        elif device.counter.watts is not None and device.component == "cpu":
            device.idle.record(device.counter.watts, is_working=self._is_working())

    def _is_mirror(self, device: EnergyDevice) -> bool:
        """Return True if a device repeats the register of an earlier device, as some early AMD dies do."""
        register_joules = device.counter.register_joules
        if register_joules is None:
            return False
        for earlier in itertools.takewhile(lambda other: other is not device, self._devices.values()):
            earlier_joules = earlier.counter.register_joules
            if earlier_joules is None or abs(earlier_joules - register_joules) > MIRROR_JOULES:
                continue
            if earlier.component == device.component and _socket(earlier) == _socket(device):
                return True
        return False

    def _publish(self, collected: Collected) -> None:
        """Add the families of the last pass, and the idle power of the packages with RAPL."""
        for reading in self.readings:
            labels = reading.index, reading.source
            if reading.component == "cpu":
                collected.add(CPU_ENERGY, reading.joules, *labels)
                collected.add(CPU_POWER, reading.watts, *labels)
            elif reading.component == "dram":
                collected.add(DRAM_ENERGY, reading.joules, *labels)
        for device in self._devices.values():
            if isinstance(device, RaplZone) and device.component == "cpu" and not self._is_mirror(device):
                for method, watts in device.idle.by_method().items():
                    collected.add(IDLE_POWER, watts, device.index, method)


def _socket(device: EnergyDevice) -> str:
    """Return the number of the device's socket. The dies of socket 0 have the indices `0-die-0`, `0-die-1` and so on."""
    return device.index.partition("-")[0]
