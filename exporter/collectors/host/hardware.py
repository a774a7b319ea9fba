"""Hardware: how many CPUs there are, temperatures, errors of the memory controllers.

Used in the sidecar, on a slow interval: asking some chips (disks, network cards) takes milliseconds. psutil counts the
CPUs and reads the thermometers; EDAC of /sys comes in. Source: Documentation/admin-guide/RAS.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import psutil

from exporter.collectors.cgroup.tree import CgroupTree, cpu_quota
from exporter.collectors.kernel_files import list_directory, printable, read_file, source
from exporter.families import Collected, family

CPUS = family(
    "host_cpus",
    "CPUs by kind: online logical ones, physical cores, those the exporter may run on (affinity), and the cgroup's tightest limit (quota). A kind is absent where the system does not say; quota also where there is no limit.",
    "sysconf, /sys/devices/system/cpu, sched_getaffinity, cpu.max or cpu.cfs_quota_us",
    "kind",
)
TEMPERATURE = family(
    "host_temperature_celsius",
    "Temperature of a sensor, those of single CPU cores left out; sensors of one name are numbered. Absent where there are no sensors (virtual machines) and while one has no reading.",
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
SPECS = (CPUS, TEMPERATURE, CORRECTABLE, UNCORRECTABLE)

ABSOLUTE_ZERO_CELSIUS = -273.15


class HardwareCollector:
    """Reads CPUs, thermometers and error counts."""

    name = "hardware"
    specs = SPECS

    def __init__(self, *, sys: Path = Path("/sys")) -> None:
        self._controllers = sys / "devices/system/edac/mc"
        self._tree = CgroupTree(sys=sys)

    def collect(self) -> Collected:
        """Read the sources once."""
        collected = Collected()
        collected.add(CPUS, psutil.cpu_count(), "online")
        collected.add(CPUS, psutil.cpu_count(logical=False), "physical")
        collected.add(CPUS, len(os.sched_getaffinity(0)), "affinity")
        with source(collected, "cgroup"):
            collected.add(CPUS, cpu_quota(self._tree), "quota")
        with source(collected, "thermometers"):
            _add_temperatures(collected)
        with source(collected, self._controllers):
            names = [name for name in list_directory(self._controllers) if re.fullmatch(r"mc\d+", name)]
            for name in names:
                for spec, file in ((CORRECTABLE, "ce_count"), (UNCORRECTABLE, "ue_count")):
                    collected.add(spec, int(read_file(self._controllers / name / file)), name[2:])
            if not names:
                collected.unsupported.append(f"no memory controllers in {self._controllers}")
        return collected


def _add_temperatures(collected: Collected) -> None:
    chips = psutil.sensors_temperatures()
    if not chips:
        collected.unsupported.append("no thermometers")
    for chip, sensors in chips.items():
        seen: Counter[str] = Counter()
        for sensor in sensors:
            label = printable(sensor.label) or "temp"
            seen[label] += 1
            # 0 K is a driver's way of saying that it does not know; a large machine has hundreds of cores.
            if sensor.current > ABSOLUTE_ZERO_CELSIUS and not re.fullmatch(r"Core \d+", label):
                number = f" {seen[label]}" if seen[label] > 1 else ""
                collected.add(TEMPERATURE, sensor.current, printable(chip), label + number)
