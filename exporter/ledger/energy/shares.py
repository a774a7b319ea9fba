"""Shares of the runs in a device's energy.

| component | method | share of a run |
|---|---|---|
| gpu | `exclusive` | 1: only processes of the run use the device |
| gpu | `sm_share` | the run's part of the SM utilization of all processes on the device |
| gpu | `memory_share` | the run's part of these processes' memory on the device, if the utilization is unknown or zero |
| cpu, soc | `cpu_share` | `(1 - i) * run's CPU time / machine's CPU time + i * run's CPUs / CPUs`, i = idle power / power |
| dram | `memory_share` | the run's resident memory, divided by all used memory |
| any | `whole` | 1: the configuration assigns the machine to a single run |

Idle power is divided in proportion to the CPUs that a run may use, because a run reserves these CPUs even while the run is idle.
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


def compute_shares(
    reading: EnergyReading,
    previous: MachineUse,
    current: MachineUse,
    gpu_use: Sequence[GpuProcessUse],
    only_run: str | None = None,
) -> list[Share]:
    """Return the shares of the runs in a device's energy between two times, or an empty list if unknown."""
    if only_run is not None:
        return [Share(only_run, "whole", 1.0)]
    if reading.component == "gpu":
        return _gpu_shares([use for use in gpu_use if use.uuid == reading.device], current.runs)
    if reading.component == "dram":
        total = max(current.memory_used_bytes or 0, sum(run.resident_bytes for run in current.runs))
        runs = current.runs if current.memory_used_bytes else ()
        return [Share(run.run, "memory_share", run.resident_bytes / total) for run in runs]
    return _cpu_shares(reading, previous, current)


def _cpu_shares(reading: EnergyReading, previous: MachineUse, current: MachineUse) -> list[Share]:
    """Return the shares of a CPU or SoC. Returns an empty list if the machine's CPU time is unknown."""
    if previous.cpu_busy_seconds is None or current.cpu_busy_seconds is None or not current.runs:
        return []
    earlier_cpu_seconds = {run.run: run.cpu_seconds for run in previous.runs}
    # The share of a new run starts with the next interval, because there is no earlier CPU time.
    cpu_seconds = {
        run.run: max(0.0, run.cpu_seconds - earlier_cpu_seconds.get(run.run, run.cpu_seconds))
        for run in current.runs
    }
    busy_seconds = max(current.cpu_busy_seconds - previous.cpu_busy_seconds, sum(cpu_seconds.values())) or 1.0
    cpus = max(current.cpus, sum(run.cpus for run in current.runs))
    idle_ratio = 0.0
    if reading.idle_watts is not None and reading.watts:
        idle_ratio = min(1.0, max(0.0, reading.idle_watts / reading.watts))
    return [
        Share(
            run.run,
            "cpu_share",
            (1 - idle_ratio) * cpu_seconds[run.run] / busy_seconds + idle_ratio * run.cpus / cpus,
        )
        for run in current.runs
    ]


def _gpu_shares(users: Sequence[GpuProcessUse], runs: Sequence[RunUse]) -> list[Share]:
    """Return the shares of a GPU by the first method whose values are known for all processes and have a positive sum."""
    run_by_pid = {pid: run.run for run in runs for pid in run.pids}
    owners = [run_by_pid.get(use.pid, "") for use in users]  # "" for a process of no run
    if len(set(owners)) == 1 and owners[0]:
        return [Share(owners[0], "exclusive", 1.0)]
    for method, amounts in (
        ("sm_share", [use.ratios.get("sm") for use in users]),
        ("memory_share", [use.memory_bytes for use in users]),
    ):
        known_amounts = [amount for amount in amounts if amount is not None]
        total = sum(known_amounts)
        if len(known_amounts) == len(users) and total > 0:
            ratios = dict.fromkeys(owners, 0.0)
            for owner, amount in zip(owners, known_amounts, strict=True):
                ratios[owner] += amount / total
            return [Share(run, method, ratio) for run, ratio in ratios.items() if run]
    return []
