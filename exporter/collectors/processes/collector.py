"""Resource use of the job's processes by run, rank and role, without pids as labels."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import psutil

from exporter.collectors.host.cpu import busy_seconds
from exporter.collectors.job import MAX_EXITED_RUNS, GpuProcessUse, JobProcess, MachineUse, RunUse
from exporter.collectors.kernel_files import from_psutil, procfs, source
from exporter.collectors.processes import families
from exporter.collectors.processes.reading import ProcessReading, read_process
from exporter.collectors.processes.totals import ProcessGroup, RunTotals, Usage
from exporter.collectors.processes.tree import DISCOVER_SECONDS, Member, ProcessTree
from exporter.families import Collected

LINGER_SECONDS = 900.0
"""Time for which the totals of an ended run are published."""

START_SLACK_SECONDS = 1.0
"""Tolerance in the comparison of start times, because the kernel counts the start of a process in clock ticks."""


@dataclass(frozen=True, slots=True)
class LivingMember:
    """Running process of the process tree, with its reading. Zombies are not running."""

    member: Member
    reading: ProcessReading


@dataclass(slots=True, eq=False)
class GroupUse:
    """Processes of a group in a pass.

    Attributes:
        states: Number of processes by state, zombies included.
        living: Running processes.
    """

    states: Counter[str] = field(default_factory=Counter)
    living: list[LivingMember] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class RunProcesses:
    """Processes of a run in a pass, and the totals of the run."""

    last_alive_time: float  # monotonic time of the last pass with a running process
    totals: RunTotals
    groups: dict[ProcessGroup, GroupUse] = field(default_factory=dict)

    def living(self) -> list[LivingMember]:
        """Return the running members of all groups."""
        return [member for use in self.groups.values() for member in use.living]


class ProcessCollector:
    """Collector of the job's processes.

    The totals of a run disappear `linger_seconds` after the end of the last process. They disappear earlier if `MAX_EXITED_RUNS` other
    runs have ended since. The process `own_pid`, which is the sidecar, and its descendants belong to no run, even if the job started the
    sidecar.

    Attributes:
        members: Running processes of the last pass. May be read from any thread.
        use: Resource use of all runs up to the last pass, or None if unknown. May be read from any thread.
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
        self._start_time = clock()
        self._runs: dict[str, RunProcesses] = {}
        self._usages: dict[psutil.Process, Usage] = {}  # last reading of each process, of all runs
        self._previous_members: Sequence[Member] = ()  # of the previous pass, zombies included

    def collect(self) -> Collected:
        """Find and read the visible processes of the job. Return no families while the job is unknown."""
        collected = Collected()
        job = self._job()
        if job is None:
            self.members, self.use = (), None
            return collected
        with source(collected, self._stat):
            now, cpu_busy_seconds = self._monotonic(), busy_seconds()
            members = self._tree.update(job, collected=collected, now=now, wall=self._clock())
            self._count(members, collected, now)
            self._forget_ended({process.identity.run for process in job if process.is_alive}, members, now)
            self._publish(job, collected)
            living = [process for run_processes in self._runs.values() for process in run_processes.living()]
            self.members = tuple(process.member for process in living)
            self.use = self._machine_use(now, cpu_busy_seconds)
            if self._tree.hidden_count:
                collected.unsupported.append(
                    "processes of the job are not visible (another pid namespace, or hidepid): run the exporter in the"
                    " pid namespace of the job or of the host"
                )
        return collected

    def _count(self, members: Sequence[Member], collected: Collected, now: float) -> None:
        """Read every member and add its resource use to the totals of the run."""
        for run_processes in self._runs.values():
            run_processes.groups = {}
        self._exclude_io_of_ended(members)
        for member in members:
            run = self._runs.setdefault(member.run, RunProcesses(now, RunTotals(self._usages)))
            group = ProcessGroup(member.rank, member.role)
            use = run.groups.setdefault(group, GroupUse())
            with source(collected, f"process {member.process.pid}"):
                reading = read_process(member.process)
                if reading is not None:
                    predates_exporter = member.process.create_time() < self._start_time - START_SLACK_SECONDS
                    run.totals.count(
                        member.process, group, reading.usage, predates_exporter=predates_exporter
                    )
                    use.states[reading.state] += 1
                    if not reading.has_ended:
                        use.living.append(LivingMember(member, reading))

    def _exclude_io_of_ended(self, members: Sequence[Member]) -> None:
        """Add the I/O of each ended process to the last reading of its parent.

        When a parent waits for a child, the kernel adds the child's I/O to the parent's /proc/<pid>/io. The increase of the
        parent would otherwise count this I/O a second time.
        """
        processes = {member.process.pid: member.process for member in (*self._previous_members, *members)}
        running_processes = {member.process for member in members}
        ended_members = [
            member for member in self._previous_members if member.process not in running_processes
        ]
        # The youngest first, because the I/O of a grandchild must reach the child before the child's I/O reaches the parent.
        for member in sorted(ended_members, key=lambda member: member.process.create_time(), reverse=True):
            parent = processes.get(member.parent_pid)
            if parent in self._usages and member.process in self._usages:
                self._usages[parent].add_io(self._usages[member.process])
        self._previous_members = members

    def _forget_ended(self, running_runs: Collection[str], members: Sequence[Member], now: float) -> None:
        """Discard the readings of ended processes, and old runs.

        A run is discarded `linger_seconds` after its end, or earlier if `MAX_EXITED_RUNS` other runs have ended since.
        """
        for process in self._usages.keys() - {member.process for member in members}:
            del self._usages[process]
        for run, run_processes in list(self._runs.items()):
            if run in running_runs or run_processes.living():
                run_processes.last_alive_time = now
            elif now - run_processes.last_alive_time > self._linger_seconds:
                del self._runs[run]
        ended_runs = [run for run, run_processes in self._runs.items() if run_processes.last_alive_time < now]
        ended_runs.sort(key=lambda run: self._runs[run].last_alive_time)
        for run in ended_runs[:-MAX_EXITED_RUNS]:
            del self._runs[run]

    def _publish(self, job: Sequence[JobProcess], collected: Collected) -> None:
        """Add the families of all runs."""
        alive_by_rank: dict[tuple[str, str], bool] = {}
        for process in job:
            if process.identity.rank is not None:  # a rank is up if any of its processes is running
                labels = process.identity.run, str(process.identity.rank)
                alive_by_rank[labels] = alive_by_rank.get(labels, False) or process.is_alive
        for labels, alive in alive_by_rank.items():
            collected.add(families.PROCESS_UP, int(alive), *labels)
        for run, run_processes in sorted(self._runs.items()):
            groups = sorted(
                {*run_processes.totals.groups, *run_processes.groups},
                key=lambda group: (group.rank, group.role),
            )
            for group in groups:
                _publish_group(collected, run, group, run_processes)
        self._publish_gpus(collected)

    def _publish_gpus(self, collected: Collected) -> None:
        """Add the GPU memory of the processes that the driver lists and that belong to a run."""
        owners = {
            process.member.process.pid: (run, group.rank, group.role)
            for run, run_processes in self._runs.items()
            for group, use in run_processes.groups.items()
            for process in use.living
        }
        memory_bytes: dict[tuple[str, ...], list[int | None]] = {}  # of each process, by label values
        for use in self._gpu_use():
            if use.pid in owners:
                memory_bytes.setdefault((*owners[use.pid], use.gpu, use.uuid), []).append(use.memory_bytes)
        for labels, values in memory_bytes.items():
            collected.add(families.GPU_MEMORY, _fold_complete(sum, values), *labels)

    def _machine_use(self, now: float, cpu_busy_seconds: float) -> MachineUse:
        """Return the resource use of the runs with a running process.

        The CPUs of a run are the CPUs of its trainers, or of all its processes if no trainer is running.
        """
        memory = from_psutil("meminfo", psutil.virtual_memory)
        runs = []
        for run, run_processes in self._runs.items():
            living = run_processes.living()
            if living:
                trainers = [process.member for process in living if process.member.role == "trainer"]
                owners = trainers or [process.member for process in living]
                runs.append(
                    RunUse(
                        run=run,
                        pids=frozenset(process.member.process.pid for process in living),
                        cpu_seconds=run_processes.totals.cpu_seconds,
                        cpus=len(frozenset[int]().union(*(member.cpus for member in owners))),
                        resident_bytes=sum(process.reading.resident_bytes or 0 for process in living),
                    )
                )
        return MachineUse(
            time=now,
            runs=tuple(runs),
            cpu_busy_seconds=cpu_busy_seconds,
            cpus=psutil.cpu_count() or 1,
            memory_used_bytes=memory.total - memory.available,
        )


def _publish_group(collected: Collected, run: str, group: ProcessGroup, run_processes: RunProcesses) -> None:
    """Add the families of a group. Memory, threads, descriptors and I/O are absent if the value of any running process is unknown."""
    labels = (run, group.rank, group.role)
    use = run_processes.groups.get(group, GroupUse())
    readings = [process.reading for process in use.living]
    collected.add(families.INSTANCES, len(readings), *labels)
    for state, count in use.states.items():
        collected.add(families.STATE, count, *labels, state)
    if readings:
        collected.add(
            families.THREADS, _fold_complete(sum, [reading.threads for reading in readings]), *labels
        )
        resident = _fold_complete(sum, [reading.resident_bytes for reading in readings])
        collected.add(families.RESIDENT, resident, *labels)
        descriptors = _fold_complete(max, [reading.open_descriptors for reading in readings])
        collected.add(families.OPEN_FDS, descriptors, *labels)
    total = run_processes.totals.groups.get(group)
    if total is not None:
        collected.add(families.CPU, total.user_seconds, *labels, "user")
        collected.add(families.CPU, total.system_seconds, *labels, "system")
        if all(reading.usage.read_bytes is not None for reading in readings):
            collected.add(families.IO_READ, total.read_bytes, *labels)
            collected.add(families.IO_WRITTEN, total.written_bytes, *labels)


def _fold_complete(fold: Callable[[list[int]], int], values: Sequence[int | None]) -> int | None:
    """Return the sum or maximum of values, or None if any value is unknown, because a partial sum would be misleading."""
    known_values = [value for value in values if value is not None]
    return fold(known_values) if len(known_values) == len(values) else None
