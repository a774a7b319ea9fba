"""Data sources of the energy ledger."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from exporter.collectors.job import (
    EnergyReading,
    GpuListing,
    GpuProcessUse,
    JobProcess,
    MachineUse,
    ProcessLife,
)
from exporter.ledger.energy.power_split import PowerSource
from exporter.ledger.energy.work import WorkSnapshot


@dataclass(frozen=True, slots=True)
class Sources:
    """Data sources of the energy ledger. The functions may be called from any thread; a result None means unknown."""

    readings: Callable[[], Sequence[EnergyReading]]  # of all devices
    machine_use: Callable[[], MachineUse | None]  # CPU time and memory of the runs
    gpu_use: Callable[[], Sequence[GpuProcessUse]]  # latest utilization and memory of the processes on GPUs
    alive_runs: Callable[[], Collection[str] | None]  # running runs in the feed
    work: Callable[[], WorkSnapshot] = WorkSnapshot
    power_samples: PowerSource = lambda _after: {}  # later than the given times
    gpu_listings: Callable[[], Sequence[GpuListing]] = tuple  # of the last minute
    gpu_uuids: Callable[[], Mapping[int, str]] = dict  # by NVML index
    process_lives: Callable[[Collection[int]], Mapping[int, ProcessLife]] = lambda _pids: {}  # by pid
    job_processes: Callable[[], Sequence[JobProcess] | None] = lambda: None  # processes in the feed
