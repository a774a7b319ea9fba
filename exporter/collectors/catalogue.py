"""Catalogue of the collectors, with intervals, lanes and options; the source of the configuration."""

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

LOCAL_LANE = "local"
"""Lane of the collectors of /proc and /sys, which share one thread."""
BOUNDED_LANE = "bounded"
"""Lane of slow collectors that bound the time of a pass themselves, such as by a thread per statvfs call."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Interval and deadline of a collector, seconds."""

    interval: float
    deadline: float


LOCAL = Timing(10.0, 8.0)
ENERGY = Timing(5.0, 4.0)
"""Energy registers, which wrap, and the use by which the energy is divided."""
REMOTE = Timing(15.0, 10.0)
"""Filesystems, which may wait for a server, and other slow sources."""
RARE = Timing(60.0, 20.0)


@dataclass(frozen=True, slots=True)
class Setting:
    """Option of a collector: a key in the configuration and an argument of the factory."""

    name: str
    default: Literal[False] | tuple[str, ...]  # False makes it a switch, a tuple a list
    help: str  # one sentence for the configuration
    kind: Literal["pattern", "path", "class"] = "pattern"  # of the items of a list


@dataclass(frozen=True, slots=True)
class CollectorEntry:
    """Configurable collector: name (also the label `collector`), factory and defaults."""

    name: str
    factory: Callable[..., Any]
    specs: Sequence[FamilySpec]
    help: str
    timing: Timing
    lane: str | None  # None for a thread of its own
    settings: tuple[Setting, ...] = ()


def _entry(
    factory: Callable[..., Any],
    help_text: str,
    *settings: Setting,
    timing: Timing = LOCAL,
    lane: str | None = LOCAL_LANE,
) -> CollectorEntry:
    made: Any = factory.func if isinstance(factory, partial) else factory
    return CollectorEntry(made.name, factory, made.specs, help_text, timing, lane, settings)


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
            "per_core", default=False, help="A series per CPU and mode instead of the sum over all CPUs."
        ),
    ),
    _entry(PressureCollector, "Time lost waiting for CPU, memory and I/O (PSI)."),
    _entry(MemoryCollector, "Use of memory, swap, page faults, out-of-memory kills, /dev/shm."),
    _entry(OwnCollector, "The exporter's own CPU time, memory and descriptors."),
    _entry(HardwareCollector, "Number of CPUs.", timing=RARE),
    _entry(
        CgroupCollector, "CPU and memory limits of the job's cgroup, and the use that counts against them."
    ),
    _entry(
        DiskCollector,
        "Reads, writes and busy time of the disks.",
        Setting("partitions", default=False, help="Also show partitions. The disk counts the same I/O."),
        *_devices(DISKS_EXCLUDE),
    ),
    _entry(
        # All instances share a pool: a reload must not call statvfs again for a filesystem that hangs.
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
        timing=REMOTE,
        lane=BOUNDED_LANE,
    ),
    _entry(NfsCollector, "Traffic of each NFS mount, and the response time of its server.", lane=None),
    _entry(LustreCollector, "Traffic of each Lustre mount.", lane=None),
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
        Setting("paths", (), "Directories, in the mount namespace of the exporter.", kind="path"),
        timing=REMOTE,
        lane=BOUNDED_LANE,
    ),
    _entry(
        ProcessCollector,
        "Resources that the job's processes use, by rank and role. Needed to divide energy among runs.",
        timing=ENERGY,
    ),
    _entry(
        ProcessMemoryCollector,
        "Unique and proportional memory of the job's processes, within a time budget.",
        timing=REMOTE,
        lane=BOUNDED_LANE,
    ),
    _entry(
        RaplCollector,
        "Energy and power of CPUs and memory. Registers wrap: at least every 10 s.",
        timing=ENERGY,
    ),
)
"""Collectors of the exporter; `EXTRA` adds third-party collectors."""


class ExtraCollector:
    """Third-party collector class of prometheus_client's kind, given as `module:Class` and imported in its first pass."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._collector: Any = None

    def collect(self) -> Iterable[Metric]:
        """Run the collector; raises CollectError (`import`) if the class cannot be imported or constructed."""
        if self._collector is None:
            module, _, attribute = self.name.partition(":")
            try:
                self._collector = getattr(importlib.import_module(module), attribute)()
            except Exception as error:  # an import can raise anything
                message = f"{self.name} cannot be imported or constructed: {type(error).__name__}: {error}"
                raise CollectError(message, reason="import") from error
        families: Iterable[Metric] = self._collector.collect()
        return list(families)


def extra_collectors(classes: Sequence[str]) -> list[ExtraCollector]:
    """Return the collectors in the configuration, and the collectors that installed packages offer by an entry point."""
    offered = sorted(entry.value for entry in metadata.entry_points(group="training_exporter.collectors"))
    return [ExtraCollector(name) for name in dict.fromkeys((*classes, *offered))]


EXTRA = CollectorEntry(
    "extra",
    extra_collectors,
    (),
    "Third-party collectors, listed here or offered by installed packages.",
    REMOTE,
    None,
    (
        Setting(
            "classes",
            (),
            "Collector classes as prometheus_client defines them, module:Class.",
            kind="class",
        ),
    ),
)
"""Entry for any number of collectors, each under its own name, with the interval and deadline of this section."""
