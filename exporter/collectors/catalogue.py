"""Catalogue of the collectors: the section `collectors` of the configuration, with lanes and default options."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from importlib import metadata
from typing import Any

from prometheus_client.core import Metric

from exporter.collectors.energy.rapl import RaplCollector
from exporter.collectors.host.cgroup import CgroupCollector
from exporter.collectors.host.checkpoint_dirs import CheckpointDirsCollector, CheckpointDirsOptions
from exporter.collectors.host.cpu import CpuCollector, CpuOptions
from exporter.collectors.host.disk import DiskCollector, DiskOptions
from exporter.collectors.host.filesystem import FilesystemCollector, FilesystemOptions
from exporter.collectors.host.hardware import HardwareCollector
from exporter.collectors.host.lustre import LustreCollector
from exporter.collectors.host.memory import MemoryCollector
from exporter.collectors.host.network import NetworkCollector, NetworkOptions
from exporter.collectors.host.nfs import NfsCollector
from exporter.collectors.host.own import OwnCollector
from exporter.collectors.host.pressure import PressureCollector
from exporter.collectors.host.rdma import RdmaCollector, RdmaOptions
from exporter.collectors.host.statvfs import StatvfsPool
from exporter.collectors.options import (
    CollectorOptions,
    ExtraOptions,
    FrequentOptions,
    RareOptions,
    SlowOptions,
)
from exporter.collectors.processes.collector import ProcessCollector
from exporter.collectors.processes.memory import ProcessMemoryCollector
from exporter.errors import CollectError
from exporter.families import FamilySpec

LOCAL_LANE = "local"
"""Lane of the collectors whose reads of /proc and /sys do not block, which share one thread."""
BOUNDED_LANE = "bounded"
"""Lane of slow collectors that limit the time of a pass themselves, for example by a thread per statvfs call."""


class ExtraCollector:
    """Third-party collector. Its class, `module:Class`, is imported and constructed in the first pass."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._collector: Any = None

    def collect(self) -> Iterable[Metric]:
        """Run the collector. Raises CollectError (`import`) if the class cannot be imported or constructed."""
        if self._collector is None:
            module, _, attribute = self.name.partition(":")
            try:
                self._collector = getattr(importlib.import_module(module), attribute)()
            except Exception as error:  # foreign code, which can raise any exception
                message = f"{self.name} cannot be imported or constructed: {type(error).__name__}: {error}"
                raise CollectError(message, reason="import") from error
        families: Iterable[Metric] = self._collector.collect()
        return list(families)


def extra_collectors(classes: Sequence[str]) -> list[ExtraCollector]:
    """Return the configured collectors, and the collectors that installed packages provide by entry points."""
    entry_point_classes = sorted(
        entry.value for entry in metadata.entry_points(group="training_exporter.collectors")
    )
    return [ExtraCollector(name) for name in dict.fromkeys((*classes, *entry_point_classes))]


@dataclass(frozen=True, slots=True)
class CollectorEntry:
    """Entry of the catalogue: how to construct a collector, its options, families and lane."""

    name: str  # key of the section, and value of the label `collector`
    options: CollectorOptions
    factory: Callable[..., Any]
    specs: Sequence[FamilySpec]
    lane: str | None  # None for a separate thread


def collector(
    factory: Callable[..., Any],
    options: CollectorOptions,
    help_text: str,
    *,
    lane: str | None = LOCAL_LANE,
) -> Any:
    """Return the dataclass field of a collector's configuration section, with the default options."""
    collector_class: Any = factory.func if isinstance(factory, partial) else factory
    attributes = {"factory": factory, "specs": getattr(collector_class, "specs", ()), "lane": lane}
    return field(default=options, metadata={"help": help_text, "collector": attributes})


@dataclass(frozen=True, slots=True)
class Collectors:
    """Collectors of the exporter. The name of a field is the value of the label `collector`."""

    cpu: CpuOptions = collector(
        CpuCollector, CpuOptions(), "CPU time by mode, utilization, load averages, boot time."
    )
    pressure: CollectorOptions = collector(
        PressureCollector, CollectorOptions(), "Time lost waiting for CPU, memory and I/O (PSI)."
    )
    memory: CollectorOptions = collector(
        MemoryCollector,
        CollectorOptions(),
        "Use of memory, swap, page faults, out-of-memory kills, /dev/shm.",
    )
    own: CollectorOptions = collector(
        OwnCollector, CollectorOptions(), "The exporter's own CPU time, memory and descriptors."
    )
    hardware: RareOptions = collector(HardwareCollector, RareOptions(), "Number of CPUs.")
    cgroup: CollectorOptions = collector(
        CgroupCollector,
        CollectorOptions(),
        "CPU and memory limits of the job's cgroup, and the use that counts against them.",
    )
    disk: DiskOptions = collector(DiskCollector, DiskOptions(), "Reads, writes and busy time of the disks.")
    filesystem: FilesystemOptions = collector(
        # All instances share a pool: a reload must not call statvfs again for a filesystem that hangs.
        partial(FilesystemCollector, pool=StatvfsPool()),
        FilesystemOptions(),
        "Size, free space and state of mounted filesystems.",
        lane=BOUNDED_LANE,
    )
    nfs: CollectorOptions = collector(
        NfsCollector,
        CollectorOptions(),
        "Traffic of each NFS mount, and the response time of its server.",
        lane=None,
    )
    lustre: CollectorOptions = collector(
        LustreCollector, CollectorOptions(), "Traffic of each Lustre mount.", lane=None
    )
    network: NetworkOptions = collector(
        NetworkCollector,
        NetworkOptions(),
        "Traffic and losses of the network interfaces, and TCP retransmissions.",
    )
    rdma: RdmaOptions = collector(
        RdmaCollector, RdmaOptions(), "Traffic and link errors of InfiniBand and RoCE ports."
    )
    checkpoint_dirs: CheckpointDirsOptions = collector(
        partial(CheckpointDirsCollector, pool=StatvfsPool()),
        CheckpointDirsOptions(),
        "Free space in the checkpoint directories.",
        lane=BOUNDED_LANE,
    )
    processes: FrequentOptions = collector(
        ProcessCollector,
        FrequentOptions(),
        "Resources that the job's processes use, by rank and role. Required for dividing the energy among runs.",
    )
    process_memory: SlowOptions = collector(
        ProcessMemoryCollector,
        SlowOptions(),
        "Unique and proportional memory of the job's processes, within a time budget.",
        lane=BOUNDED_LANE,
    )
    rapl: FrequentOptions = collector(
        RaplCollector,
        FrequentOptions(),
        "Energy and power of CPUs and memory. The registers wrap: keep the interval at 10 s or less.",
    )
    extra: ExtraOptions = collector(
        extra_collectors,
        ExtraOptions(),
        "Third-party collectors, listed here or provided by installed packages.",
        lane=None,
    )


def entries(collectors: Collectors) -> tuple[CollectorEntry, ...]:
    """Return the entries of the catalogue, with the options of a configuration."""
    return tuple(
        CollectorEntry(
            name=collector_field.name,
            options=getattr(collectors, collector_field.name),
            **collector_field.metadata["collector"],
        )
        for collector_field in fields(collectors)
    )


EXTRA = "extra"
"""Section of the third-party collectors. They share the interval and the deadline of the section; their names are `module:Class`."""
CATALOGUE = tuple(entry for entry in entries(Collectors()) if entry.name != EXTRA)
"""Collectors of the exporter with the default options, without the third-party collectors of `EXTRA`."""
