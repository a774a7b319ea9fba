"""Attribution: which share of a device's energy is a run's, and by which reasoning.

Runs in the sidecar, on the energy ledger's thread; pure arithmetic. What runs and machine used up to two moments
comes in, shares come out; those of one device never add up to more than one.

| component | method | share of a run |
|---|---|---|
| gpu | `exclusive` | 1: only its processes hold the device |
| gpu | `sm_share` | its part of the SM utilization of all processes on the device |
| gpu | `memory_share` | its part of their memory, where utilization is not known or zero |
| cpu, soc | `cpu_share` | `(1 - i) dcpu_run / dcpu_busy + i cpus_run / cpus`, i = idle power / power |
| dram | `memory_share` | its resident memory, divided by all that is used |
| any | `whole` | 1: the configuration says that the machine serves one run |

Idle power is divided by the CPUs that a run may use, since it keeps them from others whether it works or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from exporter.collectors.job import EnergyReading, GpuProcessUse, MachineUse, RunUse
from exporter.ledger.energy.measured import Stay


@dataclass(frozen=True, slots=True)
class Share:
    """A run's part of one device, from 0 to 1, and the method by which it was found."""

    run: str
    method: str
    ratio: float


def shares_of(
    reading: EnergyReading,
    before: MachineUse,
    now: MachineUse,
    gpu_use: Sequence[GpuProcessUse],
    whole: str | None = None,
) -> list[Share]:
    """Divide one device among the runs with a part in it by what was used between two moments; empty is not known."""
    if whole is not None:
        return [Share(whole, "whole", 1.0)]
    if reading.component == "gpu":
        return _gpu_shares([use for use in gpu_use if use.uuid == reading.device], now.runs)
    if reading.component == "dram":
        total = max(now.memory_used_bytes or 0, sum(run.resident_bytes for run in now.runs))
        known = now.runs if now.memory_used_bytes else ()
        return [Share(run.run, "memory_share", run.resident_bytes / total) for run in known]
    return _cpu_shares(reading, before, now)


def _cpu_shares(reading: EnergyReading, before: MachineUse, now: MachineUse) -> list[Share]:
    if before.cpu_busy_seconds is None or now.cpu_busy_seconds is None or not now.runs:
        return []
    earlier = {run.run: run.cpu_seconds for run in before.runs}
    # A run that has just come has no past; its next interval has.
    used = {run.run: max(0.0, run.cpu_seconds - earlier.get(run.run, run.cpu_seconds)) for run in now.runs}
    busy = max(now.cpu_busy_seconds - before.cpu_busy_seconds, sum(used.values())) or 1.0
    cpus = max(now.cpus, sum(run.cpus for run in now.runs))
    idle = 0.0
    if reading.idle_watts is not None and reading.watts:
        idle = min(1.0, max(0.0, reading.idle_watts / reading.watts))
    return [
        Share(run.run, "cpu_share", (1 - idle) * used[run.run] / busy + idle * run.cpus / cpus)
        for run in now.runs
    ]


def _gpu_shares(users: Sequence[GpuProcessUse], runs: Sequence[RunUse]) -> list[Share]:
    """Divide a device among those who hold it, by the first measure that is known of all of them and not zero."""
    of_pid = {pid: run.run for run in runs for pid in run.pids}
    owners = [of_pid.get(use.pid, "") for use in users]  # "" is a stranger, whose part is nobody's
    if len(set(owners)) == 1 and owners[0]:
        return [Share(owners[0], "exclusive", 1.0)]
    for method, amounts in (
        ("sm_share", [use.ratios.get("sm") for use in users]),
        ("memory_share", [use.memory_bytes for use in users]),
    ):
        known = [amount for amount in amounts if amount is not None]
        if len(known) == len(users) and sum(known) > 0:
            parts = dict.fromkeys(owners, 0.0)
            for owner, amount in zip(owners, known, strict=True):
                parts[owner] += amount / sum(known)
            return [Share(run, method, part) for run, part in parts.items() if run]
    return []


# What the processes of each run do, told by the ledger's thread once a pass -----------------------------


@dataclass(frozen=True, slots=True)
class Flows:
    """What has become of the work of a run, in seconds so far."""

    session: str  # whose; numbers of another one cannot be compared with these
    productive: float  # safe, validation left out
    lost: float
    hung: float
    uncommitted: float
    validates: bool  # validation is productive


@dataclass(frozen=True, slots=True)
class ProcessWork:
    """What one process does."""

    run: str
    rank: int
    process: str
    phases: Mapping[str, float]  # seconds in each so far
    device: str = ""  # UUID of the one GPU that it holds
    stays: tuple[Stay, ...] = ()  # its last seconds


@dataclass(frozen=True, slots=True)
class WorkUse:
    """What all processes do that tell of it, of one run those of lower ranks first, and what has become of the work."""

    processes: tuple[ProcessWork, ...] = ()
    flows: Mapping[str, Flows] = field(default_factory=dict)

    def flow(self, run: str, session: str) -> Flows | None:
        """Tell what has become of the work of a run, which its session may have gone on with under another name."""
        own = self.flows.get(run)
        if own is None and session:
            return next((each for each in self.flows.values() if each.session == session), None)
        return own
