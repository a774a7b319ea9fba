"""Hardware: how many CPUs there are and how fast they run, temperatures, throttling, errors of the memory controllers.

Used in the sidecar, on a slow interval: asking some chips (disks, network cards) takes milliseconds. psutil counts the
CPUs and reads their frequency; hwmon, on machines without its thermometers the thermal zones, thermal_throttle and EDAC
of /sys come in. (psutil's sensors do not tell two devices of one driver apart.) No threads. It holds the throttle count
of each core and package, so that the sum does not fall when a CPU goes offline.

`chip` is the driver's name and the device's, which unlike hwmon's own numbers stay the same over reboots.

Source: Documentation/hwmon/sysfs-interface.rst; arch/x86/kernel/cpu/mce/therm_throt.c; Documentation/admin-guide/RAS.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import psutil

from exporter.collectors.cgroup.tree import CgroupTree, cpu_quota
from exporter.collectors.kernel_files import (
    list_directory,
    numbered_entries,
    parse_count,
    read_existing,
    read_file,
    source,
)
from exporter.families import Collected, family

CPUS = family(
    "host_cpus",
    "CPUs by kind: online logical ones, physical cores, those the exporter may run on (affinity), and the cgroup's tightest limit (quota). A kind is absent where the system does not say; quota also where there is no limit.",
    "sysconf, /sys/devices/system/cpu, sched_getaffinity, cpu.max or cpu.cfs_quota_us",
    "kind",
)
FREQUENCY = family(
    "host_cpu_frequency_hertz",
    "Present frequency, the mean of all CPUs. Absent where neither cpufreq nor the CPU tells it.",
    "/sys/devices/system/cpu/cpufreq, else /proc/cpuinfo cpu MHz",
)
THROTTLES = family(
    "host_cpu_throttles_total",
    "Times that a core or a package slowed down because of its temperature, summed over the machine. Absent where the CPU does not count them.",
    "/sys/devices/system/cpu/cpu*/thermal_throttle/{core,package}_throttle_count",
    "level",
)
TEMPERATURE = family(
    "host_temperature_celsius",
    "Temperature of a sensor; those of single CPU cores only with per_core. Absent where there are no sensors (virtual machines) and while one has no reading.",
    "/sys/class/hwmon/hwmon*/temp*_input, else /sys/class/thermal/thermal_zone*/temp",
    "chip",
    "sensor",
)
CORRECTABLE = family(
    "host_memory_ecc_correctable_errors_total",
    "Memory errors that were corrected. Absent without ECC memory or its driver.",
    "/sys/devices/system/edac/mc/mc*/ce_count",
    "controller",
)
UNCORRECTABLE = family(
    "host_memory_ecc_uncorrectable_errors_total",
    "Memory errors that could not be corrected. Absent without ECC memory or its driver.",
    "/sys/devices/system/edac/mc/mc*/ue_count",
    "controller",
)
SPECS = (CPUS, FREQUENCY, THROTTLES, TEMPERATURE, CORRECTABLE, UNCORRECTABLE)

ABSOLUTE_ZERO_CELSIUS = -273.15

_LEVELS = {"core": ("core_cpus_list", "thread_siblings_list"), "package": ("physical_package_id",)}
"""What tells which CPUs share a throttle count; the second name of a core is that before Linux 5.3."""
_EDAC = {CORRECTABLE: "ce_count", UNCORRECTABLE: "ue_count"}
_CORE = re.compile(r"Core [0-9]+")
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]+")


class HardwareCollector:
    """Reads CPUs, thermometers and error counts.

    Args:
        sys: Where sysfs is mounted.
        per_core: Also the thermometers of single CPU cores, of which a large machine has hundreds.
    """

    name = "hardware"
    specs = SPECS

    def __init__(self, *, sys: Path = Path("/sys"), per_core: bool = False) -> None:
        self._sys = sys
        self._per_core = per_core
        self._tree = CgroupTree(sys=sys)
        self._throttles: dict[str, dict[str, int]] = {level: {} for level in _LEVELS}

    def collect(self) -> Collected:
        """Read the sources once."""
        collected = Collected()
        self._add_cpus(collected)
        with source(collected, "thermal_throttle"):
            self._add_throttles(collected)
        self._add_temperatures(collected)
        with source(collected, "EDAC"):
            self._add_memory_errors(collected)
        return collected

    def _add_cpus(self, collected: Collected) -> None:
        counts: dict[str, float | None] = {
            "online": psutil.cpu_count(),
            "physical": psutil.cpu_count(logical=False),
            "affinity": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        }
        with source(collected, "cgroup"):
            counts["quota"] = cpu_quota(self._tree)
        known: dict[tuple[str, ...], float] = {
            (kind,): count for kind, count in counts.items() if count is not None
        }
        collected.add_family(CPUS, known)
        with source(collected, "cpufreq"):
            found = psutil.cpu_freq()
            if found is not None and found.current:
                collected.add(FREQUENCY, found.current * 1e6)
            else:
                collected.unsupported.append(
                    "no CPU frequencies: neither cpufreq nor /proc/cpuinfo tells them"
                )

    def _add_throttles(self, collected: Collected) -> None:
        for _, cpu in numbered_entries(self._sys / "devices/system/cpu", "cpu"):
            for level, names in _LEVELS.items():
                path = cpu / "thermal_throttle" / f"{level}_throttle_count"
                text = read_file(path)
                # Siblings show the count of what they share: each core and each package is counted once.
                place = next((place for name in names if (place := _label(cpu / "topology" / name))), "")
                if text is not None and place:
                    self._throttles[level][place] = parse_count(text.strip(), path)
        sums: dict[tuple[str, ...], float] = {
            (level,): sum(counts.values()) for level, counts in self._throttles.items() if counts
        }
        collected.add_family(THROTTLES, sums)
        if not sums:
            collected.unsupported.append(
                "no thermal_throttle: the CPUs do not count how often they slow down"
            )

    def _add_memory_errors(self, collected: Collected) -> None:
        directory = self._sys / "devices/system/edac/mc"
        controllers = numbered_entries(directory, "mc")
        for spec, name in _EDAC.items():
            collected.add_family(
                spec,
                {
                    (str(number),): parse_count(read_existing(controller / name).strip(), controller / name)
                    for number, controller in controllers
                },
            )
        if not controllers:
            collected.unsupported.append(f"no memory controllers in {directory}")

    def _add_temperatures(self, collected: Collected) -> None:
        hwmon, celsius = self._sys / "class/hwmon", dict[tuple[str, ...], float]()
        with source(collected, hwmon):
            for _, chip in numbered_entries(hwmon, "hwmon"):
                with source(collected, chip):
                    self._read_chip(chip, celsius, collected)
        if not celsius:
            with source(collected, self._sys / "class/thermal"):
                for _, zone in numbered_entries(self._sys / "class/thermal", "thermal_zone"):
                    _read_thermometer(zone / "temp", (zone.name, _label(zone / "type") or "temp"), celsius)
        collected.add_family(TEMPERATURE, celsius)
        if not celsius:
            collected.unsupported.append(f"no thermometers in {hwmon}")

    def _read_chip(self, hwmon: Path, celsius: dict[tuple[str, ...], float], collected: Collected) -> None:
        chip = _chip_name(hwmon)
        inputs = [
            name.removesuffix("_input")
            for name in list_directory(hwmon)
            if re.fullmatch(r"temp[0-9]{1,4}_input", name)
        ]
        labels = {name: _label(hwmon / f"{name}_label") for name in inputs}
        uses = Counter(labels.values())
        for name, label in labels.items():
            if _CORE.fullmatch(label) and not self._per_core:
                continue
            # Two sensors of one label would be one series.
            sensor = name if not label else f"{label} {name}" if uses[label] > 1 else label
            with source(collected, hwmon / f"{name}_input"):
                _read_thermometer(hwmon / f"{name}_input", (chip, sensor), celsius)


def _read_thermometer(path: Path, labels: tuple[str, str], celsius: dict[tuple[str, ...], float]) -> None:
    text = read_file(path)
    # 0 K is a driver's way of saying that it does not know.
    if text is not None and (found := int(text) / 1000) > ABSOLUTE_ZERO_CELSIUS:
        celsius[labels] = found


def _chip_name(hwmon: Path) -> str:
    driver = _label(hwmon / "name") or hwmon.name
    try:
        device = _printable(os.path.basename(os.readlink(hwmon / "device")))  # noqa: PTH115, PTH119 - the link's text is the name; it need not lead anywhere
    except OSError:  # a chip that is no device, such as a thermal zone's
        return driver if driver == hwmon.name else f"{driver}-{hwmon.name}"
    return device if device.startswith(driver) else f"{driver}-{device}"


def _label(path: Path) -> str:
    return _printable(read_file(path) or "")


def _printable(text: str) -> str:
    return _UNPRINTABLE.sub(" ", text).strip()[:100]
