"""System: the exporter's own process, and whether a time daemon keeps the kernel's clock.

Used in the sidecar. prometheus_client reads the own process, under the names that every Prometheus client uses.
`adjtimex` is asked without changing anything: ranks of several nodes are compared by time, and a clock that is off
makes stragglers out of innocents. Source: man 2 adjtimex.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from importlib import metadata

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
    _own("start_time_seconds", "When the exporter started, Unix time.", "/proc/self/stat starttime"),
    _own("open_fds", "File descriptors that the exporter has open.", "/proc/self/fd"),
    _own("max_fds", "File descriptors that the exporter may have open.", "/proc/self/limits Max open files"),
)
SYNCED = family(
    "host_time_synced",
    "Whether a time daemon keeps the clock (1) or not (0). Absent off Linux, and where a sandbox forbids the call.",
    "adjtimex state is not TIME_ERROR",
)
SPECS = (*OWN_SPECS, SYNCED)

TIME_ERROR = 5


class OwnCollector:
    """Tells what the exporter is and what it uses."""

    name = "own"
    specs = OWN_SPECS

    def __init__(self) -> None:
        self._process = ProcessCollector(proc=str(procfs()), registry=None)
        try:
            self._pynvml = metadata.version("nvidia-ml-py")
        except metadata.PackageNotFoundError:
            self._pynvml = ""

    def collect(self) -> Collected:
        """Read the sources once; what the exporter is made of is known without any."""
        collected = Collected()
        collected.add(BUILD, 1, __version__, platform.python_version(), self._pynvml)
        with source(collected, "/proc/self"):
            collected.extend(self._process.collect())
        return collected


def ask_kernel() -> int | None:
    """Call adjtimex with nothing to set and return the clock's state; None where the C library has no such function.

    Raises:
        OSError: The system refuses the call.
    """
    adjtimex = getattr(ctypes.CDLL(None, use_errno=True), "adjtimex", None)
    if adjtimex is None:
        return None
    state: int = adjtimex(ctypes.create_string_buffer(1024))  # room enough for a struct timex of zeros
    if state < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return state


class ClockCollector:
    """Asks the kernel about its clock."""

    name = "clock"
    specs = (SYNCED,)

    def __init__(self, *, ask: Callable[[], int | None] = ask_kernel) -> None:
        self._ask = ask

    def collect(self) -> Collected:
        """Ask once."""
        collected = Collected()
        with source(collected, "adjtimex"):
            try:
                state = self._ask()
            except PermissionError as error:
                message = f"adjtimex: {error.strerror}; a container may need CAP_SYS_TIME in its seccomp profile to ask for the time"
                raise CollectError(message, reason="permission") from error
            if state is None:
                collected.unsupported.append("no adjtimex in the C library")
            else:
                collected.add(SYNCED, int(state != TIME_ERROR))
        return collected
