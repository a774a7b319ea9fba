"""Processes that hold GPUs: runs, and phases up to the exit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import inf

from exporter.collectors.job import JobProcess, MachineUse, ProcessLife
from exporter.ledger.energy.gpu_attribution import GpuSlice
from exporter.ledger.energy.work import PhaseInterval, WorkUse

STARTUP_PHASE = "init"
"""Phase of a process before the first reported phase."""

PATIENCE_SECONDS = 20.0
"""Maximum wait of energy for the phases of a running process."""
LAST_SNAPSHOT_SECONDS = 5.0
"""Maximum wait of energy for the last snapshot of an exited process."""
MAX_PIDS = 4096


class GpuHolders:
    """Runs and phases of processes by pid; a pid keeps the run after the exit of the process."""

    def __init__(self) -> None:
        self.living: set[int] = set()  # pids of the job's running processes
        self._runs: dict[int, str] = {}
        self._processes: dict[int, str] = {}  # id of the feed's process by pid
        self._intervals: dict[str, tuple[PhaseInterval, ...]] = {}
        self._run_processes: dict[str, list[str]] = {}

    def update(self, job: Sequence[JobProcess], use: MachineUse | None, work: WorkUse) -> None:
        """Update from the processes of the feed, the processes found by the process collector, and the phases."""
        self.living = {each.pid for each in job if each.alive and each.pid is not None}
        for each in job:
            if each.alive and each.pid is not None:
                self._note(each.pid, each.process.run)
                self._processes[each.pid] = each.process.id
        for run in () if use is None else use.runs:
            for pid in run.pids:
                self._note(pid, run.run)
        self._intervals = {each.process: each.intervals for each in work.processes if each.intervals}
        self._run_processes = {}
        for process in work.processes:
            self._run_processes.setdefault(process.run, []).append(process.process)

    def run_of(self, pid: int) -> str:
        """Return the run of a process, "" if unknown."""
        return self._runs.get(pid, "")

    def reports(self, run: str) -> bool:
        """Return True if a process of the run reports training."""
        return run in self._run_processes

    def known_until(self, pids: Collection[int], lives: Mapping[int, ProcessLife], *, now: float) -> float:
        """Return the time up to which the phases of processes are known, or their wait is over."""
        until = inf
        for pid in pids:
            intervals = self._intervals.get(self._processes.get(pid, ""), ())
            if not intervals:
                continue
            life = lives.get(pid)
            ended = None if life is None else life.ended
            if ended is None:
                until = min(until, max(intervals[-1].end, now - PATIENCE_SECONDS))
            elif now - ended < LAST_SNAPSHOT_SECONDS:
                until = min(until, intervals[-1].end)
        return until

    def intervals(self, part: GpuSlice, lives: Mapping[int, ProcessLife]) -> list[tuple[PhaseInterval, ...]]:
        """Return the phases of the processes of a part, without a gap at their begin and end."""
        found = []
        for pid in part.pids:
            known = self._intervals.get(self._process_of(pid, part.run), ())
            if not known:
                continue
            life = lives.get(pid)
            padded = list(known)
            if life is not None and known[0].begin > part.begin >= life.began - 1.0:
                padded.insert(0, PhaseInterval(part.begin, known[0].begin, STARTUP_PHASE))
            if known[-1].end < part.end:
                padded.append(PhaseInterval(known[-1].end, part.end, known[-1].phase))
            found.append(tuple(padded))
        return found

    def _process_of(self, pid: int, run: str) -> str:
        """Return the id of the feed's process for a pid; in a run with a single process, the id of this process."""
        own = self._processes.get(pid)
        if own is not None:
            return own
        processes = self._run_processes.get(run, ())
        return processes[0] if len(processes) == 1 else ""

    def _note(self, pid: int, run: str) -> None:
        self._runs.pop(pid, None)  # last in the order of the dictionary
        self._runs[pid] = run
        while len(self._runs) > MAX_PIDS:
            oldest = next(iter(self._runs))
            del self._runs[oldest]
            self._processes.pop(oldest, None)
