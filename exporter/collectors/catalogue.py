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
from typing import Any, Literal

from exporter.collectors.cgroup.collector import CgroupCollector
from exporter.collectors.energy.rapl import RaplCollector
from exporter.collectors.extra import extra_collectors
from exporter.collectors.host import (
    checkpoint_dirs,
    cpu,
    disk,
    filesystem,
    hardware,
    memory,
    network,
    nfs_lustre,
    pressure,
    rdma,
    system,
)
from exporter.collectors.host.statvfs import StatvfsPool
from exporter.collectors.processes.collector import ProcessCollector
from exporter.collectors.processes.memory import ProcessMemoryCollector
from exporter.collectors.selection import EVERYTHING
from exporter.families import FamilySpec

FAST_SECONDS = 5.0
MEDIUM_SECONDS, MEDIUM_DEADLINE_SECONDS = 15.0, 10.0
SLOW_SECONDS, SLOW_DEADLINE_SECONDS = 60.0, 20.0


@dataclass(frozen=True, slots=True)
class Setting:
    """An option that is more than a switch.

    Attributes:
        name: The key in the configuration and the argument of the factory.
        default: A tuple makes it a list; None makes it a path that may be left out.
        help: One sentence for the configuration.
        kind: What a list is one of: shell-style patterns, paths, or names such as `module:Class`.
    """

    name: str
    default: tuple[str, ...] | None
    help: str
    kind: Literal["pattern", "path", "class"] = "pattern"


@dataclass(frozen=True, slots=True)
class CollectorEntry:
    """One collector as it can be configured.

    Attributes:
        name: The value of the label `collector`, and the key in the configuration.
        factory: Makes it from `options`, all of which have defaults.
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


def _entry(
    factory: Callable[..., Any],
    help_text: str,
    interval_seconds: float = FAST_SECONDS,
    deadline_seconds: float = 4.0,
    *,
    options: tuple[tuple[str, str], ...] = (),
    settings: tuple[Setting, ...] = (),
) -> CollectorEntry:
    made: Any = factory.func if isinstance(factory, partial) else factory
    return CollectorEntry(
        made.name,
        factory,
        made.specs,
        help_text,
        interval_seconds,
        deadline_seconds,
        options=options,
        settings=settings,
    )


def _devices(exclude: tuple[str, ...]) -> tuple[Setting, Setting]:
    return (
        Setting("device_include", EVERYTHING, "Patterns of the devices to show."),
        Setting("device_exclude", exclude, "Patterns of those to leave out all the same."),
    )


_POOLS = {name: StatvfsPool() for name in ("filesystem", "checkpoint_dirs")}
"""One for all collectors of a name that are made: a reload must not call what hangs once more."""

CATALOGUE: tuple[CollectorEntry, ...] = (
    _entry(
        cpu.CpuCollector,
        "CPU time by mode, utilization, load averages, boot time.",
        options=(("per_core", "One series per CPU and mode instead of the sum over the CPUs."),),
    ),
    _entry(
        pressure.PressureCollector,
        "Time lost waiting for CPU, memory and I/O (PSI).",
    ),
    _entry(
        memory.MemoryCollector,
        "What memory is used for, swap, page faults, out-of-memory kills, /dev/shm.",
        options=(("details", "Also the memory of each NUMA node."),),
    ),
    _entry(system.OwnCollector, "The exporter's own CPU time, memory and descriptors."),
    _entry(
        hardware.HardwareCollector,
        "CPUs and their frequency, temperatures, throttling, memory errors.",
        SLOW_SECONDS,
        SLOW_DEADLINE_SECONDS,
        options=(("per_core", "Also the thermometers of single CPU cores."),),
    ),
    _entry(
        system.ClockCollector,
        "Offset and discipline of the kernel's clock.",
        SLOW_SECONDS,
        SLOW_DEADLINE_SECONDS,
    ),
    _entry(
        CgroupCollector,
        "The job's own limits on CPU, memory, I/O and processes, and how near it is to them.",
        settings=(
            Setting(
                "path",
                None,
                "Another cgroup than the exporter's own, as /proc/<pid>/cgroup shows it, or its directory.",
            ),
        ),
    ),
    _entry(
        disk.DiskCollector,
        "What disks read and write, and how long that takes.",
        options=(("partitions", "Also partitions, whose I/O their disk counts as well."),),
        settings=_devices(disk.DEVICE_EXCLUDE),
    ),
    _entry(
        partial(filesystem.FilesystemCollector, pool=_POOLS["filesystem"]),
        "Size, free space and state of the mounted filesystems.",
        MEDIUM_SECONDS,
        MEDIUM_DEADLINE_SECONDS,
        settings=(
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
    _entry(
        nfs_lustre.NfsCollector,
        "What goes over each NFS mount, and how long the servers take.",
    ),
    _entry(
        nfs_lustre.LustreCollector,
        "What goes over each Lustre mount.",
    ),
    _entry(
        network.NetworkCollector,
        "What the network interfaces carry and lose, and TCP's sockets and retransmissions.",
        settings=_devices(network.DEVICE_EXCLUDE),
    ),
    _entry(
        rdma.RdmaCollector,
        "What InfiniBand and RoCE ports carry, and what goes wrong on their links.",
        settings=(
            *_devices(()),
            Setting(
                "hw_counters", rdma.HW_COUNTERS, "Patterns of the adapters' own counters to show; * for all."
            ),
        ),
    ),
    _entry(
        partial(checkpoint_dirs.CheckpointDirsCollector, pool=_POOLS["checkpoint_dirs"]),
        "Room that is left in the directories of checkpoints.",
        MEDIUM_SECONDS,
        MEDIUM_DEADLINE_SECONDS,
        settings=(Setting("paths", (), "The directories, each as the exporter sees it.", kind="path"),),
    ),
    _entry(
        ProcessCollector,
        "What the processes of the job use, by rank and role; also needed to divide energy among runs.",
    ),
    _entry(
        ProcessMemoryCollector,
        "Unique and proportional memory of the job's processes, as far as their page tables are quick to read.",
        MEDIUM_SECONDS,
        MEDIUM_DEADLINE_SECONDS,
    ),
    _entry(
        RaplCollector,
        "Energy and power of CPUs and memory; every 10 s or more often, since the registers wrap.",
    ),
)
"""What runs by itself; collectors of other people come by `EXTRA`."""

EXTRA = CollectorEntry(
    "extra",
    extra_collectors,
    (),
    "Collectors of other people: those listed here, and those that installed packages offer.",
    MEDIUM_SECONDS,
    MEDIUM_DEADLINE_SECONDS,
    settings=(
        Setting(
            "classes",
            (),
            "Classes whose objects have collect() as prometheus_client wants it: module:Class.",
            kind="class",
        ),
    ),
)
"""Not one collector but as many as there are, each under its own name, with the interval and deadline set here."""
