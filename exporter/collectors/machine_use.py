"""What the whole machine has used, beside which the use of a run is a share.

Used in the sidecar by the collector of processes. /proc/stat, /proc/uptime and /proc/meminfo come in. No threads.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from exporter.collectors.kernel_files import (
    named_values,
    parse_count,
    parse_decimal,
    parse_kibibytes,
    read_file,
    refuse,
)

_CPU_LINE = re.compile(r"cpu[0-9]+ ")
_RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Machine:
    """One look at the machine.

    Attributes:
        boot_time: Unix time by the clock as it is set now.
        uptime: Seconds since then.
        busy_seconds: CPU time that was neither idle nor waiting for I/O.
        cpus: Online.
    """

    boot_time: float
    uptime: float
    busy_seconds: float
    cpus: int


def read_machine(proc: Path, *, ticks_per_second: int) -> Machine:
    """Look once.

    Raises:
        CollectError: A file is missing or holds something else.
    """
    path = proc / "stat"
    lines = (read_file(path) or "").splitlines()
    times: list[int] = []
    boot_time, cpus = None, 0
    for line in lines:
        if line.startswith("cpu "):
            times = [parse_count(word, path) for word in line.split()[1:9]]
        elif line.startswith("btime "):
            boot_time = parse_count(line[6:].strip(), path)
        else:
            cpus += _CPU_LINE.match(line) is not None
    if boot_time is None or len(times) < 5:
        refuse("", (path,), "the lines cpu and btime")
    idle, waiting = times[3], times[4]
    path = proc / "uptime"
    uptime = parse_decimal((read_file(path) or "").partition(" ")[0].strip(), path)
    return Machine(float(boot_time), uptime, (sum(times) - idle - waiting) / ticks_per_second, max(1, cpus))


def read_used_memory(proc: Path) -> int | None:
    """Tell how much memory is used; None where the kernel does not estimate what is available.

    Raises:
        CollectError: The file cannot be read, or holds something else.
    """
    path = proc / "meminfo"
    values = named_values(read_file(path) or "", ":")
    if "MemTotal" not in values or "MemAvailable" not in values:
        return None
    return max(0, parse_kibibytes(values["MemTotal"], path) - parse_kibibytes(values["MemAvailable"], path))


@functools.lru_cache(maxsize=64)
def cpus_of_list(text: str) -> frozenset[int]:
    """Expand a kernel list of CPUs such as `0-3,8`; empty when it is none."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            return frozenset()
        cpus.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return frozenset(cpus)
