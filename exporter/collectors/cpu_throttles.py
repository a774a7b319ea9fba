"""CPU throttling: how often cores and packages slowed down because they were too hot.

Used in the sidecar. thermal_throttle of /sys comes in (Intel only). No threads. It holds the count of each
core and package, so that the sum does not fall when a CPU goes offline.

Source: arch/x86/kernel/cpu/mce/therm_throt.c. Siblings show the count of what they share, so each core and
each package is counted once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from exporter.collectors.cpu_topology import core_of, package_of
from exporter.collectors.draft import Draft
from exporter.collectors.family import Collected, FamilySpec
from exporter.collectors.kernel_files import FILE_REASONS, numbered_entries, parse_count, read_file

THROTTLES = FamilySpec(
    "host_cpu_throttles_total",
    "counter",
    "Times that a core or a package slowed down because of its temperature, summed over the machine. Absent where the CPU does not count them.",
    ("level",),
    source="/sys/devices/system/cpu/cpu*/thermal_throttle/{core,package}_throttle_count",
)
SPECS = (THROTTLES,)

LEVELS = {"core": core_of, "package": package_of}


class CpuThrottlesCollector:
    """Reads the throttle counts of all CPUs.

    Args:
        sys: Where sysfs is mounted.
    """

    name = "cpu_throttles"
    specs = SPECS
    reasons = FILE_REASONS

    def __init__(self, *, sys: Path = Path("/sys")) -> None:
        self._cpus = sys / "devices/system/cpu"
        self._counts: dict[str, dict[str, int]] = {level: {} for level in LEVELS}

    def collect(self) -> Collected:
        """Read the sources once.

        Raises:
            CollectError: Nothing of them could be read.
        """
        draft = Draft()
        sums: dict[tuple[str, ...], float] = {}
        missing = []
        cpus = [cpu for _, cpu in numbered_entries(self._cpus, "cpu")]
        for level in LEVELS:
            with draft.part():
                counts = self._read(level, cpus)
                if counts:
                    sums[level,] = sum(counts.values())
                else:
                    missing.append(level)
        draft.add_family(THROTTLES, sums)
        if missing:
            draft.unsupported(f"no thermal_throttle of {' and '.join(missing)} in {self._cpus}")
        return draft.finish()

    def _read(self, level: str, cpus: Sequence[Path]) -> Mapping[str, int]:
        counts = self._counts[level]
        for cpu in cpus:
            path = cpu / "thermal_throttle" / f"{level}_throttle_count"
            text = read_file(path)
            place = None if text is None else LEVELS[level](cpu)
            if text is not None and place is not None:
                counts[place] = parse_count(text.strip(), path)
        return counts
