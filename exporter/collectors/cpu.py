"""CPU: where the machine's CPU time went, how busy it is, switches, interrupts and forks.

Used in the sidecar. /proc/stat comes in, read once per pass. No threads. It holds the previous pass, for the
utilization over its own interval and to keep CPU times from stepping back.

Source: Documentation/filesystems/proc.rst, "Miscellaneous kernel statistics in /proc/stat".
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from exporter.collectors.draft import Draft
from exporter.collectors.family import Collected, FamilySpec
from exporter.collectors.high_water import HighWater
from exporter.collectors.kernel_files import FILE_REASONS, parse_count, read_file, refuse

SECONDS = FamilySpec(
    "host_cpu_seconds_total",
    "counter",
    "CPU time since boot by mode, which adds up to all of it: user and nice are without the guests' time. Of all CPUs together, or by cpu with per_core.",
    ("cpu", "mode"),
    unit="seconds",
    source="/proc/stat cpu; held where the kernel steps back",
)
UTILIZATION = FamilySpec(
    "host_cpu_utilization_ratio",
    "gauge",
    "Share of all CPUs' time that was not idle or waiting for I/O, over the collector's last interval; time stolen by a hypervisor counts as used. Absent in the first pass.",
    unit="ratio",
    source="/proc/stat cpu, difference of two passes",
)
CONTEXT_SWITCHES = FamilySpec(
    "host_context_switches_total", "counter", "Context switches since boot.", source="/proc/stat ctxt"
)
INTERRUPTS = FamilySpec(
    "host_interrupts_total", "counter", "Interrupts served since boot.", source="/proc/stat intr"
)
FORKS = FamilySpec(
    "host_forks_total",
    "counter",
    "Processes and threads created since boot.",
    source="/proc/stat processes",
)
BOOT_TIME = FamilySpec(
    "host_boot_time_seconds",
    "gauge",
    "When the machine booted, Unix time.",
    unit="seconds",
    source="/proc/stat btime",
)
PROCS_RUNNING = FamilySpec(
    "host_procs_running",
    "gauge",
    "Threads that run or could run at the moment.",
    source="/proc/stat procs_running",
)
PROCS_BLOCKED = FamilySpec(
    "host_procs_blocked",
    "gauge",
    "Threads that wait for I/O at the moment.",
    source="/proc/stat procs_blocked",
)
SPECS = (
    SECONDS,
    UTILIZATION,
    CONTEXT_SWITCHES,
    INTERRUPTS,
    FORKS,
    BOOT_TIME,
    PROCS_RUNNING,
    PROCS_BLOCKED,
)

MODES = (
    "user",
    "nice",
    "system",
    "idle",
    "iowait",
    "irq",
    "softirq",
    "steal",
    "guest",
    "guest_nice",
)
"""The columns of a cpu line, in its order; old kernels have fewer, never less than four."""

LINES = (
    (CONTEXT_SWITCHES, "ctxt"),
    (INTERRUPTS, "intr"),
    (FORKS, "processes"),
    (BOOT_TIME, "btime"),
    (PROCS_RUNNING, "procs_running"),
    (PROCS_BLOCKED, "procs_blocked"),
)

REPLUGGED_SECONDS = 3.0
"""Idle time that falls by so much belongs to a CPU that was taken offline and begins anew (as node_exporter sees it)."""


class CpuCollector:
    """Reads /proc/stat.

    Args:
        proc: Where procfs is mounted.
        per_core: One series per CPU and mode instead of one per mode.
        ticks_per_second: The unit of the kernel's CPU times; None asks the system.
    """

    name = "cpu"
    specs = SPECS
    reasons = FILE_REASONS

    def __init__(
        self, *, proc: Path = Path("/proc"), per_core: bool = False, ticks_per_second: int | None = None
    ) -> None:
        self._path = proc / "stat"
        self._per_core = per_core
        self._hertz = ticks_per_second or os.sysconf("SC_CLK_TCK")
        self._marks = HighWater()
        self._before: Mapping[str, float] | None = None

    def collect(self) -> Collected:
        """Read the source once.

        Raises:
            CollectError: Nothing of it could be read.
        """
        draft = Draft()
        text = read_file(self._path)
        if text is None:
            draft.unsupported(f"no {self._path}")
            return draft.finish()
        lines: dict[str, str] = {}
        for line in text.splitlines():
            name, _, rest = line.partition(" ")
            lines[name] = rest
        with draft.part():
            times = self._settled("cpu", lines.get("cpu", ""))
            utilization = self._utilization(times)
            if not self._per_core:
                draft.add_family(SECONDS, {("", mode): seconds for mode, seconds in times.items()})
            if utilization is not None:
                draft.add(UTILIZATION, utilization)
        if self._per_core:
            with draft.part():
                draft.add_family(SECONDS, self._by_core(lines))
        for spec, name in LINES:
            with draft.part():
                first, _, _ = lines.get(name, "").partition(" ")
                draft.add(spec, parse_count(first, self._path, name))
        return draft.finish()

    def _by_core(self, lines: Mapping[str, str]) -> dict[tuple[str, ...], float]:
        samples: dict[tuple[str, ...], float] = {}
        for name, rest in lines.items():
            number = name.removeprefix("cpu")
            if name != number and number:
                parse_count(number, self._path, "cpu")
                for mode, seconds in self._settled(name, rest).items():
                    samples[number, mode] = seconds
        return samples

    def _settled(self, name: str, rest: str) -> dict[str, float]:
        words = rest.split()
        if len(words) < 4:
            refuse(rest, (self._path, name), "at least four CPU times")
        ticks = {mode: parse_count(word, self._path, name) for mode, word in zip(MODES, words, strict=False)}
        ticks["user"] = max(0, ticks["user"] - ticks.get("guest", 0))
        ticks["nice"] = max(0, ticks["nice"] - ticks.get("guest_nice", 0))
        seconds = {mode: count / self._hertz for mode, count in ticks.items()}
        if self._marks.hold((name, "idle"), seconds["idle"]) - seconds["idle"] >= REPLUGGED_SECONDS:
            for mode in MODES:
                self._marks.forget((name, mode))
        return {mode: self._marks.hold((name, mode), value) for mode, value in seconds.items()}

    def _utilization(self, times: Mapping[str, float]) -> float | None:
        before, self._before = self._before, times
        if before is None:
            return None
        spent = {mode: seconds - before.get(mode, 0.0) for mode, seconds in times.items()}
        total = sum(spent.values())
        if total <= 0 or min(spent.values()) < 0:  # no time has passed, or the counters began anew
            return None
        return 1 - min(1.0, (spent["idle"] + spent.get("iowait", 0.0)) / total)
