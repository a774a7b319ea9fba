"""What the collectors of processes and of energy tell each other, and the pages on which they keep their totals.

Times called `at` are those of the machine's monotonic clock. Pages are numbers of this machine that outlive the sidecar.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from exporter.feed.snapshot import ProcessIdentity

Role = Literal["trainer", "dataloader", "other"]


@dataclass(frozen=True, slots=True)
class JobProcess:
    """A process that records, or did so a short while ago, as the ledger knows it."""

    process: ProcessIdentity
    alive: bool
    pid: int | None = None  # as seen from here; None when dead or in a pid namespace that cannot be seen


@dataclass(frozen=True, slots=True)
class GpuProcessUse:
    """What one process uses of one GPU; None is what the driver does not tell."""

    pid: int  # as seen from here
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
    """What the living processes of one run on this machine use."""

    run: str
    pids: frozenset[int]
    cpu_seconds: float  # of all that it ever had here; never falls
    cpus: int  # how many its ranks may use
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class MachineUse:
    """What all living runs that can be seen from here use, beside what the machine has; None could not be read."""

    at: float
    runs: tuple[RunUse, ...]
    cpu_busy_seconds: float | None  # CPU time of the whole machine that was not idle
    cpus: int  # online
    memory_used_bytes: int | None  # of the whole machine


@dataclass(frozen=True, slots=True)
class EnergyReading:
    """The energy that one device has used, as its collector counts it.

    The sum over components is meaningful: zones that overlap (psys, core) are no readings.
    """

    component: Literal["gpu", "cpu", "dram", "soc"]
    device: str  # `package0`, or the UUID of a GPU
    source: str  # what is read: `rapl`, `nvml_counter`, `nvml_power`, `tdp_model` …
    measured: bool  # False for a model
    joules: float | None  # corrected for wraps and resets; may start anew; None while there is no reading
    watts: float | None  # over the last interval; None where it is not known
    at: float
    register_joules: float | None = None  # raw counter of the device, None for an integral of power
    range_joules: float = 0.0  # the register wraps there; 0 for never
    idle_watts: float | None = None  # drawn without work; None where nobody knows
    name: str = ""  # the device's, for people and for prices by model
    index: str = ""
    power_joules: float | None = None  # integral of power that was measured independently of `joules`
    resets: Mapping[str, float] = field(default_factory=dict)  # corrections so far, by reason
    gap_seconds: Mapping[str, float] = field(default_factory=dict)  # time without a reading, by reason
    gap_joules: Mapping[str, float] = field(default_factory=dict)  # of that time; not part of `joules`
    history: tuple[EnergyPoint, ...] = ()  # `joules` in the last minute, oldest first; of GPUs only


Rows = dict[tuple[str, ...], tuple[float | None, ...]]
"""Numbers by name. What a place in a row means is a contract: new ones are added at the end only."""


class Page:
    """The rows of one subject, all of them saved or none; of a collector that stands on its own they are not kept."""

    def load(self) -> Rows | None:
        """Give what was last saved, empty when there is nothing; None while another sidecar keeps it.

        Raises CollectError (`state`) where it cannot be read now.
        """
        return {}

    def save(self, rows: Rows) -> None:
        """Replace it, after a `load` that gave rows; raises CollectError (`state`), and nothing has changed."""

    def close(self) -> None:
        """Let another sidecar keep it."""


class Keeper:
    """Where pages are."""

    def page(self, subject: str, name: str = "") -> Page:
        """Name a page of a collector, such as that of a run; nothing is touched yet."""
        del subject, name
        return Page()


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
    state: Literal["hung", "stalled"]
    since: float  # Unix time of the last finished step
    step: int | None
    ranks: tuple[OverdueRank, ...]
