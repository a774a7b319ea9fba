"""System: the exporter's own process, and how far the kernel believes its clock to be off.

Used in the sidecar. The own process is read by prometheus_client, under the names that every Prometheus client uses.
`adjtimex` is asked without changing anything: ranks of several nodes are compared by time, and a clock that is off
makes stragglers out of innocents. No threads, no state.

Source: Prometheus, "Writing client libraries", process metrics; man 2 adjtimex.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import ProcessCollector

from exporter.collectors.kernel_files import procfs, source
from exporter.errors import CollectError
from exporter.families import Collected, FamilySpec, family
from exporter.version import __version__

BUILD = family(
    "exporter_build_info",
    "The exporter's version, and those of what it runs on.",
    "constants; a label is absent where the package is not installed",
    "version",
    "python",
    "nvidia_ml_py",
)


def _own(name: str, help_text: str, field: str) -> FamilySpec:
    return family(f"process_{name}", f"{help_text} Absent off Linux.", field)


OWN_SPECS = (
    BUILD,
    _own("cpu_seconds_total", "CPU time of the exporter, user and system.", "/proc/self/stat"),
    _own("resident_memory_bytes", "Memory of the exporter that is in RAM.", "/proc/self/stat rss"),
    _own("virtual_memory_bytes", "Address space of the exporter.", "/proc/self/stat vsize"),
    _own(
        "start_time_seconds",
        "When the exporter started, Unix time.",
        "/proc/self/stat starttime",
    ),
    _own("open_fds", "File descriptors that the exporter has open.", "/proc/self/fd"),
    _own("max_fds", "File descriptors that the exporter may have open.", "/proc/self/limits Max open files"),
)
OFFSET = family(
    "host_time_offset_seconds",
    "What the kernel still has to correct the clock by, as its time daemon told it. Absent off Linux, and where a sandbox forbids the call.",
    "adjtimex offset",
)
SYNCED = family(
    "host_time_synced",
    "Whether a time daemon keeps the clock (1) or not (0). Absent off Linux, and where a sandbox forbids the call.",
    "adjtimex state is not TIME_ERROR",
)
CLOCK_SPECS = (OFFSET, SYNCED)
SPECS = (*OWN_SPECS, *CLOCK_SPECS)

TIME_ERROR = 5
STA_NANO = 0x2000


class OwnCollector:
    """Tells what the exporter is and what it uses."""

    name = "own"
    specs = OWN_SPECS

    def __init__(self) -> None:
        self._process = ProcessCollector(proc=str(procfs()), registry=None)
        self._build = build_labels()

    def collect(self) -> Collected:
        """Read the sources once; what the exporter is made of is known without any."""
        collected = Collected()
        collected.add(BUILD, 1, *self._build)
        with source(collected, "/proc/self"):
            collected.extend(self._process.collect())
        return collected


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
        names = sorted(entry.name for entry in Path(found.origin).parent.iterdir())
    except OSError:
        return ""
    return next((version[1] for each in names if (version := name.fullmatch(each))), "")


class _Timex(ctypes.Structure):
    """Struct timex of the C library; the fields after `status` are only room, for which there is enough."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 40),
    )


@dataclass(frozen=True, slots=True)
class ClockReading:
    """The kernel's opinion of its clock.

    Attributes:
        offset_seconds: What is left to correct.
        synced: Whether a time daemon keeps it.
    """

    offset_seconds: float
    synced: bool


def ask_kernel() -> ClockReading | None:
    """Call adjtimex with nothing to set; None where the C library has no such function.

    Raises:
        OSError: The system refuses the call.
    """
    adjtimex = getattr(ctypes.CDLL(None, use_errno=True), "adjtimex", None)
    if adjtimex is None:
        return None
    timex = _Timex()
    state = adjtimex(ctypes.byref(timex))
    if state < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    unit = 1e-9 if timex.status & STA_NANO else 1e-6
    return ClockReading(timex.offset * unit, state != TIME_ERROR)


class ClockCollector:
    """Asks the kernel about its clock.

    Args:
        ask: Gives its answer.
    """

    name = "clock"
    specs = CLOCK_SPECS

    def __init__(self, *, ask: Callable[[], ClockReading | None] = ask_kernel) -> None:
        self._ask = ask

    def collect(self) -> Collected:
        """Ask once."""
        collected = Collected()
        try:
            reading = self._ask()
        except PermissionError as error:
            message = f"adjtimex: {error.strerror}; a container may need CAP_SYS_TIME in its seccomp profile to ask for the time"
            collected.fail(CollectError(message, reason="permission"))
            return collected
        except OSError as error:
            collected.fail(CollectError(f"adjtimex: {error.strerror}", reason="unreadable"))
            return collected
        if reading is None:
            collected.unsupported.append("no adjtimex in the C library")
            return collected
        collected.add(OFFSET, reading.offset_seconds)
        collected.add(SYNCED, float(reading.synced))
        return collected
