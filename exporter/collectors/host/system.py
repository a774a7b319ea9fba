"""System: how many CPUs there are, thermometers, and the exporter's own process.

Used in the sidecar. psutil counts the CPUs and reads the thermometers, on a slow interval: asking some chips (disks,
network cards) takes milliseconds. prometheus_client reads the own process, under the names that every client uses.
"""

from __future__ import annotations

import os
import platform
import re
from collections import Counter
from importlib import metadata
from pathlib import Path

import psutil
from prometheus_client import ProcessCollector

from exporter.collectors.host.cgroup import CgroupTree, cpu_quota
from exporter.collectors.kernel_files import printable, procfs, source
from exporter.families import Collected, table
from exporter.version import __version__

OWN_SPECS = table("""
exporter_build_info{version,python,nvidia_ml_py}: The exporter's version, and those of what it runs on. <-
    constants; a label is absent where the package is not installed
process_cpu_seconds_total: CPU time of the exporter, user and system. Absent off Linux. <- /proc/self/stat
process_resident_memory_bytes: Memory of the exporter that is in RAM. Absent off Linux. <- /proc/self/stat
    rss
process_virtual_memory_bytes: Address space of the exporter. Absent off Linux. <- /proc/self/stat vsize
process_start_time_seconds: When the exporter started, Unix time. Absent off Linux. <- /proc/self/stat
    starttime
process_open_fds: File descriptors that the exporter has open. Absent off Linux. <- /proc/self/fd
process_max_fds: File descriptors that the exporter may have open. Absent off Linux. <- /proc/self/limits
    Max open files
""")
BUILD = OWN_SPECS[0]
(CPUS, TEMPERATURE) = HARDWARE_SPECS = table("""
host_cpus{kind}: CPUs by kind: online logical ones, physical cores, those the exporter may run on
    (affinity), and the cgroup's tightest limit (quota). A kind is absent where the system does not say;
    quota also where there is no limit. <- sysconf, /sys/devices/system/cpu, sched_getaffinity, cpu.max or
    cpu.cfs_quota_us
host_temperature_celsius{chip,sensor}: Temperature of a sensor, those of single CPU cores left out; sensors
    of one name are numbered. Absent where there are no sensors (virtual machines) and while one has no
    reading. <- /sys/class/hwmon/hwmon*/temp*_input, else /sys/class/thermal/thermal_zone*/temp
""")
SPECS = (*OWN_SPECS, *HARDWARE_SPECS)

ABSOLUTE_ZERO_CELSIUS = -273.15


class OwnCollector:
    """Tells what the exporter is and what it uses."""

    name = "own"
    specs = OWN_SPECS

    def __init__(self) -> None:
        self._process = ProcessCollector(proc=str(procfs()), registry=None)
        try:
            self._pynvml = metadata.version("nvidia-ml-py")
        except metadata.PackageNotFoundError:
            self._pynvml = ""

    def collect(self) -> Collected:
        """Read the sources once; what the exporter is made of is known without any."""
        collected = Collected()
        collected.add(BUILD, 1, __version__, platform.python_version(), self._pynvml)
        with source(collected, "/proc/self"):
            collected.extend(self._process.collect())
        return collected


class HardwareCollector:
    """Counts the CPUs and reads the thermometers."""

    name = "hardware"
    specs = HARDWARE_SPECS

    def __init__(self, *, sys: Path = Path("/sys")) -> None:
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
