"""Value types that the collectors exchange about a job: processes, GPU use, machine use, energy.

A field `time` is in seconds of the monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from exporter.feed.snapshot import ProcessIdentity
from exporter.recording.values import NO_GPUS, GpuUse

Role = Literal["trainer", "dataloader", "other"]

MAX_EXITED_RUNS = 20
"""Maximum number of published runs without a running process; the runs that exited last are published. A run has up to 270 series,
and more for each rank: without this limit, many short runs could displace the series of running runs."""


@dataclass(frozen=True, slots=True)
class JobProcess:
    """Process that writes a feed, or a process that wrote a feed and exited recently."""

    identity: ProcessIdentity
    is_alive: bool
    pid: int | None = None  # in the sidecar's pid namespace; None if exited or invisible
    gpus: GpuUse = NO_GPUS  # as of the last snapshot
    ended_at: float | None = None  # estimated Unix time of the exit; None for a running process


@dataclass(frozen=True, slots=True)
class GpuProcessUse:
    """Use of a GPU by a process. A value that the driver does not report is None."""

    pid: int  # as the driver reports it: in the pid namespace of the host
    gpu: str  # index in the job's numbering
    uuid: str  # of the whole GPU
    memory_bytes: int | None = None
    # utilization since the last pass by resource (`sm`); empty if unknown
    ratios: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GpuListing:
    """Processes on a GPU at a point in time."""

    uuid: str
    time: float
    processes: tuple[GpuProcessUse, ...]


@dataclass(frozen=True, slots=True)
class ProcessLife:
    """Monotonic times of the start and the exit of a process; `ended_at` is None for a running process."""

    pid: int  # negative for a process of the feed that is invisible in the sidecar's pid namespace
    started_at: float
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class EnergyPoint:
    """Energy of a device at a moment."""

    time: float
    joules: float


@dataclass(frozen=True, slots=True)
class RunUse:
    """Use of this machine by the running processes of a run."""

    run: str
    pids: frozenset[int]
    cpu_seconds: float  # of all processes of the run on this machine since the exporter started
    cpus: int  # usable by the run's ranks
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class MachineUse:
    """Use of the machine by all visible runs, and the machine's resources. An unreadable value is None."""

    time: float
    runs: tuple[RunUse, ...]
    cpu_busy_seconds: float | None  # CPU time of the whole machine that was not idle
    cpus: int  # online
    memory_used_bytes: int | None  # of the whole machine


@dataclass(frozen=True, slots=True)
class EnergyReading:
    """Energy of a device as counted by the device's collector.

    The sum over components counts no energy twice, because overlapping zones (psys, core) have no readings.
    """

    component: Literal["gpu", "cpu", "dram", "soc"]
    device: str  # `package0`, or the UUID of a GPU
    source: str  # `rapl`, `nvml_counter`, `nvml_power`, `tdp_model`, …
    is_measured: bool  # False for a model
    joules: float | None  # corrected total, which may restart at 0; None without a reading
    watts: float | None  # over the last interval; None if unknown
    time: float
    register_joules: float | None = None  # raw counter of the device, None for an integral of power
    range_joules: float = 0.0  # the register wraps at this value; 0 if never
    idle_watts: float | None = None  # power without work; None if unknown
    name: str = ""  # model of the device
    index: str = ""  # label `package` of CPUs, label `gpu` of GPUs
    power_joules: float | None = None  # integral of power measured independently of `joules`
    corrections: Mapping[str, float] = field(default_factory=dict)  # of the counter, by reason
    gap_seconds: Mapping[str, float] = field(default_factory=dict)  # time without a reading, by reason
    gap_joules: Mapping[str, float] = field(default_factory=dict)  # energy of the gaps, not part of `joules`
    is_mig: bool = False  # True for a GPU in MIG mode, where a process uses a part of the GPU
    history: tuple[EnergyPoint, ...] = ()  # `joules` in the last minute, oldest first; empty except for GPUs


@dataclass(frozen=True, slots=True)
class InspectedRank:
    """Running rank on this node whose stack is requested."""

    rank: int
    process_id: str
    pid: int | None  # in the sidecar's pid namespace


@dataclass(frozen=True, slots=True)
class InspectedRun:
    """Run whose ranks write their stacks on request."""

    run: str
    state: Literal["hung", "stalled", "observed"]  # observed: a user requested the stacks
    since_timestamp: float  # Unix time at which the state started, or of the request for `observed`
    step: int | None  # the last completed step; None if unknown
    ranks: tuple[InspectedRank, ...]
