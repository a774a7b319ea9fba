"""Pressure stall information (PSI) of the machine or of a cgroup.

Waiting time (the kernel's *some*): at least one thread waited for the resource. Stalled time (*full*): all non-idle
threads waited. Stalled time is not defined for the CPU of the whole machine.
Source: Documentation/accounting/psi.rst.
"""

from __future__ import annotations

from dataclasses import dataclass

from exporter.collectors.kernel_files import parse_file, procfs, source
from exporter.families import Collected, FamilySpec

MICROSECONDS_PER_SECOND = 1e6

CPU_WAITING = FamilySpec(
    name="host_pressure_cpu_waiting_seconds_total",
    type="counter",
    unit="seconds",
    help="Time in which at least one thread waited for a CPU.",
    absent="where pressure stall information is disabled",
    source="/proc/pressure/cpu some total",
)
MEMORY_WAITING = FamilySpec(
    name="host_pressure_memory_waiting_seconds_total",
    type="counter",
    unit="seconds",
    help="Time in which at least one thread waited for memory.",
    absent="where pressure stall information is disabled",
    source="/proc/pressure/memory some total",
)
MEMORY_STALLED = FamilySpec(
    name="host_pressure_memory_stalled_seconds_total",
    type="counter",
    unit="seconds",
    help="Time in which all non-idle threads waited for memory.",
    absent="where pressure stall information is disabled",
    source="/proc/pressure/memory full total",
)
IO_WAITING = FamilySpec(
    name="host_pressure_io_waiting_seconds_total",
    type="counter",
    unit="seconds",
    help="Time in which at least one thread waited for I/O.",
    absent="where pressure stall information is disabled",
    source="/proc/pressure/io some total",
)
IO_STALLED = FamilySpec(
    name="host_pressure_io_stalled_seconds_total",
    type="counter",
    unit="seconds",
    help="Time in which all non-idle threads waited for I/O.",
    absent="where pressure stall information is disabled",
    source="/proc/pressure/io full total",
)
SPECS = (CPU_WAITING, MEMORY_WAITING, MEMORY_STALLED, IO_WAITING, IO_STALLED)


@dataclass(frozen=True, slots=True)
class Pressure:
    """Pressure totals of a resource; `stalled_seconds` is None where the kernel does not define it."""

    waiting_seconds: float
    stalled_seconds: float | None


def parse_pressure(text: str) -> Pressure:
    """Parse lines such as `some avg10=0.00 … total=1234`. Raises ValueError and LookupError."""
    totals = {
        line.partition(" ")[0]: int(line.rpartition("total=")[2]) / MICROSECONDS_PER_SECOND
        for line in text.splitlines()
    }
    return Pressure(waiting_seconds=totals["some"], stalled_seconds=totals.get("full"))


class PressureCollector:
    """Collector of /proc/pressure."""

    name = "pressure"
    specs = SPECS

    def __init__(self) -> None:
        self._directory = procfs() / "pressure"

    def collect(self) -> Collected:
        """Read the pressure of CPU, memory and I/O."""
        collected = Collected()
        with source(collected, self._directory / "cpu"):
            collected.add(CPU_WAITING, parse_file(self._directory / "cpu", parse_pressure).waiting_seconds)
        with source(collected, self._directory / "memory"):
            memory = parse_file(self._directory / "memory", parse_pressure)
            collected.add(MEMORY_WAITING, memory.waiting_seconds)
            collected.add(MEMORY_STALLED, memory.stalled_seconds)
        with source(collected, self._directory / "io"):
            io = parse_file(self._directory / "io", parse_pressure)
            collected.add(IO_WAITING, io.waiting_seconds)
            collected.add(IO_STALLED, io.stalled_seconds)
        if not collected and not collected.problems:
            collected.unsupported = [
                f"no {self._directory}: pressure stall information is disabled (kernel option CONFIG_PSI, boot parameter psi=1)"
            ]
        return collected
