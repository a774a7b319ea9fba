"""Cgroup families: what is published about the job's limits, whichever version of cgroups it comes from.

Used in the sidecar by the readers of both versions. Values only.
"""

from __future__ import annotations

from exporter.collectors.host.pressure import WANTED, pressure_spec
from exporter.families import FamilySpec, family

INFO = family(
    "cgroup_info",
    "Which cgroup the families of a resource (scope: cpu, memory, io, pids) are of: the one with the tightest limit on the way up from the exporter's own, or without limits the exporter's own.",
    "/proc/self/cgroup, mountinfo",
    "version",
    "path",
    "scope",
)


def _spec(name: str, help_text: str, v2: str, v1: str, *labels: str) -> FamilySpec:
    return family(f"cgroup_{name}", help_text, f"v2 {v2}; v1 {v1}" if v1 else f"v2 {v2}", *labels)


CPU_LIMIT = _spec(
    "cpu_limit_cpus",
    "CPUs' worth of time that the job may use. Absent without a limit.",
    "cpu.max quota / period",
    "cpu.cfs_quota_us / cpu.cfs_period_us",
)
CPU_USAGE = _spec(
    "cpu_usage_seconds_total",
    "CPU time used by mode (user, system), which add up to all of it.",
    "cpu.stat user_usec, system_usec",
    "cpuacct.usage, in the proportion of cpuacct.stat",
    "mode",
)
CPU_PERIODS = _spec(
    "cpu_periods_total",
    "Periods of the limit in which something ran. Absent where the CPU controller is off.",
    "cpu.stat nr_periods",
    "cpu.stat nr_periods",
)
CPU_THROTTLED_PERIODS = _spec(
    "cpu_throttled_periods_total",
    "Periods in which the limit stopped the job. Absent where the CPU controller is off.",
    "cpu.stat nr_throttled",
    "cpu.stat nr_throttled",
)
CPU_THROTTLED = _spec(
    "cpu_throttled_seconds_total",
    "Time that CPUs stood still because of the limit. Absent where the CPU controller is off.",
    "cpu.stat throttled_usec / 1e6",
    "cpu.stat throttled_time / 1e9",
)
MEMORY_CURRENT = _spec(
    "memory_current_bytes",
    "Memory that counts against the limit, page cache included.",
    "memory.current",
    "memory.usage_in_bytes",
)
MEMORY_LIMIT = _spec(
    "memory_limit_bytes",
    "Memory at which the kernel kills. Absent without a limit.",
    "memory.max",
    "memory.stat hierarchical_memory_limit",
)
MEMORY_HIGH = _spec(
    "memory_high_bytes",
    "Memory at which the kernel slows the job down to get some back. Absent without such a limit, and in v1.",
    "memory.high",
    "",
)
MEMORY_PEAK = _spec(
    "memory_peak_bytes",
    "The largest memory_current since the cgroup was made. Absent in v2 before Linux 5.19.",
    "memory.peak",
    "memory.max_usage_in_bytes",
)
MEMORY_WORKING_SET = _spec(
    "memory_working_set_bytes",
    "Memory that cannot be had back by dropping files nobody has used lately; what Kubernetes goes by.",
    "memory.current - memory.stat inactive_file",
    "memory.usage_in_bytes - memory.stat total_inactive_file",
)
MEMORY_STAT = _spec(
    "memory_stat_bytes",
    "Memory by kind: anon (no file behind it), file (page cache, shared memory included), shmem (tmpfs and /dev/shm), kernel, slab (part of kernel). A kind is absent where the kernel does not say.",
    "memory.stat",
    "memory.stat total_rss, total_cache, total_shmem; memory.kmem.usage_in_bytes",
    "kind",
)
MEMORY_EVENTS = _spec(
    "memory_events_total",
    "Events of the cgroup and all below it: below low, over high, at the limit (max), out of memory (oom), processes killed (oom_kill), cgroups killed as a whole (oom_group_kill). In v1 only max and oom_kill, the latter of the cgroups on the way only. An event is absent where the kernel does not count it.",
    "memory.events",
    "memory.failcnt, memory.oom_control oom_kill",
    "event",
)
IO_READ = _spec(
    "io_read_bytes_total",
    "Bytes read from the device. Absent before the first I/O, and where the I/O controller is off.",
    "io.stat rbytes",
    "blkio.throttle.io_service_bytes_recursive Read",
    "device",
)
IO_WRITTEN = _spec(
    "io_written_bytes_total",
    "Bytes written to the device. Absent before the first I/O, and where the I/O controller is off.",
    "io.stat wbytes",
    "blkio.throttle.io_service_bytes_recursive Write",
    "device",
)
PIDS = _spec(
    "pids", "Processes and threads. Absent where the pids controller is off.", "pids.current", "pids.current"
)
PIDS_LIMIT = _spec(
    "pids_limit", "Processes and threads that may be. Absent without a limit.", "pids.max", "pids.max"
)
PRESSURE = {
    resource: pressure_spec(
        "cgroup",
        resource,
        "some",
        " of the job",
        f"v2 {resource}.pressure",
        "Absent without pressure accounting, and in v1 alone.",
    )
    for resource in WANTED
}

SPECS = (
    INFO,
    CPU_LIMIT,
    CPU_USAGE,
    CPU_PERIODS,
    CPU_THROTTLED_PERIODS,
    CPU_THROTTLED,
    MEMORY_CURRENT,
    MEMORY_LIMIT,
    MEMORY_HIGH,
    MEMORY_PEAK,
    MEMORY_WORKING_SET,
    MEMORY_STAT,
    MEMORY_EVENTS,
    IO_READ,
    IO_WRITTEN,
    PIDS,
    PIDS_LIMIT,
    *PRESSURE.values(),
)
