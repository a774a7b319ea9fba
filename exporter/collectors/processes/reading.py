"""Reading of a process: state, CPU time, memory and descriptors by psutil, and I/O from /proc/<pid>/io."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from exporter.collectors.kernel_files import from_psutil, named_counts, parse, procfs, read_optional
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
    """Return None if the state is not readable. From the first other value that is not readable on, the values are None."""
    with process.oneshot():
        try:
            state = process.status().replace("-", "_")
            times = process.cpu_times()
        except psutil.Error:
            return None
        usage = Usage(user_seconds=times.user, system_seconds=times.system)
        threads = resident = descriptors = None
        try:
            threads = process.num_threads()
            resident = process.memory_info().rss
            descriptors = process.num_fds()
            usage.read_bytes, usage.written_bytes = _read_io(process.pid)
        except (psutil.Error, PermissionError):
            # The process has just ended or belongs to a different user. The values that are not read yet stay None.
            pass
        return ProcessReading(
            state=state, usage=usage, threads=threads, resident_bytes=resident, open_descriptors=descriptors
        )


def _read_io(pid: int) -> tuple[int | None, int | None]:
    """Return the bytes read from and written to storage; None without I/O accounting. Raises OSError and CollectError.

    psutil also requires counts that are not used here, one of which gVisor named differently until March 2026.
    """
    path = procfs() / str(pid) / "io"
    text = read_optional(path)
    return parse(path, _bytes_of_io, text) if text else (None, None)


def _bytes_of_io(text: str) -> tuple[int, int]:
    counts = named_counts(text)
    return counts["read_bytes"], counts["write_bytes"]
