"""Reading of a process by psutil."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from exporter.collectors.kernel_files import from_psutil
from exporter.collectors.processes.totals import Usage


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """State and resources of a process; None for an unreadable value."""

    state: str
    usage: Usage
    threads: int | None = None
    resident_bytes: int | None = None
    open_descriptors: int | None = None

    @property
    def has_ended(self) -> bool:
        """True if the process is a zombie or dead, and holds no resources."""
        return self.state in {"zombie", "dead"}


def read_process(process: psutil.Process) -> ProcessReading | None:
    """Read a process. Returns None if the process has ended. Raises OSError and CollectError."""
    return from_psutil(f"process {process.pid}", lambda: _read(process))


def _read(process: psutil.Process) -> ProcessReading | None:
    with process.oneshot():
        try:
            state = process.status().replace("-", "_")
            times = process.cpu_times()
        except psutil.Error:
            return None
        usage = Usage(times.user, times.system)
        threads = resident = descriptors = None
        try:
            threads = process.num_threads()
            resident = process.memory_info().rss
            descriptors = process.num_fds()
            if hasattr(process, "io_counters"):  # not on a kernel without /proc/<pid>/io
                io = process.io_counters()
                usage.read_bytes, usage.written_bytes = io.read_bytes, io.write_bytes
        except psutil.Error:  # the process has just ended or belongs to a different user
            pass
        return ProcessReading(state, usage, threads, resident, descriptors)
