"""Memory: what it is used for, swap, page faults, out-of-memory kills, /dev/shm.

Used in the sidecar. psutil reads /proc/meminfo; what it does not tell comes from the same file and /proc/vmstat.
DataLoader workers hand over batches through /dev/shm and die of a bus error when it is full; Docker gives a container
64 MiB of it.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from exporter.collectors.kernel_files import HighWater, named_counts, procfs, read_file, source
from exporter.families import Collected, FamilySpec, family


def _size(name: str, help_text: str, field: str) -> FamilySpec:
    return family(f"host_{name}_bytes", help_text, f"/proc/meminfo {field}")


OF_PSUTIL = {
    _size("memory_total", "Memory that the kernel can use.", "MemTotal"): "total",
    _size(
        "memory_available",
        "Memory that new work could take without swapping, as the kernel (before 3.14: psutil) estimates it.",
        "MemAvailable",
    ): "available",
    _size("memory_buffers", "Cached blocks of raw devices.", "Buffers"): "buffers",
    _size(
        "memory_shared",
        "Shared memory and tmpfs, which also holds what DataLoader workers hand over.",
        "Shmem",
    ): "shared",
    _size("memory_slab", "Memory of the kernel's own objects.", "Slab"): "slab",
}
USED = _size(
    "memory_used", "Memory that new work could not take: total - available.", "MemTotal - MemAvailable"
)
OF_MEMINFO = {
    _size("memory_cached", "Cached pages of files, shared memory included.", "Cached"): "Cached",
    _size("memory_anon", "Memory of processes that no file backs.", "AnonPages"): "AnonPages",
    _size("swap_total", "Swap space; 0 without any.", "SwapTotal"): "SwapTotal",
}
SWAP_USED = _size("swap_used", "Swap space in use.", "SwapTotal - SwapFree")
FAULTS = family(
    "host_vm_page_faults_total",
    "Page faults since boot: major ones had to read from a disk, minor ones had not.",
    "/proc/vmstat pgmajfault, pgfault - pgmajfault",
    "kind",
)
SWAP_IN = family(
    "host_swap_in_bytes_total",
    "Memory read back from swap since boot. Absent on kernels without swap.",
    "/proc/vmstat pswpin * page size",
)
SWAP_OUT = family(
    "host_swap_out_bytes_total",
    "Memory written to swap since boot. Absent on kernels without swap.",
    "/proc/vmstat pswpout * page size",
)
OOM_KILLS = family(
    "host_vm_oom_kills_total",
    "Processes killed because memory ran out, those at a cgroup's limit included. Absent on kernels before 4.13.",
    "/proc/vmstat oom_kill",
)
OF_VMSTAT = {
    SWAP_IN: ("pswpin", os.sysconf("SC_PAGE_SIZE")),
    SWAP_OUT: ("pswpout", os.sysconf("SC_PAGE_SIZE")),
    OOM_KILLS: ("oom_kill", 1),
}
SHM_SIZE = family(
    "host_shm_size_bytes",
    "Size of /dev/shm as the exporter sees it. Absent where there is none.",
    "statvfs /dev/shm f_blocks * f_frsize",
)
SHM_USED = family(
    "host_shm_used_bytes",
    "Used part of /dev/shm as the exporter sees it. Absent where there is none.",
    "statvfs /dev/shm (f_blocks - f_bfree) * f_frsize",
)
SPECS = (*OF_PSUTIL, USED, *OF_MEMINFO, SWAP_USED, *OF_VMSTAT, FAULTS, SHM_SIZE, SHM_USED)


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
            for spec, (name, unit) in OF_VMSTAT.items():
                if name in counts:
                    collected.add(spec, counts[name] * unit)
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
