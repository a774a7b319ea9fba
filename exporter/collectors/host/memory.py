"""Memory, swap, page faults, out-of-memory kills and /dev/shm.

DataLoader workers pass batches through /dev/shm; a full /dev/shm terminates the workers with SIGBUS.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from exporter.collectors.kernel_files import (
    HighWater,
    counts_in,
    from_psutil,
    named_counts,
    procfs,
    read_file,
    source,
)
from exporter.families import Collected, FamilySpec

TOTAL = FamilySpec(
    name="host_memory_total_bytes",
    type="gauge",
    unit="bytes",
    help="Memory that the kernel can use: physical memory without reserved areas and the kernel's code.",
    source="/proc/meminfo MemTotal",
)
AVAILABLE = FamilySpec(
    name="host_memory_available_bytes",
    type="gauge",
    unit="bytes",
    help="Estimate of the memory available to new processes without swapping.",
    source="/proc/meminfo MemAvailable",
    details=("The estimate is the kernel's; before Linux 3.14, it is psutil's.",),
)
USED = FamilySpec(
    name="host_memory_used_bytes",
    type="gauge",
    unit="bytes",
    help="Memory that is not available to new processes: total - available.",
    source="/proc/meminfo MemTotal - MemAvailable",
)
BUFFERS = FamilySpec(
    name="host_memory_buffers_bytes",
    type="gauge",
    unit="bytes",
    help="Cached blocks of raw devices.",
    source="/proc/meminfo Buffers",
)
CACHED = FamilySpec(
    name="host_memory_cached_bytes",
    type="gauge",
    unit="bytes",
    help="Cached pages of files, shared memory included.",
    source="/proc/meminfo Cached",
)
SHARED = FamilySpec(
    name="host_memory_shared_bytes",
    type="gauge",
    unit="bytes",
    help="Shared memory and tmpfs, which hold the batches of DataLoader workers. Part of host_memory_cached_bytes.",
    source="/proc/meminfo Shmem",
)
ANON = FamilySpec(
    name="host_memory_anon_bytes",
    type="gauge",
    unit="bytes",
    help="Anonymous memory of processes: memory that is not backed by a file.",
    source="/proc/meminfo AnonPages",
)
SLAB = FamilySpec(
    name="host_memory_slab_bytes",
    type="gauge",
    unit="bytes",
    help="Kernel memory allocated from slab caches.",
    source="/proc/meminfo Slab",
)
SWAP_TOTAL = FamilySpec(
    name="host_swap_total_bytes",
    type="gauge",
    unit="bytes",
    help="Swap space; 0 on a machine without swap.",
    source="/proc/meminfo SwapTotal",
)
SWAP_USED = FamilySpec(
    name="host_swap_used_bytes",
    type="gauge",
    unit="bytes",
    help="Swap space in use.",
    source="/proc/meminfo SwapTotal - SwapFree",
)
SWAP_IN = FamilySpec(
    name="host_swap_in_bytes_total",
    type="counter",
    unit="bytes",
    help="Memory read back from swap since boot.",
    absent="on kernels without swap",
    source="/proc/vmstat pswpin * page size",
)
SWAP_OUT = FamilySpec(
    name="host_swap_out_bytes_total",
    type="counter",
    unit="bytes",
    help="Memory written to swap since boot.",
    absent="on kernels without swap",
    source="/proc/vmstat pswpout * page size",
)
FAULTS = FamilySpec(
    name="host_vm_page_faults_total",
    type="counter",
    labels=("kind",),
    help="Page faults since boot by kind: major (with a read from storage), minor (without).",
    source="/proc/vmstat pgmajfault, pgfault - pgmajfault",
)
OOM_KILLS = FamilySpec(
    name="host_vm_oom_kills_total",
    type="counter",
    help=(
        "Processes that the out-of-memory killer has killed since boot, including kills at the limit of a"
        " cgroup."
    ),
    absent="on kernels before 4.13",
    source="/proc/vmstat oom_kill",
)
SHM_SIZE = FamilySpec(
    name="host_shm_size_bytes",
    type="gauge",
    unit="bytes",
    help="Size of /dev/shm in the exporter's mount namespace.",
    absent="where /dev/shm is not mounted",
    source="statvfs /dev/shm f_blocks * f_frsize",
)
SHM_USED = FamilySpec(
    name="host_shm_used_bytes",
    type="gauge",
    unit="bytes",
    help="Used space of /dev/shm in the exporter's mount namespace.",
    absent="where /dev/shm is not mounted",
    source="statvfs /dev/shm (f_blocks - f_bfree) * f_frsize",
)
SPECS = (
    TOTAL,
    AVAILABLE,
    USED,
    BUFFERS,
    CACHED,
    SHARED,
    ANON,
    SLAB,
    SWAP_TOTAL,
    SWAP_USED,
    SWAP_IN,
    SWAP_OUT,
    FAULTS,
    OOM_KILLS,
    SHM_SIZE,
    SHM_USED,
)


class MemoryCollector:
    """Collector of /proc/meminfo, /proc/vmstat and /dev/shm."""

    name = "memory"
    specs = SPECS

    def __init__(self, *, shm: Path = Path("/dev/shm")) -> None:  # noqa: S108 - only the size of the filesystem is read
        self._proc = procfs()
        self._shm = shm
        self._highest = HighWater()

    def collect(self) -> Collected:
        """Read the memory, the statistics of virtual memory, and the space in /dev/shm."""
        collected = Collected()
        with source(collected, self._proc / "meminfo"):
            self._add_memory(collected, self._proc / "meminfo")
        with source(collected, self._proc / "vmstat"):
            self._add_vmstat(collected, self._proc / "vmstat")
        with source(collected, self._shm):
            shm = os.statvfs(self._shm)
            collected.add(SHM_SIZE, shm.f_blocks * shm.f_frsize)
            collected.add(SHM_USED, (shm.f_blocks - shm.f_bfree) * shm.f_frsize)
        return collected

    def _add_memory(self, collected: Collected, path: Path) -> None:
        memory = from_psutil(path, psutil.virtual_memory)
        kibibytes = counts_in(path, "Cached", "AnonPages", "SwapTotal", "SwapFree")
        collected.add(TOTAL, memory.total)
        collected.add(AVAILABLE, memory.available)
        collected.add(USED, max(0, memory.total - memory.available))
        collected.add(BUFFERS, memory.buffers)
        collected.add(CACHED, kibibytes["Cached"] * 1024)
        collected.add(SHARED, memory.shared)
        collected.add(ANON, kibibytes["AnonPages"] * 1024)
        collected.add(SLAB, memory.slab)
        collected.add(SWAP_TOTAL, kibibytes["SwapTotal"] * 1024)
        collected.add(SWAP_USED, max(0, kibibytes["SwapTotal"] - kibibytes["SwapFree"]) * 1024)

    def _add_vmstat(self, collected: Collected, path: Path) -> None:
        counts = counts_in(path, "pgfault", "pgmajfault")
        major = counts["pgmajfault"]
        # The kernel does not update the two counters at the same time, so that their difference may decrease.
        minor = self._highest.hold("minor faults", max(0, counts["pgfault"] - major))
        collected.add(FAULTS, minor, "minor")
        collected.add(FAULTS, major, "major")
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        for spec, name, factor in (
            (SWAP_IN, "pswpin", page_bytes),
            (SWAP_OUT, "pswpout", page_bytes),
            (OOM_KILLS, "oom_kill", 1),
        ):
            if name in counts:
                collected.add(spec, counts[name] * factor)
            else:
                collected.unsupported.append(f"{path}: no {name}")


def read_oom_kills(proc: Path = Path("/proc")) -> int | None:
    """Return the number of out-of-memory kills since boot, or None if the kernel does not count them.

    An increase is evidence for the reason why a process of the job has ended. The kills of the whole machine are counted, because
    an exporter in a separate container cannot read the cgroup of the job.
    """
    try:
        return named_counts(read_file(proc / "vmstat")).get("oom_kill")
    except OSError:
        return None
