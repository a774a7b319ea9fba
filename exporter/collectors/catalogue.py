"""Catalogue: every collector that needs nothing but its machine, with its defaults, and those of other people.

Used in the sidecar: the configuration is made from it. What changes within seconds is read every 5 s, what is slow to
read or to change every 60 s, filesystems, whose servers have to be asked, every 15 s.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any, Literal

from prometheus_client.core import Metric

from exporter.collectors.energy.rapl import RaplCollector
from exporter.collectors.host.cgroup import CgroupCollector
from exporter.collectors.host.cpu import CpuCollector
from exporter.collectors.host.disk import DEVICE_EXCLUDE as DISKS_EXCLUDE
from exporter.collectors.host.disk import DiskCollector
from exporter.collectors.host.filesystem import (
    FS_TYPES_EXCLUDE,
    MOUNT_POINTS_EXCLUDE,
    CheckpointDirsCollector,
    FilesystemCollector,
    StatvfsPool,
)
from exporter.collectors.host.memory import MemoryCollector
from exporter.collectors.host.network import DEVICE_EXCLUDE as INTERFACES_EXCLUDE
from exporter.collectors.host.network import NetworkCollector
from exporter.collectors.host.nfs_lustre import LustreCollector, NfsCollector
from exporter.collectors.host.pressure import PressureCollector
from exporter.collectors.host.rdma import RdmaCollector
from exporter.collectors.host.system import ClockCollector, HardwareCollector, OwnCollector
from exporter.collectors.kernel_files import EVERYTHING
from exporter.collectors.processes.collector import ProcessCollector
from exporter.collectors.processes.memory import ProcessMemoryCollector
from exporter.errors import CollectError
from exporter.families import FamilySpec

FAST = (5.0, 4.0)
MEDIUM = (15.0, 10.0)
SLOW = (60.0, 20.0)
"""Interval and deadline, seconds."""


@dataclass(frozen=True, slots=True)
class Setting:
    """An option of a collector: the key in the configuration and the argument of the factory.

    Attributes:
        default: False makes it a switch, a tuple a list.
        help: One sentence for the configuration.
        kind: What a list is one of: shell-style patterns, paths, or names such as `module:Class`.
    """

    name: str
    default: Literal[False] | tuple[str, ...]
    help: str
    kind: Literal["pattern", "path", "class"] = "pattern"


@dataclass(frozen=True, slots=True)
class CollectorEntry:
    """One collector as it can be configured: its name there and in the label `collector`, its maker and defaults."""

    name: str
    factory: Callable[..., Any]
    specs: Sequence[FamilySpec]
    help: str
    interval_seconds: float
    deadline_seconds: float
    settings: tuple[Setting, ...] = ()


def _entry(
    factory: Callable[..., Any], help_text: str, *settings: Setting, times: tuple[float, float] = FAST
) -> CollectorEntry:
    made: Any = factory.func if isinstance(factory, partial) else factory
    return CollectorEntry(made.name, factory, made.specs, help_text, *times, settings)


def _devices(exclude: tuple[str, ...]) -> tuple[Setting, Setting]:
    return (
        Setting("device_include", EVERYTHING, "Patterns of the devices to show."),
        Setting("device_exclude", exclude, "Patterns of those to leave out all the same."),
    )


CATALOGUE: tuple[CollectorEntry, ...] = (
    _entry(
        CpuCollector,
        "CPU time by mode, utilization, load averages, boot time.",
        Setting(
            "per_core", default=False, help="One series per CPU and mode instead of the sum over the CPUs."
        ),
    ),
    _entry(PressureCollector, "Time lost waiting for CPU, memory and I/O (PSI)."),
    _entry(MemoryCollector, "What memory is used for, swap, page faults, out-of-memory kills, /dev/shm."),
    _entry(OwnCollector, "The exporter's own CPU time, memory and descriptors."),
    _entry(HardwareCollector, "CPUs, temperatures, memory errors.", times=SLOW),
    _entry(ClockCollector, "Whether a time daemon keeps the kernel's clock.", times=SLOW),
    _entry(CgroupCollector, "The job's own limits on CPU and memory, and how near it is to them."),
    _entry(
        DiskCollector,
        "What disks read and write, and how long that takes.",
        Setting("partitions", default=False, help="Also partitions, whose I/O their disk counts as well."),
        *_devices(DISKS_EXCLUDE),
    ),
    _entry(
        # One pool for all that are made: a reload must not call what hangs once more; so below.
        partial(FilesystemCollector, pool=StatvfsPool()),
        "Size, free space and state of the mounted filesystems.",
        Setting("mount_points_include", EVERYTHING, "Patterns of the mount points to show."),
        Setting(
            "mount_points_exclude",
            MOUNT_POINTS_EXCLUDE,
            "Patterns of mount points to leave out all the same; * stands for / too, ? for a blank.",
        ),
        Setting("fs_types_include", EVERYTHING, "Patterns of the kinds of filesystem to show."),
        Setting("fs_types_exclude", FS_TYPES_EXCLUDE, "Patterns of kinds to leave out all the same."),
        times=MEDIUM,
    ),
    _entry(NfsCollector, "What goes over each NFS mount, and how long the servers take."),
    _entry(LustreCollector, "What goes over each Lustre mount."),
    _entry(
        NetworkCollector,
        "What the network interfaces carry and lose, and TCP's sockets and retransmissions.",
        *_devices(INTERFACES_EXCLUDE),
    ),
    _entry(
        RdmaCollector,
        "What InfiniBand and RoCE ports carry, and what goes wrong on their links.",
        *_devices(()),
    ),
    _entry(
        partial(CheckpointDirsCollector, pool=StatvfsPool()),
        "Room that is left in the directories of checkpoints.",
        Setting("paths", (), "The directories, each as the exporter sees it.", kind="path"),
        times=MEDIUM,
    ),
    _entry(
        ProcessCollector,
        "What the processes of the job use, by rank and role; also needed to divide energy among runs.",
    ),
    _entry(
        ProcessMemoryCollector,
        "Unique and proportional memory of the job's processes, as far as their page tables are quick to read.",
        times=MEDIUM,
    ),
    _entry(
        RaplCollector,
        "Energy and power of CPUs and memory; every 10 s or more often, since the registers wrap.",
    ),
)
"""What runs by itself; collectors of other people come by `EXTRA`."""


class ExtraCollector:
    """Somebody else's `module:Class`, of prometheus_client's kind, imported and made at its first pass."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._collector: Any = None

    def collect(self) -> Iterable[Metric]:
        """Make one pass.

        Raises:
            CollectError: `import`: the class cannot be had or made.
        """
        if self._collector is None:
            module, _, attribute = self.name.partition(":")
            try:
                self._collector = getattr(importlib.import_module(module), attribute)()
            except Exception as error:  # whatever happens in an import of somebody else's
                message = f"{self.name} cannot be made: {type(error).__name__}: {error}"
                raise CollectError(message, reason="import") from error
        families: Iterable[Metric] = self._collector.collect()
        return list(families)


def extra_collectors(classes: Sequence[str]) -> list[ExtraCollector]:
    """Find the collectors that the configuration names, and those that installed packages offer by an entry point."""
    offered = sorted(entry.value for entry in metadata.entry_points(group="training_exporter.collectors"))
    return [ExtraCollector(name) for name in dict.fromkeys((*classes, *offered))]


EXTRA = CollectorEntry(
    "extra",
    extra_collectors,
    (),
    "Collectors of other people: those listed here, and those that installed packages offer.",
    *MEDIUM,
    (
        Setting(
            "classes",
            (),
            "Classes whose objects have collect() as prometheus_client wants it: module:Class.",
            kind="class",
        ),
    ),
)
"""Not one collector but as many as there are, each under its own name, with the interval and deadline set here."""
