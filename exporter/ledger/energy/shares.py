"""Shares: the part of a device's energy that each run used.

| component | method | share of a run |
|---|---|---|
| gpu | `exclusive` | 1: only processes of the run use the device |
| gpu | `sm_share` | the run's part of the SM utilization of all processes on the device |
| gpu | `memory_share` | the run's part of their memory, if utilization is unknown or zero |
| cpu, soc | `cpu_share` | `(1 - i) dcpu_run / dcpu_busy + i cpus_run / cpus`, i = idle power / power |
| dram | `memory_share` | the run's resident memory, divided by all used memory |
| any | `whole` | 1: the configuration assigns the machine to a single run |

Idle power is divided by the CPUs that a run may use: these CPUs are not available to other runs, even if the run is idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exporter.collectors.job import EnergyReading, GpuProcessUse, MachineUse, RunUse


@dataclass(frozen=True, slots=True)
class Share:
    """Share of a run in a device's energy, from 0 to 1, with the method."""

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
    """Return the shares of a device's energy between two moments; empty if no share is known."""
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
    # A new run has no earlier CPU time; the share starts with the next interval.
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
    """Return the shares of a GPU by the first measure with known values of all processes and a positive sum."""
    of_pid = {pid: run.run for run in runs for pid in run.pids}
    owners = [of_pid.get(use.pid, "") for use in users]  # "" is a process of no run
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
