"""Version and resource use of the exporter's own process.

The process families are prometheus_client's, with the names that all Prometheus clients use.
"""

from __future__ import annotations

import platform
from importlib import metadata

from prometheus_client import ProcessCollector as ClientProcessCollector

from exporter.collectors.kernel_files import procfs, source
from exporter.families import Collected, FamilySpec
from exporter.version import __version__

BUILD_INFO = FamilySpec(
    name="exporter_build_info",
    type="info",
    labels=("version", "python", "nvidia_ml_py"),
    help=(
        "Versions of the exporter, of Python and of nvidia-ml-py. The label nvidia_ml_py is omitted if the package is not"
        " installed."
    ),
    source="package metadata",
)
CPU_SECONDS = FamilySpec(
    name="process_cpu_seconds_total",
    type="counter",
    unit="seconds",
    help="CPU time of the exporter, user and system.",
    absent="off Linux",
    source="/proc/self/stat",
)
RESIDENT_BYTES = FamilySpec(
    name="process_resident_memory_bytes",
    type="gauge",
    unit="bytes",
    help="Resident memory of the exporter.",
    absent="off Linux",
    source="/proc/self/stat rss",
)
VIRTUAL_BYTES = FamilySpec(
    name="process_virtual_memory_bytes",
    type="gauge",
    unit="bytes",
    help="Address space of the exporter.",
    absent="off Linux",
    source="/proc/self/stat vsize",
)
START_TIME = FamilySpec(
    name="process_start_time_seconds",
    type="gauge",
    unit="seconds",
    help="Unix time at which the exporter started.",
    absent="off Linux",
    source="/proc/self/stat starttime",
)
OPEN_FDS = FamilySpec(
    name="process_open_fds",
    type="gauge",
    help="Open file descriptors of the exporter.",
    absent="off Linux",
    source="/proc/self/fd",
)
MAX_FDS = FamilySpec(
    name="process_max_fds",
    type="gauge",
    help="Maximum number of open file descriptors of the exporter.",
    absent="off Linux",
    source="/proc/self/limits Max open files",
)
SPECS = (BUILD_INFO, CPU_SECONDS, RESIDENT_BYTES, VIRTUAL_BYTES, START_TIME, OPEN_FDS, MAX_FDS)


class OwnCollector:
    """Collector of the exporter's own process."""

    name = "own"
    specs = SPECS

    def __init__(self) -> None:
        self._process = ClientProcessCollector(proc=str(procfs()), registry=None)
        try:
            self._pynvml = metadata.version("nvidia-ml-py")
        except metadata.PackageNotFoundError:
            self._pynvml = ""

    def collect(self) -> Collected:
        """Read the resource use of the exporter's process and add the versions."""
        collected = Collected()
        collected.add(BUILD_INFO, 1, __version__, platform.python_version(), self._pynvml)
        with source(collected, "/proc/self"):
            collected.extend(self._process.collect())
        return collected
