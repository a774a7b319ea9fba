"""Energy sources of CPUs and memory: RAPL registers, ACPI power meters, a model of the load.

    intel-rapl:0        name package-0     the CPU, its cores and caches                counted
    intel-rapl:0:0      name core          a part of the package                        excluded
    intel-rapl:0:1      name dram          the memory behind the CPU, not part of it    counted
    intel-rapl:1        name psys          the whole platform                           excluded
    intel-rapl-mmio:0   name package-0     the same package by another interface        excluded
    CPU Power Socket 0                     the cores of NVIDIA's Grace                  counted
    SysIO Power Socket 0                   the rest of the chip                         counted: soc
    Module, Grace Power Socket 0           the whole module; sums of the others         excluded

Source: Documentation/power/powercap/powercap.rst; NVIDIA Grace Performance Tuning Guide, "Power and Thermals";
Documentation/hwmon/acpi_power_meter.rst.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from exporter.collectors.energy.counter import MAX_INTERVAL_SECONDS, MAX_WATTS, EnergyCounter
from exporter.collectors.energy.idle_power import IdlePower
from exporter.collectors.job import EnergyReading
from exporter.collectors.kernel_files import (
    list_directory,
    parse_file,
    read_file,
    read_optional,
    source,
)
from exporter.errors import CollectError
from exporter.families import Collected

GAP_REASONS = ("permission", "lost", "error")
"""Reasons of gaps, which are intervals without a valid reading.

`permission`: the user may not read the register. `lost`: an interval so long that the number of wraps is unknown. `error`: another
failure of a reading.
"""
INTERFACES = ("intel-rapl", "intel-rapl-tpmi", "intel-rapl-mmio")
"""Kernel drivers of RAPL, the preferred driver first."""
MICROS_PER_UNIT = 1e6

_ZONE = re.compile(r"(?P<interface>intel-rapl(?:-tpmi|-mmio)?)(?P<numbers>(?::[0-9]{1,4}){1,3})", re.ASCII)
_PACKAGE = re.compile(r"package-(?P<index>[0-9]{1,4}(?:-die-[0-9]{1,4})?)", re.ASCII)
_METER = re.compile(r"(?P<part>CPU|SysIO) Power Socket (?P<socket>[0-9]{1,3})", re.ASCII)


@dataclass(slots=True, eq=False)
class EnergyDevice:
    """Source of energy readings."""

    key: str  # name of the zone or meter
    path: Path
    component: Literal["cpu", "dram", "soc"]
    device: str  # label of families that span CPUs and GPUs
    index: str  # label `package`
    name: str
    source: str  # label `source`
    is_measured: bool = True  # False for a model
    idle: IdlePower = field(default_factory=IdlePower)
    is_readable: bool = False  # True if the last reading succeeded
    gap_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(GAP_REASONS, 0.0))
    _gap_seconds_at_reading: float = 0.0  # sum of `gap_seconds` at the last reading of a register
    counter: EnergyCounter = field(default_factory=EnergyCounter)

    def update(self, now: float) -> None:
        """Read the device. Raises OSError and CollectError."""
        raise NotImplementedError

    def forget(self) -> None:
        """Discard the last reading, and keep the total."""
        self.counter.forget()

    def reading(self, now: float) -> EnergyReading:
        """Return the reading that the ledger divides among the runs."""
        return EnergyReading(
            component=self.component,
            device=self.device,
            source=self.source,
            is_measured=self.is_measured,
            joules=self.counter.joules if self.is_readable else None,
            watts=self.counter.watts if self.is_readable else None,
            time=now,
            idle_watts=self.idle.best(),
            name=self.name,
            index=self.index,
            register_joules=self.counter.register_joules if self.is_readable else None,
            range_joules=self.counter.range_joules,
            corrections=dict(self.counter.corrections),
            gap_seconds=dict(self.gap_seconds),
        )


class RaplZone(EnergyDevice):
    """Energy register of a RAPL zone."""

    def update(self, now: float) -> None:
        """Read the register.

        An interval longer than `MAX_INTERVAL_SECONDS` is a gap with the reason `lost`. The time of failed readings in the interval is
        subtracted, because it is already counted as a gap with another reason.
        """
        had_reading, previous_time = self.counter.register_joules is not None, self.counter.time
        register_joules = parse_file(self.path / "energy_uj", int) / MICROS_PER_UNIT
        seconds = self.counter.update(register_joules, now)
        if seconds is None and had_reading:
            failed_seconds = sum(self.gap_seconds.values()) - self._gap_seconds_at_reading
            self.gap_seconds["lost"] += max(0.0, now - previous_time - failed_seconds)
        self._gap_seconds_at_reading = sum(self.gap_seconds.values())


@dataclass(slots=True, eq=False)
class PowerMeter(EnergyDevice):
    """Power meter whose readings are integrated over time. Peaks between two readings are missed."""

    read_watts: Callable[[], float] = float
    _last_time: float | None = None

    def update(self, now: float) -> None:
        """Add the energy since the last reading. If that reading is missing or older than `MAX_INTERVAL_SECONDS`, add none.

        Raises CollectError for an impossible power.
        """
        watts = self.read_watts()
        if not 0 <= watts <= MAX_WATTS:
            raise CollectError(
                f"{self.path}: {watts:g} W is not between 0 and {MAX_WATTS:g} W", reason="malformed"
            )
        previous_watts, previous_time = self.counter.watts, self._last_time
        if (
            previous_watts is not None
            and previous_time is not None
            and 0 < now - previous_time <= MAX_INTERVAL_SECONDS
        ):
            # The trapezoidal rule: the mean of both readings over the time in between.
            self.counter.joules += (previous_watts + watts) / 2 * (now - previous_time)
        self.counter.watts, self._last_time = watts, now

    def forget(self) -> None:
        """Discard the last reading, and keep the total."""
        self._last_time = self.counter.watts = None


def tdp_model(tdp_watts: float) -> PowerMeter:
    """Return a model of the power of all CPUs: TDP * (0.1 + 0.9 * load³), as in codecarbon.

    Such models deviate from wall meters by up to 40 % (arXiv 2509.22092).
    """
    return PowerMeter(
        key="model",
        path=Path("/proc/stat"),
        component="cpu",
        device="machine",
        index="all",
        name=f"{tdp_watts:g} W TDP",
        source="tdp_model",
        is_measured=False,
        idle=IdlePower(tdp_watts * 0.1),
        read_watts=lambda: tdp_watts * (0.1 + 0.9 * (psutil.cpu_percent() / 100) ** 3),
    )


def find_devices(sys: Path, idle_watts: float | None, collected: Collected) -> list[EnergyDevice]:
    """Return the energy sources of this machine. Zones that overlap with a returned zone, or repeat one, are omitted."""
    devices: list[EnergyDevice] = []
    with source(collected, sys / "class/hwmon"):
        devices += _find_meters(sys / "class/hwmon")
    with source(collected, sys / "class/powercap"):
        devices += _find_registers(sys / "class/powercap", idle_watts, collected)
    return devices


def _find_meters(root: Path) -> list[PowerMeter]:
    """Return the power meters of the CPUs and of the rest of the chip below /sys/class/hwmon."""
    meters: dict[str, PowerMeter] = {}
    # The files were in the directory `device` before Linux 6.8.
    for path in (
        root / name / subdirectory for name in list_directory(root) for subdirectory in ("", "device")
    ):
        match = _METER.fullmatch(read_optional(path / "power1_oem_info") or "")
        if match:
            name, is_cpu, socket = match.group(), match["part"] == "CPU", match["socket"]
            meters[name] = PowerMeter(
                key=name,
                path=path,
                component="cpu" if is_cpu else "soc",
                device=f"{'package' if is_cpu else 'socket'}{socket}",
                index=socket,
                name=name,
                source="hwmon",
                read_watts=lambda path=path: parse_file(path / "power1_average", int) / MICROS_PER_UNIT,  # type: ignore[misc]
            )
    return list(meters.values())


def _find_registers(root: Path, idle_watts: float | None, collected: Collected) -> list[RaplZone]:
    """Return the RAPL registers of the packages and of their memory. If several drivers show a register, return it once, of the preferred driver."""
    matches = [match for match in map(_ZONE.fullmatch, list_directory(root)) if match]
    matches.sort(
        key=lambda match: (
            INTERFACES.index(match["interface"]),
            [int(number) for number in match["numbers"].removeprefix(":").split(":")],
        )
    )
    zone_keys = [
        match.group() for match in matches
    ]  # the preferred driver first, and a zone before its subzones
    if not zone_keys:
        collected.unsupported.append(
            f"no energy registers in {root} (a virtual machine, or no driver for this CPU)"
        )
    elif not any((root / key / "name").exists() for key in zone_keys):
        collected.unsupported.append(
            f"{root} has no files: the container runtime masks /sys/devices/virtual/powercap; run the exporter on"
            " the host, or mount that directory and give the container the right to read it"
        )
        return []
    registers: dict[tuple[str, str], RaplZone] = {}
    package_indices: dict[str, str] = {}  # by key of the zone
    for key in zone_keys:
        path = root / key
        with source(collected, path):
            name = read_file(path / "name")
            package = _PACKAGE.fullmatch(name)
            if package:
                package_indices[key] = package["index"]
            outer_key, _, _ = key.rpartition(":")
            index = package_indices.get(key if package else outer_key)
            # Other zones overlap with a package, and two drivers can show the same register.
            if index is not None and (package or name == "dram") and (index, name) not in registers:
                range_joules = parse_file(path / "max_energy_range_uj", int) / MICROS_PER_UNIT
                registers[index, name] = RaplZone(
                    key=key,
                    path=path,
                    component="cpu" if package else "dram",
                    device=f"package{index}",
                    index=index,
                    name=name,
                    source="rapl",
                    idle=IdlePower(idle_watts if package else None),
                    counter=EnergyCounter(range_joules=range_joules),
                )
    return list(registers.values())
