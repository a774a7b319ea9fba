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
    """A running member and the reading of the member."""

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
        return [each for use in self.groups.values() for each in use.living]


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
            self._forget_over({each.process.run for each in job if each.alive}, members, now)
            self._publish(job, collected)
            living = [each for known in self._runs.values() for each in known.living()]
            self.members = tuple(each.member for each in living)
            self.use = self._machine_use(now, busy)
            if self._tree.hidden:
                collected.unsupported.append(
                    "processes of the job are not visible (another pid namespace, or hidepid): run the exporter in the"
                    " pid namespace of the job or of the host"
                )
        return collected

    def _count(self, members: Sequence[Member], collected: Collected, now: float) -> None:
        """Read every member and add the use to the run."""
        for known in self._runs.values():
            known.groups = {}
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

    def _forget_over(self, alive: Collection[str], members: Sequence[Member], now: float) -> None:
        """Discard runs that ended more than `linger_seconds` ago, and the readings of ended processes."""
        processes = {member.process for member in members}
        for run, known in list(self._runs.items()):
            known.totals.forget_ended(processes)
            if run in alive or known.living():
                known.seen = now
            elif now - known.seen > self._linger_seconds:
                del self._runs[run]

    def _publish(self, job: Sequence[JobProcess], collected: Collected) -> None:
        up: dict[tuple[str, str], bool] = {}
        for each in job:
            if each.process.rank is not None:  # a single running process of a rank is enough
                labels = each.process.run, str(each.process.rank)
                up[labels] = up.get(labels, False) or each.alive
        for labels, alive in up.items():
            collected.add(families.UP, int(alive), *labels)
        for run, known in sorted(self._runs.items()):
            groups = sorted({*known.totals.groups, *known.groups}, key=lambda each: (each.rank, each.role))
            for group in groups:
                _publish_group(collected, run, group, known)
        self._publish_gpus(collected)

    def _publish_gpus(self, collected: Collected) -> None:
        owners = {
            each.member.process.pid: (run, group.rank, group.role)
            for run, known in self._runs.items()
            for group, use in known.groups.items()
            for each in use.living
        }
        sizes: dict[tuple[str, ...], list[int | None]] = {}
        for each in self._gpu_use():
            if each.pid in owners:
                sizes.setdefault((*owners[each.pid], each.gpu, each.uuid), []).append(each.memory_bytes)
        for labels, found in sizes.items():
            collected.add(families.GPU_MEMORY, _complete(sum, found), *labels)

    def _machine_use(self, now: float, busy: float) -> MachineUse:
        memory = from_psutil("meminfo", psutil.virtual_memory)
        runs = []
        for run, known in self._runs.items():
            living = known.living()
            if living:
                trainers = [each.member for each in living if each.member.role == "trainer"]
                roots = trainers or [each.member for each in living]
                runs.append(
                    RunUse(
                        run,
                        frozenset(each.member.process.pid for each in living),
                        known.totals.cpu_seconds,
                        len(frozenset[int]().union(*(member.cpus for member in roots))),
                        sum(each.reading.resident_bytes or 0 for each in living),
                    )
                )
        used = memory.total - memory.available
        return MachineUse(now, tuple(runs), busy, psutil.cpu_count() or 1, used)


def _publish_group(collected: Collected, run: str, group: ProcessGroup, known: RunProcesses) -> None:
    labels = (run, group.rank, group.role)
    use = known.groups.get(group, GroupUse())
    readings = [each.reading for each in use.living]
    collected.add(families.INSTANCES, len(readings), *labels)
    for state, count in use.states.items():
        collected.add(families.STATE, count, *labels, state)
    if readings:
        collected.add(families.THREADS, _complete(sum, [each.threads for each in readings]), *labels)
        resident = _complete(sum, [each.resident_bytes for each in readings])
        collected.add(families.RESIDENT, resident, *labels)
        descriptors = _complete(max, [each.open_descriptors for each in readings])
        collected.add(families.OPEN_FDS, descriptors, *labels)
    total = known.totals.groups.get(group)
    if total is not None:
        collected.add(families.CPU, total.user_seconds, *labels, "user")
        collected.add(families.CPU, total.system_seconds, *labels, "system")
        if all(each.usage.read_bytes is not None for each in readings):
            collected.add(families.IO_READ, total.read_bytes, *labels)
            collected.add(families.IO_WRITTEN, total.written_bytes, *labels)


def _complete(fold: Callable[[list[int]], int], found: Sequence[int | None]) -> int | None:
    """Return a sum or maximum; None if a part is unknown, since the rest would be a different number."""
    known = [each for each in found if each is not None]
    return fold(known) if len(known) == len(found) else None
