"""Value types that the collectors of the job exchange: processes, GPU use, machine use, energy.

Times called `at` are monotonic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from exporter.feed.snapshot import ProcessIdentity

Role = Literal["trainer", "dataloader", "other"]


@dataclass(frozen=True, slots=True)
class JobProcess:
    """Process with a feed, or recently ended process, as the ledger knows it."""

    process: ProcessIdentity
    alive: bool
    pid: int | None = None  # in the sidecar's pid namespace; None if dead or invisible


@dataclass(frozen=True, slots=True)
class GpuProcessUse:
    """Use of one GPU by one process; None is unknown to the driver."""

    pid: int  # in the sidecar's pid namespace
    gpu: str  # index as the job sees it
    uuid: str  # of the whole GPU
    memory_bytes: int | None = None
    # utilization by `sm` since the last pass, as far as it is known
    ratios: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GpuListing:
    """Processes on one GPU at a moment."""

    uuid: str
    at: float  # monotonic time
    processes: tuple[GpuProcessUse, ...]


@dataclass(frozen=True, slots=True)
class ProcessLife:
    """Begin and end of a process on the monotonic clock; `ended` is None while the process lives."""

    pid: int
    began: float
    ended: float | None = None


@dataclass(frozen=True, slots=True)
class EnergyPoint:
    """Energy of a device at a moment."""

    at: float  # monotonic time
    joules: float


@dataclass(frozen=True, slots=True)
class RunUse:
    """Use of this machine by the living processes of one run."""

    run: str
    pids: frozenset[int]
    cpu_seconds: float  # of all its processes here since the sidecar started
    cpus: int  # usable by its ranks
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class MachineUse:
    """Use of the machine by all visible living runs, and its resources; None is unreadable."""

    at: float
    runs: tuple[RunUse, ...]
    cpu_busy_seconds: float | None  # CPU time of the whole machine that was not idle
    cpus: int  # online
    memory_used_bytes: int | None  # of the whole machine


@dataclass(frozen=True, slots=True)
class EnergyReading:
    """Energy of one device as counted by its collector.

    The sum over components is meaningful: overlapping zones (psys, core) have no readings.
    """

    component: Literal["gpu", "cpu", "dram", "soc"]
    device: str  # `package0`, or the UUID of a GPU
    source: str  # `rapl`, `nvml_counter`, `nvml_power`, `tdp_model`, …
    measured: bool  # False for a model
    joules: float | None  # corrected for wraps and resets; may start anew; None while there is no reading
    watts: float | None  # over the last interval; None if unknown
    at: float
    register_joules: float | None = None  # raw counter of the device, None for an integral of power
    range_joules: float = 0.0  # the register wraps there; 0 for never
    idle_watts: float | None = None  # power without work; None if unknown
    name: str = ""  # model of the device
    index: str = ""
    power_joules: float | None = None  # integral of power measured independently of `joules`
    resets: Mapping[str, float] = field(default_factory=dict)  # corrections so far, by reason
    gap_seconds: Mapping[str, float] = field(default_factory=dict)  # time without a reading, by reason
    gap_joules: Mapping[str, float] = field(default_factory=dict)  # of that time; not part of `joules`
    divided: bool = False  # a GPU in MIG mode: a process has a part of it
    history: tuple[EnergyPoint, ...] = ()  # `joules` in the last minute, oldest first; of GPUs only


@dataclass(frozen=True, slots=True)
class OverdueRank:
    """A living rank of a run without progress, on this node."""

    rank: int
    process_id: str
    pid: int | None  # in the sidecar's pid namespace


@dataclass(frozen=True, slots=True)
class OverdueRun:
    """A hung or stalled run."""

    run: str
    state: Literal["hung", "stalled", "observed"]  # observed: asked for by a person, whatever the state
    since: float  # Unix time of the last finished step
    step: int | None
    ranks: tuple[OverdueRank, ...]
