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
from exporter.ledger.energy.work import WorkUse


@dataclass(frozen=True, slots=True)
class Sources:
    """Data sources of the energy ledger. The functions may be called from any thread; a result None means unknown."""

    readings: Callable[[], Sequence[EnergyReading]]
    use: Callable[[], MachineUse | None]
    gpu_use: Callable[[], Sequence[GpuProcessUse]]
    alive_runs: Callable[[], Collection[str] | None]  # running runs in the feed
    work: Callable[[], WorkUse] = WorkUse
    power: PowerSource = lambda _after: {}  # power samples later than the given times
    listings: Callable[[], Sequence[GpuListing]] = tuple  # of the last minute
    uuids: Callable[[], Mapping[int, str]] = dict  # of the GPUs by NVML index
    lives: Callable[[Collection[int]], Mapping[int, ProcessLife]] = lambda _pids: {}  # by pid
    job: Callable[[], Sequence[JobProcess] | None] = lambda: None  # processes in the feed
