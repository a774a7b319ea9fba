"""Memory: what it is used for, swap, page faults, out-of-memory kills, /dev/shm, and with `details` NUMA nodes.

Used in the sidecar. psutil reads /proc/meminfo; what it does not tell comes from the same file, /proc/vmstat and
/sys/devices/system/node. No threads. It holds the highest count of minor faults, a difference of two counters.

DataLoader workers hand over batches through /dev/shm and die of a bus error when it is full; Docker gives a container
64 MiB of it.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from exporter.collectors.kernel_files import (
    HighWater,
    named_values,
    numbered_entries,
    parse_count,
    parse_kibibytes,
    procfs,
    read_existing,
    source,
)
from exporter.families import Collected, FamilySpec, family

TOTAL = family("host_memory_total_bytes", "Memory that the kernel can use.", "/proc/meminfo MemTotal")
AVAILABLE = family(
    "host_memory_available_bytes",
    "Memory that new work could take without swapping, as the kernel (before 3.14: psutil) estimates it.",
    "/proc/meminfo MemAvailable",
)
USED = family(
    "host_memory_used_bytes",
    "Memory that new work could not take: total - available.",
    "/proc/meminfo MemTotal - MemAvailable",
)
FREE = family(
    "host_memory_free_bytes",
    "Memory that holds nothing at all; small on a healthy machine.",
    "/proc/meminfo MemFree",
)
BUFFERS = family("host_memory_buffers_bytes", "Cached blocks of raw devices.", "/proc/meminfo Buffers")
SHARED = family(
    "host_memory_shared_bytes",
    "Shared memory and tmpfs, which also holds what DataLoader workers hand over.",
    "/proc/meminfo Shmem",
)
SLAB = family("host_memory_slab_bytes", "Memory of the kernel's own objects.", "/proc/meminfo Slab")
CACHED = family(
    "host_memory_cached_bytes", "Cached pages of files, shared memory included.", "/proc/meminfo Cached"
)
ANON = family("host_memory_anon_bytes", "Memory of processes that no file backs.", "/proc/meminfo AnonPages")
SWAP_TOTAL = family("host_swap_total_bytes", "Swap space; 0 without any.", "/proc/meminfo SwapTotal")
SWAP_USED = family("host_swap_used_bytes", "Swap space in use.", "/proc/meminfo SwapTotal - SwapFree")
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
FAULTS = family(
    "host_vm_page_faults_total",
    "Page faults since boot: major ones had to read from a disk, minor ones had not.",
    "/proc/vmstat pgmajfault, pgfault - pgmajfault",
    "kind",
)
OOM_KILLS = family(
    "host_vm_oom_kills_total",
    "Processes killed because memory ran out, those at a cgroup's limit included. Absent on kernels before 4.13.",
    "/proc/vmstat oom_kill",
)
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
NUMA_TOTAL = family(
    "host_numa_memory_total_bytes",
    "Memory of the node. Absent without details and on kernels without NUMA.",
    "/sys/devices/system/node/node*/meminfo MemTotal",
    "node",
)
NUMA_FREE = family(
    "host_numa_memory_free_bytes",
    "Memory of the node that holds nothing at all. Absent without details and on kernels without NUMA.",
    "/sys/devices/system/node/node*/meminfo MemFree",
    "node",
)

OF_PSUTIL = {
    TOTAL: "total",
    AVAILABLE: "available",
    FREE: "free",
    BUFFERS: "buffers",
    SHARED: "shared",
    SLAB: "slab",
}
OF_MEMINFO = {CACHED: "Cached", ANON: "AnonPages"}
OF_NUMA_NODE = {NUMA_TOTAL: "MemTotal", NUMA_FREE: "MemFree"}
SPECS = (
    *OF_PSUTIL,
    USED,
    *OF_MEMINFO,
    SWAP_TOTAL,
    SWAP_USED,
    SWAP_IN,
    SWAP_OUT,
    FAULTS,
    OOM_KILLS,
    SHM_SIZE,
    SHM_USED,
    *OF_NUMA_NODE,
)


class MemoryCollector:
    """Reads what memory is used for.

    Args:
        sys: Where sysfs is mounted.
        shm: Where shared memory is mounted.
        details: Also the memory of each NUMA node.
    """

    name = "memory"
    specs = SPECS

    def __init__(
        self,
        *,
        sys: Path = Path("/sys"),
        shm: Path = Path("/dev/shm"),  # noqa: S108 - looked at, never written to
        details: bool = False,
    ) -> None:
        self._proc = procfs()
        self._nodes = sys / "devices/system/node"
        self._shm = shm
        self._details = details
        self._page_size = os.sysconf("SC_PAGE_SIZE")
        self._highest = HighWater()

    def collect(self) -> Collected:
        """Read the sources once."""
        collected = Collected()
        self._add_sizes(collected, self._proc / "meminfo")
        self._add_events(collected, self._proc / "vmstat")
        with source(collected, self._shm):
            found = os.statvfs(self._shm)
            collected.add(SHM_SIZE, found.f_blocks * found.f_frsize)
            collected.add(SHM_USED, (found.f_blocks - found.f_bfree) * found.f_frsize)
        if self._details:
            self._add_nodes(collected)
        return collected

    def _add_sizes(self, collected: Collected, path: Path) -> None:
        with source(collected, path):
            memory = psutil.virtual_memory()
            for spec, field in OF_PSUTIL.items():
                collected.add(spec, getattr(memory, field))
            collected.add(USED, max(0, memory.total - memory.available))
            values = named_values(read_existing(path), ":")
            for spec, name in OF_MEMINFO.items():
                collected.add(spec, parse_kibibytes(values[name], path, name))
            swap, free = (parse_kibibytes(values[name], path, name) for name in ("SwapTotal", "SwapFree"))
            collected.add(SWAP_TOTAL, swap)
            collected.add(SWAP_USED, max(0, swap - free))

    def _add_events(self, collected: Collected, path: Path) -> None:
        with source(collected, path):
            values = named_values(read_existing(path), " ")
            major, faults = (parse_count(values[name], path, name) for name in ("pgmajfault", "pgfault"))
            minor = self._highest.hold("minor faults", max(0, faults - major))
            collected.add_family(FAULTS, {("minor",): minor, ("major",): major})
            for spec, name, unit in (
                (SWAP_IN, "pswpin", self._page_size),
                (SWAP_OUT, "pswpout", self._page_size),
                (OOM_KILLS, "oom_kill", 1),
            ):
                if name in values:
                    collected.add(spec, parse_count(values[name], path, name) * unit)
                else:
                    collected.unsupported.append(f"{path}: no {name}")

    def _add_nodes(self, collected: Collected) -> None:
        with source(collected, self._nodes):
            samples: dict[FamilySpec, dict[tuple[str, ...], float]] = {spec: {} for spec in OF_NUMA_NODE}
            for number, node in numbered_entries(self._nodes, "node"):
                path = node / "meminfo"
                values = named_values(read_existing(path), ":", prefix=f"Node {number} ")
                for spec, name in OF_NUMA_NODE.items():
                    samples[spec][str(number),] = parse_kibibytes(values[name], path, name)
            for spec, values_by_node in samples.items():
                collected.add_family(spec, values_by_node)
            if not samples[NUMA_TOTAL]:
                collected.unsupported.append(f"no NUMA nodes in {self._nodes}")


def oom_kills(proc: Path = Path("/proc")) -> float | None:
    """Count the processes that the kernel has killed for memory since boot; None where that is not known.

    The machine's own count tells why a process of the job is gone: a container's cannot be seen from the next one.
    """
    try:
        return float(named_values((proc / "vmstat").read_text(encoding="ascii"), " ")["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None
