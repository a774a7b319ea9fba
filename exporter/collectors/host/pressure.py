"""Pressure: how long threads could not go on for want of CPU, memory or I/O (PSI).

Used in the sidecar. /proc/pressure/* comes in. No threads, no state.

Source: Documentation/accounting/psi.rst. *Some* (here: waiting) is time in which at least one thread waited,
*full* (here: stalled) time in which none could run. For the CPU of the whole machine *full* is undefined.
"""

from __future__ import annotations

from pathlib import Path

from exporter.collectors.kernel_files import parse_count, procfs, read_existing, source
from exporter.families import Collected, FamilySpec, family

MICROSECONDS_PER_SECOND = 1e6

WANTED = {"cpu": "a CPU", "memory": "memory", "io": "I/O"}


def pressure_spec(prefix: str, resource: str, line: str, whose: str, where: str, absent: str) -> FamilySpec:
    """Describe the family of one line of a pressure file, for the machine or for a cgroup."""
    word, whom = ("waiting", "at least one thread") if line == "some" else ("stalled", "all threads")
    return family(
        f"{prefix}_pressure_{resource}_{word}_seconds_total",
        f"Time in which {whom}{whose} had to wait for {WANTED[resource]}. {absent}",
        f"{where} {line} total",
    )


def total_seconds(text: str, line: str, path: Path) -> float:
    """Read the total of a line `some avg10=0.00 … total=1234`.

    Raises:
        CollectError: It holds no number.
        KeyError: There is no such line.
    """
    lines = {word: rest for word, _, rest in (row.partition(" ") for row in text.splitlines())}
    return parse_count(lines[line].rpartition("total=")[2], path, line) / MICROSECONDS_PER_SECOND


LINES = {
    (resource, line): pressure_spec(
        "host",
        resource,
        line,
        "",
        f"/proc/pressure/{resource}",
        "Absent where the kernel keeps no pressure of it.",
    )
    for resource, line in (
        ("cpu", "some"),
        ("memory", "some"),
        ("memory", "full"),
        ("io", "some"),
        ("io", "full"),
    )
}
SPECS = tuple(LINES.values())


class PressureCollector:
    """Reads /proc/pressure."""

    name = "pressure"
    specs = SPECS

    def __init__(self) -> None:
        self._directory = procfs() / "pressure"

    def collect(self) -> Collected:
        """Read the sources once."""
        collected = Collected()
        for resource in WANTED:
            path = self._directory / resource
            with source(collected, path):
                text = read_existing(path)
                for (which, line), spec in LINES.items():
                    if which == resource:
                        collected.add(spec, total_seconds(text, line, path))
        if len(collected.unsupported) == len(WANTED):
            collected.unsupported = [
                f"no {self._directory}: the kernel keeps no pressure (CONFIG_PSI, psi=1)"
            ]
        return collected
