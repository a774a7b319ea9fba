"""Catalogue: every collector that needs nothing but its machine, with its defaults.

Used in the sidecar by the configuration, which is made from it, and by the composition root, which schedules
what is enabled. Values only. What needs more than options (the feed, devices) is wired where it is made.

Three tiers: what changes within seconds is read every 5 s; what is slow to read or slow to change every 60 s;
filesystems, whose servers have to be asked, every 15 s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from exporter.collectors import (
    cgroup,
    cgroup_families,
    checkpoint_dirs,
    clock,
    cpu,
    cpu_count,
    cpu_frequency,
    cpu_throttles,
    disk,
    edac,
    file_descriptors,
    filesystem,
    load,
    lustre,
    memory,
    network,
    nfs,
    numa,
    own,
    pressure,
    process_families,
    process_memory,
    processes,
    rapl,
    rapl_families,
    rdma,
    sensors,
    shm,
    swap,
    tcp,
    vm,
)
from exporter.collectors.family import FamilySpec
from exporter.collectors.selection import EVERYTHING
from exporter.collectors.statvfs import StatvfsPool

FAST_SECONDS = 5.0
MEDIUM_SECONDS = 15.0
SLOW_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Setting:
    """An option that is more than a switch.

    Attributes:
        name: The key in the configuration and the argument of the factory.
        default: A tuple makes it a list of shell-style patterns; None makes it a path that may be left out.
        help: One sentence for the configuration.
        paths: Whether the list is one of paths.
    """

    name: str
    default: tuple[str, ...] | None
    help: str
    paths: bool = False


@dataclass(frozen=True, slots=True)
class CollectorEntry:
    """One collector as it can be configured.

    Attributes:
        name: The value of the label `collector`, and the key in the configuration.
        factory: Makes it from `options`, all of which have defaults; `proc` and `sys` are taken by those that
            read procfs and sysfs, for trees mounted or recorded elsewhere.
        specs: What it can publish.
        help: One sentence for the configuration.
        interval_seconds: By default.
        deadline_seconds: By default.
        enabled: By default.
        options: Names of the boolean options that users may set, each with its help; all default to False.
        settings: The options that are more than that.
    """

    name: str
    factory: Callable[..., Any]
    specs: Sequence[FamilySpec]
    help: str
    interval_seconds: float = FAST_SECONDS
    deadline_seconds: float = 4.0
    enabled: bool = True
    options: tuple[tuple[str, str], ...] = ()
    settings: tuple[Setting, ...] = ()


def _slow(
    name: str,
    factory: Callable[..., Any],
    specs: Sequence[FamilySpec],
    help_text: str,
    options: tuple[tuple[str, str], ...] = (),
) -> CollectorEntry:
    return CollectorEntry(
        name, factory, specs, help_text, SLOW_SECONDS, deadline_seconds=20.0, options=options
    )


def _asking(
    name: str,
    factory: Callable[..., Any],
    specs: Sequence[FamilySpec],
    help_text: str,
    settings: tuple[Setting, ...],
) -> CollectorEntry:
    """One that asks filesystems, with one pool for all that are made: a reload must not call what hangs once more."""
    made = partial(factory, pool=StatvfsPool())
    return CollectorEntry(
        name, made, specs, help_text, MEDIUM_SECONDS, deadline_seconds=10.0, settings=settings
    )


def _devices(exclude: tuple[str, ...]) -> tuple[Setting, Setting]:
    return (
        Setting("device_include", EVERYTHING, "Patterns of the devices to show."),
        Setting("device_exclude", exclude, "Patterns of those to leave out all the same."),
    )


CATALOGUE: tuple[CollectorEntry, ...] = (
    CollectorEntry(
        "cpu",
        cpu.CpuCollector,
        cpu.SPECS,
        "CPU time by mode, utilization, context switches, interrupts, forks.",
        options=(("per_core", "One series per CPU and mode instead of the sum over the CPUs."),),
    ),
    CollectorEntry("load", load.LoadCollector, load.SPECS, "Load averages."),
    CollectorEntry(
        "pressure",
        pressure.PressureCollector,
        pressure.SPECS,
        "Time lost waiting for CPU, memory and I/O (PSI).",
    ),
    CollectorEntry("memory", memory.MemoryCollector, memory.SPECS, "What memory is used for."),
    CollectorEntry("swap", swap.SwapCollector, swap.SPECS, "Swap space and traffic."),
    CollectorEntry(
        "vm", vm.VmCollector, vm.SPECS, "Page faults, reclaim, out-of-memory kills, NUMA placement."
    ),
    CollectorEntry("shm", shm.ShmCollector, shm.SPECS, "Size and use of /dev/shm."),
    CollectorEntry(
        "own", own.OwnCollector, own.SPECS, "The exporter's own CPU time, memory and descriptors."
    ),
    _slow(
        "cpu_count",
        cpu_count.CpuCountCollector,
        cpu_count.SPECS,
        "CPUs online, physical, in the affinity and in the cgroup's quota.",
    ),
    _slow(
        "cpu_frequency",
        cpu_frequency.CpuFrequencyCollector,
        cpu_frequency.SPECS,
        "How fast the CPUs run.",
        options=(("per_core", "One series per CPU instead of their mean."),),
    ),
    _slow(
        "cpu_throttles",
        cpu_throttles.CpuThrottlesCollector,
        cpu_throttles.SPECS,
        "How often CPUs slowed down because of their temperature.",
    ),
    _slow("numa", numa.NumaCollector, numa.SPECS, "Memory of each NUMA node."),
    _slow("clock", clock.ClockCollector, clock.SPECS, "Offset and discipline of the kernel's clock."),
    _slow(
        "sensors",
        sensors.SensorsCollector,
        sensors.SPECS,
        "Temperatures and fans.",
        options=(("per_core", "Also the thermometers of single CPU cores."),),
    ),
    _slow("edac", edac.EdacCollector, edac.SPECS, "Errors that the memory controllers saw."),
    CollectorEntry(
        "cgroup",
        cgroup.CgroupCollector,
        cgroup_families.SPECS,
        "The job's own limits on CPU, memory, I/O and processes, and how near it is to them.",
        settings=(
            Setting(
                "path",
                None,
                "Another cgroup than the exporter's own, as /proc/<pid>/cgroup shows it, or its directory.",
            ),
        ),
    ),
    CollectorEntry(
        "disk",
        disk.DiskCollector,
        disk.SPECS,
        "What disks read and write, and how long that takes.",
        options=(("partitions", "Also partitions, whose I/O their disk counts as well."),),
        settings=_devices(disk.DEVICE_EXCLUDE),
    ),
    _asking(
        "filesystem",
        filesystem.FilesystemCollector,
        filesystem.SPECS,
        "Size, free space and state of the mounted filesystems.",
        (
            Setting("mount_points_include", EVERYTHING, "Patterns of the mount points to show."),
            Setting(
                "mount_points_exclude",
                filesystem.MOUNT_POINTS_EXCLUDE,
                "Patterns of mount points to leave out all the same; * stands for / too, ? for a blank.",
            ),
            Setting("fs_types_include", EVERYTHING, "Patterns of the kinds of filesystem to show."),
            Setting(
                "fs_types_exclude",
                filesystem.FS_TYPES_EXCLUDE,
                "Patterns of kinds to leave out all the same.",
            ),
        ),
    ),
    CollectorEntry(
        "nfs",
        nfs.NfsCollector,
        nfs.SPECS,
        "What goes over each NFS mount, and how long the servers take.",
        options=(("per_operation", "One series per kind of request instead of read, write and other."),),
    ),
    CollectorEntry(
        "lustre",
        lustre.LustreCollector,
        lustre.SPECS,
        "What goes over each Lustre mount.",
        options=(("per_operation", "One series per kind of call instead of read, write and other."),),
    ),
    CollectorEntry(
        "network",
        network.NetworkCollector,
        network.SPECS,
        "What the network interfaces carry and lose, and what kind of link they have.",
        settings=_devices(network.DEVICE_EXCLUDE),
    ),
    CollectorEntry("tcp", tcp.TcpCollector, tcp.SPECS, "TCP segments sent again, and sockets in use."),
    CollectorEntry(
        "rdma",
        rdma.RdmaCollector,
        rdma.SPECS,
        "What InfiniBand and RoCE ports carry, and what goes wrong on their links.",
        settings=(
            *_devices(()),
            Setting(
                "hw_counters", rdma.HW_COUNTERS, "Patterns of the adapters' own counters to show; * for all."
            ),
        ),
    ),
    CollectorEntry(
        "file_descriptors",
        file_descriptors.FileDescriptorsCollector,
        file_descriptors.SPECS,
        "Open files of the whole machine, and their limit.",
    ),
    _asking(
        "checkpoint_dirs",
        checkpoint_dirs.CheckpointDirsCollector,
        checkpoint_dirs.SPECS,
        "Room that is left in the directories of checkpoints.",
        (Setting("paths", (), "The directories, each as the exporter sees it.", paths=True),),
    ),
    CollectorEntry(
        "processes",
        processes.ProcessCollector,
        process_families.SPECS,
        "What the processes of the job use, by rank and role; also needed to divide energy among runs.",
    ),
    _slow(
        "process_memory",
        process_memory.ProcessMemoryCollector,
        process_memory.SPECS,
        "Unique and proportional memory of the job's processes, as far as their page tables are quick to read.",
    ),
    CollectorEntry(
        "rapl",
        rapl.RaplCollector,
        rapl_families.SPECS,
        "Energy and power of CPUs and memory; every 10 s or more often, since the registers wrap.",
    ),
)
