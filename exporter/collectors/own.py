"""Own process: what the exporter itself costs, under the names that every Prometheus client uses.

Used in the sidecar. /proc/self comes in. No threads, no state. Read on the collector's interval, not by the
scrape.

Source: man 5 proc_pid_stat; Prometheus, "Writing client libraries", process metrics.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from pathlib import Path

from exporter.collectors.draft import Draft
from exporter.collectors.family import Collected, FamilySpec
from exporter.collectors.kernel_files import (
    FILE_REASONS,
    NOT_OFFERED,
    failure,
    parse_count,
    parse_signed,
    read_file,
    refuse,
)
from exporter.version import __version__

BUILD = FamilySpec(
    "exporter_build_info",
    "info",
    "The exporter's version, and those of what it runs on.",
    ("version", "python", "nvidia_ml_py"),
    source="constants; a label is absent where the package is not installed",
)
CPU = FamilySpec(
    "process_cpu_seconds_total",
    "counter",
    "CPU time of the exporter, user and system. Absent off Linux.",
    unit="seconds",
    source="/proc/self/stat utime + stime",
)
RESIDENT = FamilySpec(
    "process_resident_memory_bytes",
    "gauge",
    "Memory of the exporter that is in RAM. Absent off Linux.",
    unit="bytes",
    source="/proc/self/stat rss * page size",
)
VIRTUAL = FamilySpec(
    "process_virtual_memory_bytes",
    "gauge",
    "Address space of the exporter. Absent off Linux.",
    unit="bytes",
    source="/proc/self/stat vsize",
)
THREADS = FamilySpec(
    "process_threads",
    "gauge",
    "Threads of the exporter; one more for each collector that hangs. Absent off Linux.",
    source="/proc/self/stat num_threads",
)
START_TIME = FamilySpec(
    "process_start_time_seconds",
    "gauge",
    "When the exporter started, Unix time. Absent off Linux.",
    unit="seconds",
    source="/proc/stat btime + /proc/self/stat starttime",
)
OPEN_FDS = FamilySpec(
    "process_open_fds",
    "gauge",
    "File descriptors that the exporter has open. Absent off Linux.",
    source="/proc/self/fd",
)
MAX_FDS = FamilySpec(
    "process_max_fds",
    "gauge",
    "File descriptors that the exporter may have open. Absent off Linux and without a limit.",
    source="/proc/self/limits Max open files, soft",
)
SPECS = (BUILD, CPU, RESIDENT, VIRTUAL, THREADS, START_TIME, OPEN_FDS, MAX_FDS)

# Fields of /proc/self/stat after the program's name, which may hold spaces and parentheses itself.
_UTIME, _STIME, _THREADS, _STARTTIME, _VSIZE, _RSS = 11, 12, 17, 19, 20, 21


class OwnCollector:
    """Reads what the kernel knows about this process.

    Args:
        proc: Where procfs is mounted.
        ticks_per_second: The unit of the kernel's CPU times; None asks the system.
        page_size: Bytes; None asks the system.
    """

    name = "own"
    specs = SPECS
    reasons = FILE_REASONS

    def __init__(
        self,
        *,
        proc: Path = Path("/proc"),
        ticks_per_second: int | None = None,
        page_size: int | None = None,
    ) -> None:
        self._proc = proc
        self._self = proc / "self"
        self._hertz = ticks_per_second or os.sysconf("SC_CLK_TCK")
        self._page_size = page_size or os.sysconf("SC_PAGE_SIZE")
        self._build = build_labels()

    def collect(self) -> Collected:
        """Read the sources once; what the exporter is made of is known without any."""
        draft = Draft()
        draft.add(BUILD, 1, *self._build)
        for add in (self._add_stat, self._add_open, self._add_limit):
            with draft.part():
                add(draft)
        return draft.finish()

    def _add_stat(self, draft: Draft) -> None:
        path = self._self / "stat"
        text = read_file(path)
        if text is None:
            draft.unsupported(f"no {path}")
            return
        words = text.rpartition(")")[2].split()
        if len(words) <= _RSS:
            refuse(text, (path,), "the fields of a process")
        ticks = parse_count(words[_UTIME], path) + parse_count(words[_STIME], path)
        resident = parse_signed(words[_RSS], path) * self._page_size
        virtual, threads = parse_count(words[_VSIZE], path), parse_count(words[_THREADS], path)
        since_boot = parse_count(words[_STARTTIME], path) / self._hertz
        draft.add(CPU, ticks / self._hertz)
        draft.add(RESIDENT, max(0, resident))
        draft.add(VIRTUAL, virtual)
        draft.add(THREADS, threads)
        draft.add(START_TIME, self._boot_time() + since_boot)

    def _boot_time(self) -> int:
        path = self._proc / "stat"
        _, found, rest = (read_file(path) or "").partition("\nbtime ")
        if not found:
            refuse("", (path,), "a line btime")
        return parse_count(rest.partition("\n")[0], path)

    def _add_open(self, draft: Draft) -> None:
        path = self._self / "fd"
        try:
            with os.scandir(path) as entries:
                # The one that lists them is among them.
                draft.add(OPEN_FDS, max(0, sum(1 for _ in entries) - 1))
        except OSError as error:
            if error.errno not in NOT_OFFERED:
                raise failure(path, error) from error

    def _add_limit(self, draft: Draft) -> None:
        path = self._self / "limits"
        text = read_file(path)
        if text is None:
            return
        _, found, rest = text.partition("Max open files")
        soft = rest.split(maxsplit=1)[:1]
        if not found or not soft:
            refuse(text, (path,), "a line `Max open files`")
        if soft != ["unlimited"]:
            draft.add(MAX_FDS, parse_count(soft[0], path))


def build_labels() -> tuple[str, ...]:
    """Give the label values of `exporter_build_info`."""
    return __version__, platform.python_version(), _version_of("nvidia-ml-py", module="pynvml")


def _version_of(distribution: str, *, module: str) -> str:
    """Tell the version of a package by the name of the directory that its installer left; "" without one.

    `importlib.metadata` would tell the same, and load the package `email` for it: 2.5 MiB for one label.
    Source: Python Packaging User Guide, "Recording installed projects", the .dist-info directory.
    """
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        return ""
    name = re.compile(rf"{re.sub('[-_.]+', '[-_.]+', distribution)}-([^-]+)\.dist-info", re.IGNORECASE)
    try:
        names = sorted(os.listdir(Path(found.origin).parent))  # noqa: PTH208  # only their names are of use
    except OSError:
        return ""
    return next((version[1] for each in names if (version := name.fullmatch(each))), "")
