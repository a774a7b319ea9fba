"""Resources that the processes of the job use, by run, rank and role; a pid is never a label."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import psutil

from exporter.collectors.host.cpu import busy_seconds
from exporter.collectors.job import GpuProcessUse, JobProcess, MachineUse, RunUse
from exporter.collectors.kernel_files import from_psutil, procfs, source
from exporter.collectors.processes import families
from exporter.collectors.processes.reading import ProcessReading, read_process
from exporter.collectors.processes.totals import ProcessGroup, RunTotals
from exporter.collectors.processes.tree import DISCOVER_SECONDS, Member, ProcessTree
from exporter.families import Collected

LINGER_SECONDS = 900.0

START_SLACK_SECONDS = 1.0
"""Tolerance between the start of a process in clock ticks and the start of the collector."""


@dataclass(frozen=True, slots=True)
class LivingMember:
    """Running member of the process tree, with its reading."""

    member: Member
    reading: ProcessReading


@dataclass(slots=True, eq=False)
class GroupUse:
    """Present use of a group of processes."""

    states: Counter[str] = field(default_factory=Counter)
    living: list[LivingMember] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class RunProcesses:
    """Processes of a run in a pass, and the totals of the run."""

    seen: float  # monotonic time of the last pass with a running process
    totals: RunTotals = field(default_factory=RunTotals)
    groups: dict[ProcessGroup, GroupUse] = field(default_factory=dict)

    def living(self) -> list[LivingMember]:
        """Return the running members of all groups."""
        return [member for use in self.groups.values() for member in use.living]


class ProcessCollector:
    """Collector of the job's processes; the totals of a run disappear `linger_seconds` after the end of the last process.

    `members` are the running processes of the last pass, `use` is the use of all runs until then, None while unknown; both
    may be read from any thread. `own_pid` is excluded even if the job started the sidecar.
    """

    name = "processes"
    specs = families.SPECS

    def __init__(
        self,
        *,
        job: Callable[[], Sequence[JobProcess] | None] = lambda: None,
        gpu_use: Callable[[], Sequence[GpuProcessUse]] = tuple,
        linger_seconds: float = LINGER_SECONDS,
        discover_seconds: float = DISCOVER_SECONDS,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        own_pid: int | None = None,
    ) -> None:
        self.members: tuple[Member, ...] = ()
        self.use: MachineUse | None = None
        self._stat = procfs() / "stat"
        self._job = job
        self._gpu_use = gpu_use
        self._linger_seconds = linger_seconds
        ignore = {os.getpid() if own_pid is None else own_pid}
        self._tree = ProcessTree(ignore=ignore, discover_seconds=discover_seconds)
        self._clock = clock
        self._monotonic = monotonic
        self._began = clock()
        self._runs: dict[str, RunProcesses] = {}

    def collect(self) -> Collected:
        """Find and read all processes of the job."""
        collected = Collected()
        job = self._job()
        if job is None:
            self.members, self.use = (), None
            return collected
        with source(collected, self._stat):
            now, busy = self._monotonic(), busy_seconds()
            members = self._tree.update(job, collected=collected, now=now, wall=self._clock())
            self._count(members, collected, now)
            self._forget_ended({process.process.run for process in job if process.alive}, members, now)
            self._publish(job, collected)
            living = [process for run_processes in self._runs.values() for process in run_processes.living()]
            self.members = tuple(process.member for process in living)
            self.use = self._machine_use(now, busy)
            if self._tree.hidden:
                collected.unsupported.append(
                    "processes of the job are not visible (another pid namespace, or hidepid): run the exporter in the"
                    " pid namespace of the job or of the host"
                )
        return collected

    def _count(self, members: Sequence[Member], collected: Collected, now: float) -> None:
        """Read every member and add the use to the run."""
        for run_processes in self._runs.values():
            run_processes.groups = {}
        for member in members:
            run = self._runs.setdefault(member.run, RunProcesses(now))
            group = ProcessGroup(member.rank, member.role)
            use = run.groups.setdefault(group, GroupUse())
            with source(collected, f"process {member.process.pid}"):
                reading = read_process(member.process)
                if reading is not None:
                    older = member.process.create_time() < self._began - START_SLACK_SECONDS
                    run.totals.count(member.process, group, reading.usage, older=older)
                    use.states[reading.state] += 1
                    if not reading.ended:
                        use.living.append(LivingMember(member, reading))

    def _forget_ended(self, alive: Collection[str], members: Sequence[Member], now: float) -> None:
        """Discard runs that ended more than `linger_seconds` ago, and the readings of ended processes."""
        processes = {member.process for member in members}
        for run, run_processes in list(self._runs.items()):
            run_processes.totals.forget_ended(processes)
            if run in alive or run_processes.living():
                run_processes.seen = now
            elif now - run_processes.seen > self._linger_seconds:
                del self._runs[run]

    def _publish(self, job: Sequence[JobProcess], collected: Collected) -> None:
        up: dict[tuple[str, str], bool] = {}
        for process in job:
            if process.process.rank is not None:  # a single running process of a rank is enough
                labels = process.process.run, str(process.process.rank)
                up[labels] = up.get(labels, False) or process.alive
        for labels, alive in up.items():
            collected.add(families.UP, int(alive), *labels)
        for run, run_processes in sorted(self._runs.items()):
            groups = sorted(
                {*run_processes.totals.groups, *run_processes.groups},
                key=lambda process: (process.rank, process.role),
            )
            for group in groups:
                _publish_group(collected, run, group, run_processes)
        self._publish_gpus(collected)

    def _publish_gpus(self, collected: Collected) -> None:
        owners = {
            process.member.process.pid: (run, group.rank, group.role)
            for run, run_processes in self._runs.items()
            for group, use in run_processes.groups.items()
            for process in use.living
        }
        sizes: dict[tuple[str, ...], list[int | None]] = {}
        for use in self._gpu_use():
            if use.pid in owners:
                sizes.setdefault((*owners[use.pid], use.gpu, use.uuid), []).append(use.memory_bytes)
        for labels, amounts in sizes.items():
            collected.add(families.GPU_MEMORY, _complete(sum, amounts), *labels)

    def _machine_use(self, now: float, busy: float) -> MachineUse:
        memory = from_psutil("meminfo", psutil.virtual_memory)
        runs = []
        for run, run_processes in self._runs.items():
            living = run_processes.living()
            if living:
                trainers = [process.member for process in living if process.member.role == "trainer"]
                roots = trainers or [process.member for process in living]
                runs.append(
                    RunUse(
                        run,
                        frozenset(process.member.process.pid for process in living),
                        run_processes.totals.cpu_seconds,
                        len(frozenset[int]().union(*(member.cpus for member in roots))),
                        sum(process.reading.resident_bytes or 0 for process in living),
                    )
                )
        used = memory.total - memory.available
        return MachineUse(now, tuple(runs), busy, psutil.cpu_count() or 1, used)


def _publish_group(collected: Collected, run: str, group: ProcessGroup, run_processes: RunProcesses) -> None:
    labels = (run, group.rank, group.role)
    use = run_processes.groups.get(group, GroupUse())
    readings = [process.reading for process in use.living]
    collected.add(families.INSTANCES, len(readings), *labels)
    for state, count in use.states.items():
        collected.add(families.STATE, count, *labels, state)
    if readings:
        collected.add(families.THREADS, _complete(sum, [reading.threads for reading in readings]), *labels)
        resident = _complete(sum, [reading.resident_bytes for reading in readings])
        collected.add(families.RESIDENT, resident, *labels)
        descriptors = _complete(max, [reading.open_descriptors for reading in readings])
        collected.add(families.OPEN_FDS, descriptors, *labels)
    total = run_processes.totals.groups.get(group)
    if total is not None:
        collected.add(families.CPU, total.user_seconds, *labels, "user")
        collected.add(families.CPU, total.system_seconds, *labels, "system")
        if all(reading.usage.read_bytes is not None for reading in readings):
            collected.add(families.IO_READ, total.read_bytes, *labels)
            collected.add(families.IO_WRITTEN, total.written_bytes, *labels)


def _complete(fold: Callable[[list[int]], int], values: Sequence[int | None]) -> int | None:
    """Return a sum or maximum; None if a part is unknown, since the rest would be a different number."""
    present = [value for value in values if value is not None]
    return fold(present) if len(present) == len(values) else None
