"""CPU time, utilization, load averages and boot time, from /proc/stat by psutil."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from exporter.collectors.kernel_files import HighWater, from_psutil, procfs, read_file, source
from exporter.collectors.options import CollectorOptions
from exporter.config.options import option
from exporter.families import Collected, FamilySpec

SECONDS = FamilySpec(
    name="host_cpu_seconds_total",
    type="counter",
    unit="seconds",
    labels=("cpu", "mode"),
    help="CPU time since boot by mode, for all CPUs together, or by CPU with the option per_core.",
    source="/proc/stat cpu",
    details=(
        (
            "The sum of the modes is all CPU time: `user` and `nice` do not include the time of guests, which"
            " has its own modes."
        ),
        "If the kernel's value decreases, the series keeps the highest value, except after the CPU was offline.",
    ),
)
UTILIZATION = FamilySpec(
    name="host_cpu_utilization_ratio",
    type="gauge",
    unit="ratio",
    help=(
        "Share of CPU time that was neither idle nor I/O wait, over all CPUs and the collector's last"
        " interval; steal time counts as used."
    ),
    absent="in the first pass, or after a decrease of the kernel's values",
    source="/proc/stat cpu, difference between two passes",
)
LOAD1 = FamilySpec(
    name="host_load1",
    type="gauge",
    help="Average number of threads that are runnable or in uninterruptible sleep, over 1 min.",
    source="getloadavg(3)",
)
LOAD5 = FamilySpec(
    name="host_load5",
    type="gauge",
    help="Average number of threads that are runnable or in uninterruptible sleep, over 5 min.",
    source="getloadavg(3)",
)
LOAD15 = FamilySpec(
    name="host_load15",
    type="gauge",
    help="Average number of threads that are runnable or in uninterruptible sleep, over 15 min.",
    source="getloadavg(3)",
)
BOOT_TIME = FamilySpec(
    name="host_boot_time_seconds",
    type="gauge",
    unit="seconds",
    help="Unix time at which the machine booted.",
    source="/proc/stat btime",
)
SPECS = (SECONDS, UTILIZATION, LOAD1, LOAD5, LOAD15, BOOT_TIME)

CPU_HOTPLUG_SECONDS = 3.0
"""Decrease of the idle time from which a CPU is assumed to have been offline, as in node_exporter. Its counters restart."""


@dataclass(frozen=True, slots=True)
class CpuOptions(CollectorOptions):
    """Options of the CPU collector."""

    per_core: bool = option(False, "A series per CPU and mode instead of the sum over all CPUs.")


class CpuCollector:
    """Collector of CPU time and load."""

    name = "cpu"
    specs = SPECS

    def __init__(self, *, per_core: bool = False) -> None:
        self._stat = procfs() / "stat"
        self._per_core = per_core
        self._highest = HighWater()
        self._previous_times: Mapping[str, float] = {}

    def collect(self) -> Collected:
        """Read CPU time, load and boot time."""
        collected = Collected()
        with source(collected, self._stat):
            times = self._monotonic_times("", from_psutil(self._stat, psutil.cpu_times)._asdict())
            times_by_cpu = self._times_by_core() if self._per_core else {"": times}
            for cpu, seconds_by_mode in times_by_cpu.items():
                for mode, seconds in seconds_by_mode.items():
                    collected.add(SECONDS, seconds, cpu, mode)
            collected.add(UTILIZATION, self._utilization(times))
            collected.add(BOOT_TIME, from_psutil(self._stat, psutil.boot_time))
        with source(collected, "load averages"):
            load1, load5, load15 = psutil.getloadavg()
            collected.add(LOAD1, load1)
            collected.add(LOAD5, load5)
            collected.add(LOAD15, load15)
        return collected

    def _times_by_core(self) -> dict[str, dict[str, float]]:
        """Return CPU times by the kernel's CPU number; psutil numbers only the online CPUs."""
        numbers = re.findall(r"^cpu(\d+)", read_file(self._stat), re.MULTILINE)
        times = from_psutil(self._stat, lambda: psutil.cpu_times(percpu=True))
        if len(numbers) != len(times):  # a CPU went online or offline between the two reads
            return {}
        return {
            number: self._monotonic_times(number, seconds._asdict())
            for number, seconds in zip(numbers, times, strict=True)
        }

    def _monotonic_times(self, cpu: str, seconds: dict[str, float]) -> dict[str, float]:
        """Return the CPU times by mode, without guest time in user and nice.

        The times decrease only after a hotplug of the CPU.
        """
        seconds["user"] = max(0.0, seconds["user"] - seconds.get("guest", 0.0))
        seconds["nice"] = max(0.0, seconds["nice"] - seconds.get("guest_nice", 0.0))
        if self._highest.hold((cpu, "idle"), seconds["idle"]) - seconds["idle"] >= CPU_HOTPLUG_SECONDS:
            for mode in seconds:
                self._highest.forget((cpu, mode))
        return {mode: self._highest.hold((cpu, mode), value) for mode, value in seconds.items()}

    def _utilization(self, times: Mapping[str, float]) -> float | None:
        """Return the share of used CPU time since the previous pass, or None if the times are not comparable."""
        previous, self._previous_times = self._previous_times, times
        increases = {mode: seconds - previous.get(mode, 0.0) for mode, seconds in times.items()}
        total = sum(increases.values())
        # In the first pass, without an increase of time, and after a restart of the counters, there is no utilization.
        if not previous or total <= 0 or min(increases.values()) < 0:
            return None
        return 1 - min(1.0, (increases["idle"] + increases.get("iowait", 0.0)) / total)


def busy_seconds() -> float:
    """Return the CPU time of the machine since boot that was neither idle nor I/O wait. Raises OSError and CollectError."""
    times = from_psutil(procfs() / "stat", psutil.cpu_times)
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # within user and nice
    return float(sum(times) - guests - times.idle - getattr(times, "iowait", 0.0))
