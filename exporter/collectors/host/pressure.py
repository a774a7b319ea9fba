"""Pressure: how long threads could not go on for want of CPU, memory or I/O (PSI), of the machine or of a cgroup.

Used in the sidecar. *Some* (here: waiting) is time in which at least one thread waited, *full* (here: stalled) time in
which none could run; for the CPU of the whole machine that is undefined. Source: Documentation/accounting/psi.rst.
"""

from __future__ import annotations

from exporter.collectors.kernel_files import procfs, read_file, source
from exporter.families import Collected, FamilySpec, family

MICROSECONDS_PER_SECOND = 1e6

WANTED = {"cpu": "a CPU", "memory": "memory", "io": "I/O"}


def total_seconds(text: str, line: str) -> float:
    """Read the total of a line `some avg10=0.00 … total=1234`."""
    row = next(row for row in text.splitlines() if row.startswith(line))
    return int(row.rpartition("total=")[2]) / MICROSECONDS_PER_SECOND


def _spec(resource: str, line: str) -> FamilySpec:
    word, whom = ("waiting", "at least one thread") if line == "some" else ("stalled", "all threads")
    return family(
        f"host_pressure_{resource}_{word}_seconds_total",
        f"Time in which {whom} had to wait for {WANTED[resource]}. Absent where the kernel keeps no pressure of it.",
        f"/proc/pressure/{resource} {line} total",
    )


LINES = {
    resource: {line: _spec(resource, line) for line in (("some",) if resource == "cpu" else ("some", "full"))}
    for resource in WANTED
}
SPECS = tuple(spec for lines in LINES.values() for spec in lines.values())


class PressureCollector:
    """Reads /proc/pressure."""

    name = "pressure"
    specs = SPECS

    def __init__(self) -> None:
        self._directory = procfs() / "pressure"

    def collect(self) -> Collected:
        """Read the sources once."""
        collected = Collected()
        for resource, lines in LINES.items():
            with source(collected, self._directory / resource):
                text = read_file(self._directory / resource)
                for line, spec in lines.items():
                    collected.add(spec, total_seconds(text, line))
        if len(collected.unsupported) == len(LINES):
            collected.unsupported = [
                f"no {self._directory}: the kernel keeps no pressure (CONFIG_PSI, psi=1)"
            ]
        return collected
