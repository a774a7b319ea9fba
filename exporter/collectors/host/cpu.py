"""CPU: where the machine's CPU time went, how busy it is, its load and when it booted.

Used in the sidecar. psutil reads /proc/stat. It holds the previous pass, for the utilization over its own interval and
to keep CPU times from stepping back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import psutil

from exporter.collectors.kernel_files import HighWater, procfs, read_file, source
from exporter.families import Collected, table

SPECS = table("""
host_cpu_seconds_total{cpu,mode}: CPU time since boot by mode, which adds up to all of it: user and nice are
    without the guests' time. Of all CPUs together, or by cpu with per_core. <- /proc/stat cpu; held where
    the kernel steps back
host_cpu_utilization_ratio: Share of all CPUs' time that was not idle or waiting for I/O, over the
    collector's last interval; time stolen by a hypervisor counts as used. Absent in the first pass. <-
    /proc/stat cpu, difference of two passes
host_load1: Threads that ran, could run or waited for a device, averaged over 1 min. <- getloadavg(3)
host_load5: Threads that ran, could run or waited for a device, averaged over 5 min. <- getloadavg(3)
host_load15: Threads that ran, could run or waited for a device, averaged over 15 min. <- getloadavg(3)
host_boot_time_seconds: When the machine booted, Unix time. <- /proc/stat btime
""")
(SECONDS, UTILIZATION, *LOADS, BOOT_TIME) = SPECS

REPLUGGED_SECONDS = 3.0
"""Idle time that falls by so much belongs to a CPU that was taken offline and begins anew (as node_exporter sees it)."""


class CpuCollector:
    """Reads CPU times and load."""

    name = "cpu"
    specs = SPECS

    def __init__(self, *, per_core: bool = False) -> None:
        self._stat = procfs() / "stat"
        self._per_core = per_core
        self._highest = HighWater()
        self._before: Mapping[str, float] = {}

    def collect(self) -> Collected:
        """Read the sources once."""
        collected = Collected()
        with source(collected, self._stat):
            times = self._settled("", psutil.cpu_times())
            if self._per_core:
                # psutil numbers the CPUs that are online; the kernel's own numbers have gaps.
                numbers = re.findall(r"^cpu(\d+)", read_file(self._stat), re.MULTILINE)
                of_cores = zip(numbers, psutil.cpu_times(percpu=True), strict=True)
                shown = {number: self._settled(number, each) for number, each in of_cores}
            else:
                shown = {"": times}
            for number, modes in shown.items():
                for mode, seconds in modes.items():
                    collected.add(SECONDS, seconds, number, mode)
            collected.add(UTILIZATION, self._utilization(times))
            collected.add(BOOT_TIME, psutil.boot_time())
        with source(collected, "load averages"):
            for spec, load in zip(LOADS, psutil.getloadavg(), strict=True):
                collected.add(spec, load)
        return collected

    def _settled(self, cpu: str, times: tuple[float, ...]) -> dict[str, float]:
        """CPU times by mode that do not step back."""
        seconds: dict[str, float] = times._asdict()  # type: ignore[attr-defined]  # a named tuple
        seconds["user"] = max(0.0, seconds["user"] - seconds.get("guest", 0.0))
        seconds["nice"] = max(0.0, seconds["nice"] - seconds.get("guest_nice", 0.0))
        if self._highest.hold((cpu, "idle"), seconds["idle"]) - seconds["idle"] >= REPLUGGED_SECONDS:
            for mode in seconds:
                self._highest.forget((cpu, mode))
        return {mode: self._highest.hold((cpu, mode), value) for mode, value in seconds.items()}

    def _utilization(self, times: Mapping[str, float]) -> float | None:
        before, self._before = self._before, times
        spent = {mode: seconds - before.get(mode, 0.0) for mode, seconds in times.items()}
        total = sum(spent.values())
        if (
            not before or total <= 0 or min(spent.values()) < 0
        ):  # no time has passed, or the counters began anew
            return None
        return 1 - min(1.0, (spent["idle"] + spent.get("iowait", 0.0)) / total)


def busy_seconds() -> float:
    """Read the CPU time of the machine since boot that was neither idle nor waiting for I/O; raises OSError."""
    times = psutil.cpu_times()
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # within user and nice
    return float(sum(times) - guests - times.idle - getattr(times, "iowait", 0.0))
