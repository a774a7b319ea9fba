"""What the collectors of processes and of energy tell each other: who runs, what it uses, where energy is read.

Used in the sidecar. Values only; the composition root hands each collector the others' latest as callables. Times called
`at` are those of the machine's monotonic clock, which all of them share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from exporter.feed.snapshot import ProcessIdentity

Role = Literal["trainer", "dataloader", "other"]


@dataclass(frozen=True, slots=True)
class JobProcess:
    """A process that records, or did so a short while ago, as the ledger knows it.

    Attributes:
        pid: As seen from here; None when it is dead or in a pid namespace that cannot be seen.
    """

    process: ProcessIdentity
    alive: bool
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class GpuProcessUse:
    """What one process uses of one GPU; None is what the driver does not tell.

    Attributes:
        pid: As seen from here.
        gpu: Index as the job sees it.
        uuid: Of the whole GPU.
        ratios: Utilization by `sm`, `memory`, `encoder`, `decoder` since the last pass; what is not known is left
            out.
        sm_seconds: Integral of its SM utilization since somebody began to watch it; starts anew with the watcher.
        slice_ratio: Share of the whole GPU of the MIG instance that it runs on; None for a whole GPU.
        instance: Which MIG instance; "" for a whole GPU.
    """

    pid: int
    gpu: str
    uuid: str
    memory_bytes: int | None = None
    ratios: Mapping[str, float] = field(default_factory=dict)
    sm_seconds: float | None = None
    slice_ratio: float | None = None
    instance: str = ""


@dataclass(frozen=True, slots=True)
class RunUse:
    """What the living processes of one run on this machine use.

    Attributes:
        cpu_seconds: CPU time of all that it ever had here; never falls.
        cpus: How many its ranks may use.
    """

    run: str
    pids: frozenset[int]
    cpu_seconds: float
    cpus: int
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class MachineUse:
    """What all living runs that can be seen from here use, beside what the machine has, at one moment.

    Attributes:
        cpu_busy_seconds: CPU time of the whole machine that was not idle; None when it could not be read.
        cpus: Online CPUs.
        memory_used_bytes: Of the whole machine; None when it could not be read.
    """

    at: float
    runs: tuple[RunUse, ...]
    cpu_busy_seconds: float | None
    cpus: int
    memory_used_bytes: int | None


@dataclass(frozen=True, slots=True)
class EnergyReading:
    """The energy that one device has used, as its collector counts it.

    Attributes:
        component: What it belongs to; the sum over components is meaningful, so that zones which overlap
            (psys, core) are no readings.
        device: `package0`, or the UUID of a GPU.
        source: What is read: `rapl`, `nvml_counter`, `nvml_power`, `tdp_model` …
        measured: False for a model.
        joules: Corrected for wraps and resets; may start anew with the sidecar or the driver. None while there is
            no reading.
        watts: Over the last interval; None where it is not known.
        idle_watts: Drawn without work; None where nobody knows.
        name: The device's, for people and for prices by model.
        power_joules: Integral of power that was measured independently of `joules`; None where there is none.
        resolution_seconds: Measured time between two changes of the counter; None while unknown.
        resets: Corrections so far, by reason.
        gap_seconds: Time without a reading so far, by reason.
    """

    component: Literal["gpu", "cpu", "dram", "soc"]
    device: str
    source: str
    measured: bool
    joules: float | None
    watts: float | None
    at: float
    idle_watts: float | None = None
    name: str = ""
    index: str = ""
    power_joules: float | None = None
    resolution_seconds: float | None = None
    resets: Mapping[str, float] = field(default_factory=dict)
    gap_seconds: Mapping[str, float] = field(default_factory=dict)
