"""Memory: what it is used for, swap, page faults, out-of-memory kills, /dev/shm.

DataLoader workers hand over batches through /dev/shm and die of a bus error when it is full.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from exporter.collectors.kernel_files import HighWater, named_counts, procfs, read_file, source
from exporter.families import Collected, rows, table

OF_PSUTIL = rows("""
host_memory_total_bytes [total]: Memory that the kernel can use. <- /proc/meminfo MemTotal
host_memory_available_bytes [available]: Memory that new work could take without swapping, as the kernel
    (before 3.14: psutil) estimates it. <- /proc/meminfo MemAvailable
host_memory_buffers_bytes [buffers]: Cached blocks of raw devices. <- /proc/meminfo Buffers
host_memory_shared_bytes [shared]: Shared memory and tmpfs, which also holds what DataLoader workers hand
    over. <- /proc/meminfo Shmem
host_memory_slab_bytes [slab]: Memory of the kernel's own objects. <- /proc/meminfo Slab
""")
OF_MEMINFO = rows("""
host_memory_cached_bytes [Cached]: Cached pages of files, shared memory included. <- /proc/meminfo Cached
host_memory_anon_bytes [AnonPages]: Memory of processes that no file backs. <- /proc/meminfo AnonPages
host_swap_total_bytes [SwapTotal]: Swap space; 0 without any. <- /proc/meminfo SwapTotal
""")
OF_VMSTAT = rows("""
host_swap_in_bytes_total [pswpin]: Memory read back from swap since boot. Absent on kernels without swap. <-
    /proc/vmstat pswpin * page size
host_swap_out_bytes_total [pswpout]: Memory written to swap since boot. Absent on kernels without swap. <-
    /proc/vmstat pswpout * page size
host_vm_oom_kills_total [oom_kill]: Processes killed because memory ran out, those at a cgroup's limit
    included. Absent on kernels before 4.13. <- /proc/vmstat oom_kill
""")
(USED, SWAP_USED, FAULTS, SHM_SIZE, SHM_USED) = OTHERS = table("""
host_memory_used_bytes: Memory that new work could not take: total - available. <- /proc/meminfo MemTotal -
    MemAvailable
host_swap_used_bytes: Swap space in use. <- /proc/meminfo SwapTotal - SwapFree
host_vm_page_faults_total{kind}: Page faults since boot: major ones had to read from a disk, minor ones had
    not. <- /proc/vmstat pgmajfault, pgfault - pgmajfault
host_shm_size_bytes: Size of /dev/shm as the exporter sees it. Absent where there is none. <- statvfs
    /dev/shm f_blocks * f_frsize
host_shm_used_bytes: Used part of /dev/shm as the exporter sees it. Absent where there is none. <- statvfs
    /dev/shm (f_blocks - f_bfree) * f_frsize
""")
SPECS = (*OF_PSUTIL, *OF_MEMINFO, *OF_VMSTAT, *OTHERS)


class MemoryCollector:
    """Reads what memory is used for."""

    name = "memory"
    specs = SPECS

    def __init__(self, *, shm: Path = Path("/dev/shm")) -> None:  # noqa: S108 - looked at, never written to
        self._proc = procfs()
        self._shm = shm
        self._highest = HighWater()

    def collect(self) -> Collected:
        """Read the sources once."""
        collected = Collected()
        path = self._proc / "meminfo"
        with source(collected, path):
            memory = psutil.virtual_memory()
            for spec, field in OF_PSUTIL.items():
                collected.add(spec, getattr(memory, field))
            collected.add(USED, max(0, memory.total - memory.available))
            kibibytes = named_counts(read_file(path))
            for spec, name in OF_MEMINFO.items():
                collected.add(spec, kibibytes[name] * 1024)
            collected.add(SWAP_USED, max(0, kibibytes["SwapTotal"] - kibibytes["SwapFree"]) * 1024)
        path = self._proc / "vmstat"
        with source(collected, path):
            counts = named_counts(read_file(path))
            major = counts["pgmajfault"]
            collected.add(
                FAULTS, self._highest.hold("minor faults", max(0, counts["pgfault"] - major)), "minor"
            )
            collected.add(FAULTS, major, "major")
            for spec, name in OF_VMSTAT.items():
                if name in counts:
                    pages = spec.unit == "bytes"
                    collected.add(spec, counts[name] * (os.sysconf("SC_PAGE_SIZE") if pages else 1))
                else:
                    collected.unsupported.append(f"{path}: no {name}")
        with source(collected, self._shm):
            found = os.statvfs(self._shm)
            collected.add(SHM_SIZE, found.f_blocks * found.f_frsize)
            collected.add(SHM_USED, (found.f_blocks - found.f_bfree) * found.f_frsize)
        return collected


def oom_kills(proc: Path = Path("/proc")) -> float | None:
    """Count the processes that the kernel has killed for memory since boot; None where that is not known.

    The machine's own count tells why a process of the job is gone: a container's cannot be seen from the next one.
    """
    try:
        return named_counts(read_file(proc / "vmstat")).get("oom_kill")
    except OSError:
        return None
