"""CPU frequency: how fast the CPUs run at the moment.

Used in the sidecar. cpufreq of /sys comes in, on machines without it (most virtual ones) /proc/cpuinfo. No
threads, no state. Reading costs the kernel something per CPU, on some drivers an interrupt to it: a subject
for a slow interval.
"""

from __future__ import annotations

import re
from pathlib import Path

from exporter.collectors.draft import Draft
from exporter.collectors.family import Collected, FamilySpec
from exporter.collectors.kernel_files import (
    FILE_REASONS,
    numbered_entries,
    parse_count,
    parse_decimal,
    read_file,
)

FREQUENCY = FamilySpec(
    "host_cpu_frequency_hertz",
    "gauge",
    "Present frequency: the mean of all CPUs, or by cpu with per_core. Absent where neither cpufreq nor the CPU tells it.",
    ("cpu",),
    unit="hertz",
    source="/sys/devices/system/cpu/cpu*/cpufreq/scaling_cur_freq, else /proc/cpuinfo cpu MHz",
)
SPECS = (FREQUENCY,)

_CPUINFO = re.compile(r"^(processor|cpu MHz)\s*: *(.*?)\s*$", re.MULTILINE)


class CpuFrequencyCollector:
    """Reads each CPU's frequency.

    Args:
        proc: Where procfs is mounted.
        sys: Where sysfs is mounted.
        per_core: One series per CPU instead of their mean.
    """

    name = "cpu_frequency"
    specs = SPECS
    reasons = FILE_REASONS

    def __init__(
        self, *, proc: Path = Path("/proc"), sys: Path = Path("/sys"), per_core: bool = False
    ) -> None:
        self._cpus = sys / "devices/system/cpu"
        self._cpuinfo = proc / "cpuinfo"
        self._per_core = per_core

    def collect(self) -> Collected:
        """Read the sources once.

        Raises:
            CollectError: Nothing of them could be read.
        """
        draft = Draft()
        hertz = self._from_cpufreq(draft)
        if not hertz:
            with draft.part():
                hertz = self._from_cpuinfo()
        if not hertz and not draft.failed:
            draft.unsupported("no CPU frequencies: neither cpufreq nor /proc/cpuinfo tells them")
        elif self._per_core:
            draft.add_family(FREQUENCY, {(cpu,): value for cpu, value in hertz.items()})
        elif hertz:
            draft.add(FREQUENCY, sum(hertz.values()) / len(hertz), "")
        return draft.finish()

    def _from_cpufreq(self, draft: Draft) -> dict[str, float]:
        hertz: dict[str, float] = {}
        with draft.part():
            for number, cpu in numbered_entries(self._cpus, "cpu"):
                path = cpu / "cpufreq/scaling_cur_freq"
                with draft.part():
                    text = read_file(path)
                    # A driver that does not know says so in words.
                    if text is not None and text.strip() != "<unknown>":
                        hertz[str(number)] = parse_count(text.strip(), path) * 1e3
        return hertz

    def _from_cpuinfo(self) -> dict[str, float]:
        hertz: dict[str, float] = {}
        cpu = ""
        for name, value in _CPUINFO.findall(read_file(self._cpuinfo) or ""):
            if name == "processor":
                cpu = str(parse_count(value, self._cpuinfo))
            else:
                hertz[cpu] = parse_decimal(value, self._cpuinfo) * 1e6
        return hertz
