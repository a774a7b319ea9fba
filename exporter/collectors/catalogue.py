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
from exporter.collectors.host.checkpoint_dirs import CheckpointDirsCollector
from exporter.collectors.host.cpu import CpuCollector
from exporter.collectors.host.disk import DEVICE_EXCLUDE as DISKS_EXCLUDE
from exporter.collectors.host.disk import DiskCollector
from exporter.collectors.host.filesystem import (
    FS_TYPES_EXCLUDE,
    MOUNT_POINTS_EXCLUDE,
    FilesystemCollector,
)
from exporter.collectors.host.hardware import HardwareCollector
from exporter.collectors.host.lustre import LustreCollector
from exporter.collectors.host.memory import MemoryCollector
from exporter.collectors.host.network import DEVICE_EXCLUDE as INTERFACES_EXCLUDE
from exporter.collectors.host.network import NetworkCollector
from exporter.collectors.host.nfs import NfsCollector
from exporter.collectors.host.own import OwnCollector
from exporter.collectors.host.pressure import PressureCollector
from exporter.collectors.host.rdma import RdmaCollector
from exporter.collectors.host.statvfs import StatvfsPool
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
    """An option of a collector: the key in the configuration and the argument of the factory."""

    name: str
    default: Literal[False] | tuple[str, ...]  # False makes it a switch, a tuple a list
    help: str  # one sentence for the configuration
    kind: Literal["pattern", "path", "class"] = "pattern"  # what a list is one of


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
        Setting("device_include", EVERYTHING, "Patterns of devices to show."),
        Setting("device_exclude", exclude, "Patterns of devices to leave out."),
    )


CATALOGUE: tuple[CollectorEntry, ...] = (
    _entry(
        CpuCollector,
        "CPU time by mode, utilization, load averages, boot time.",
        Setting(
            "per_core", default=False, help="One series per CPU and mode instead of the sum over all CPUs."
        ),
    ),
    _entry(PressureCollector, "Time lost waiting for CPU, memory and I/O (PSI)."),
    _entry(MemoryCollector, "Use of memory, swap, page faults, out-of-memory kills, /dev/shm."),
    _entry(OwnCollector, "The exporter's own CPU time, memory and descriptors."),
    _entry(HardwareCollector, "Number of CPUs.", times=SLOW),
    _entry(CgroupCollector, "The job's cgroup: its CPU and memory limits, and its use of them."),
    _entry(
        DiskCollector,
        "Reads and writes of the disks, and their time.",
        Setting("partitions", default=False, help="Also show partitions. Their disk counts the same I/O."),
        *_devices(DISKS_EXCLUDE),
    ),
    _entry(
        # One pool for all that are made: a reload must not call what hangs once more; so below.
        partial(FilesystemCollector, pool=StatvfsPool()),
        "Size, free space and state of mounted filesystems.",
        Setting("mount_points_include", EVERYTHING, "Patterns of mount points to show."),
        Setting(
            "mount_points_exclude",
            MOUNT_POINTS_EXCLUDE,
            "Patterns of mount points to leave out. * also matches /; use ? for a space.",
        ),
        Setting("fs_types_include", EVERYTHING, "Patterns of filesystem types to show."),
        Setting("fs_types_exclude", FS_TYPES_EXCLUDE, "Patterns of filesystem types to leave out."),
        times=MEDIUM,
    ),
    _entry(NfsCollector, "Traffic of each NFS mount, and the response time of its server."),
    _entry(LustreCollector, "Traffic of each Lustre mount."),
    _entry(
        NetworkCollector,
        "Traffic and losses of the network interfaces, and TCP retransmissions.",
        *_devices(INTERFACES_EXCLUDE),
    ),
    _entry(
        RdmaCollector,
        "Traffic and link errors of InfiniBand and RoCE ports.",
        *_devices(()),
    ),
    _entry(
        partial(CheckpointDirsCollector, pool=StatvfsPool()),
        "Free space in the checkpoint directories.",
        Setting("paths", (), "Directories, as the exporter sees them.", kind="path"),
        times=MEDIUM,
    ),
    _entry(
        ProcessCollector,
        "Resources that the job's processes use, by rank and role. Needed to divide energy among runs.",
    ),
    _entry(
        ProcessMemoryCollector,
        "Unique and proportional memory of the job's processes, within a time budget.",
        times=MEDIUM,
    ),
    _entry(
        RaplCollector,
        "Energy and power of CPUs and memory. Read at least every 10 s, since the registers wrap.",
    ),
)
"""What runs by itself; collectors of other people come by `EXTRA`."""


class ExtraCollector:
    """Somebody else's `module:Class`, of prometheus_client's kind, imported and made at its first pass."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._collector: Any = None

    def collect(self) -> Iterable[Metric]:
        """Make one pass; raises CollectError (`import`) where the class cannot be had or made."""
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
    "Third-party collectors: those listed here, and those that installed packages offer.",
    *MEDIUM,
    (
        Setting(
            "classes",
            (),
            "Collector classes as prometheus_client defines them, module:Class.",
            kind="class",
        ),
    ),
)
"""Not one collector but as many as there are, each under its own name, with the interval and deadline set here."""
