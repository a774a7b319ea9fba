"""Pressure: how long threads could not go on for want of CPU, memory, I/O or because of interrupts (PSI).

Used in the sidecar. /proc/pressure/* comes in. No threads, no state.

Source: Documentation/accounting/psi.rst. *Some* (here: waiting) is time in which at least one thread waited,
*full* (here: stalled) time in which none could run. For the CPU of the whole machine *full* is undefined.
"""

from __future__ import annotations

from pathlib import Path

from exporter.collectors.draft import Draft
from exporter.collectors.family import Collected, FamilySpec
from exporter.collectors.kernel_files import FILE_REASONS, parse_count, read_file, refuse

MICROSECONDS_PER_SECOND = 1e6

_WANT = {
    "cpu": "a CPU",
    "memory": "memory",
    "io": "I/O",
    "irq": "the end of interrupts",
}


def _spec(resource: str, line: str) -> FamilySpec:
    word, whom = ("waiting", "at least one thread") if line == "some" else ("stalled", "all threads")
    return FamilySpec(
        f"host_pressure_{resource}_{word}_seconds_total",
        "counter",
        f"Time in which {whom} had to wait for {_WANT[resource]}. Absent where the kernel keeps no pressure of it.",
        unit="seconds",
        source=f"/proc/pressure/{resource} {line} total",
    )


LINES = {
    (resource, line): _spec(resource, line)
    for resource, line in (
        ("cpu", "some"),
        ("memory", "some"),
        ("memory", "full"),
        ("io", "some"),
        ("io", "full"),
        ("irq", "full"),
    )
}
SPECS = tuple(LINES.values())


class PressureCollector:
    """Reads /proc/pressure.

    Args:
        proc: Where procfs is mounted.
    """

    name = "pressure"
    specs = SPECS
    reasons = FILE_REASONS

    def __init__(self, *, proc: Path = Path("/proc")) -> None:
        self._directory = proc / "pressure"
        self._paths = {resource: self._directory / resource for resource in _WANT}

    def collect(self) -> Collected:
        """Read the source once.

        Raises:
            CollectError: Nothing of it could be read.
        """
        draft = Draft()
        missing = []
        for resource, path in self._paths.items():
            with draft.part():
                text = read_file(path)
                if text is None:
                    missing.append(resource)
                    continue
                totals = {line: rest for line, _, rest in (row.partition(" ") for row in text.splitlines())}
                for (which, line), spec in LINES.items():
                    if which == resource:
                        with draft.part():
                            draft.add(
                                spec, _total(totals.get(line, ""), path, line) / MICROSECONDS_PER_SECOND
                            )
        if len(missing) == len(self._paths):
            draft.unsupported(f"no {self._directory}: the kernel keeps no pressure (CONFIG_PSI, psi=1)")
        elif missing:
            draft.unsupported(f"no {self._directory} of {', '.join(missing)}")
        return draft.finish()


def _total(rest: str, path: Path, line: str) -> int:
    _, found, total = rest.rpartition("total=")
    if not found:
        refuse(rest, (path, line), "avg10= avg60= avg300= total=")
    return parse_count(total, path, line)
