"""Processes: what the processes of the job use, by run, rank and role; a pid is never a label.

Totals are kept in the ledger's state, one page per run, and published once they are saved there. Where another sidecar
keeps the page, there are gauges only. `use` and `members` may be read from any thread.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import psutil

from exporter.collectors.host.cpu import busy_seconds
from exporter.collectors.job import (
    GpuProcessUse,
    JobProcess,
    Keeper,
    MachineUse,
    Page,
    Role,
    RunUse,
)
from exporter.collectors.kernel_files import procfs, read_optional, source
from exporter.collectors.processes.counters import RunCounts
from exporter.collectors.processes.tree import Identity, Member, ProcessTree, Stat
from exporter.families import Collected, table

SPECS = table("""
training_process_up{run,rank}: Whether the rank's process is alive (1) or has ended (0), as the kernel's
    lock on its feed file says. Absent a while after the end. <- record lock of the feed
training_process_instances{run,rank,role}: Living processes; roles are trainer, dataloader (worker processes
    made by multiprocessing) and other. Absent where the processes cannot be seen (another pid namespace).
    <- feed, /proc/<pid>/task/*/children
training_process_state{run,rank,role,state}: Processes in a state: running, sleeping, disk_sleep, stopped,
    tracing_stop, zombie, dead, idle. Absent for a state that none is in. <- /proc/<pid>/stat state
training_process_cpu_seconds_total{run,rank,role,mode}: CPU time of all processes that there ever were,
    those that ended included. Absent where the processes cannot be seen (another pid namespace). Absent
    also while its total cannot be kept. <- /proc/<pid>/stat utime, stime
training_process_resident_bytes{run,rank,role}: Memory in RAM; what several processes share is counted for
    each. Absent where the processes cannot be seen (another pid namespace). <- /proc/<pid>/statm resident
training_process_io_read_bytes_total{run,rank,role}: Bytes that were fetched from storage. Absent without
    the right to read it (same user, or ptrace). <- /proc/<pid>/io read_bytes
training_process_io_written_bytes_total{run,rank,role}: Bytes that were sent to storage. Absent without the
    right to read it (same user, or ptrace). <- /proc/<pid>/io write_bytes
training_process_threads{run,rank,role}: Threads. Absent where the processes cannot be seen (another pid
    namespace). <- /proc/<pid>/stat num_threads
training_process_open_fds{run,rank,role}: File descriptors that are open in the process with the most.
    Absent without the right to read it (same user, or ptrace). <- /proc/<pid>/fd
training_process_gpu_memory_bytes{run,rank,role,gpu,uuid}: GPU memory of the processes. Absent where the
    driver does not tell it (some MIG modes, vGPU) or gives pids of another namespace. <- NVML compute
    running processes
""")
(UP, INSTANCES, STATE, CPU, RESIDENT, IO_READ, IO_WRITTEN, THREADS, OPEN_FDS, GPU_MEMORY) = SPECS

LINGER_SECONDS = 900.0

STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "disk_sleep",
    "T": "stopped",
    "t": "tracing_stop",
    "Z": "zombie",
    "X": "dead",
    "x": "dead",
    "I": "idle",
}


class Reading(NamedTuple):
    """What psutil reads of a process; None where that is not known, or not ours to know."""

    resident_bytes: int | None = None
    read_bytes: int | None = None
    written_bytes: int | None = None
    open_descriptors: int | None = None


@dataclass(slots=True, eq=False)
class GroupUse:
    """What one group uses now: processes by state, and those that have not ended with what was read of them."""

    states: Counter[str] = field(default_factory=Counter)
    living: list[tuple[Member, Reading]] = field(default_factory=list)


Uses = dict[tuple[str, str, Role], GroupUse]
"""By run, rank and role."""


@dataclass(slots=True, eq=False)
class _Run:
    """A run in memory: its last life (monotonic), its counters once they were read, whether they may be shown."""

    page: Page
    seen: float
    counts: RunCounts | None = None
    saved: bool = False


class ProcessCollector:
    """Reads the processes of the job; the counters of a run go `linger_seconds` after its last process has ended.

    `members` are the living processes at the last pass, `use` is what the runs used until then; None while nothing is
    known. `own_pid` is not of the job even where the job has started it.
    """

    name = "processes"
    specs = SPECS

    def __init__(
        self,
        *,
        job: Callable[[], Sequence[JobProcess] | None] = lambda: None,
        gpu_use: Callable[[], Sequence[GpuProcessUse]] = tuple,
        keeper: Keeper | None = None,
        linger_seconds: float = LINGER_SECONDS,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        own_pid: int | None = None,
    ) -> None:
        self.members: tuple[Member, ...] = ()
        self.use: MachineUse | None = None
        self._proc = procfs()
        self._job = job
        self._gpu_use = gpu_use
        self._keeper = keeper or Keeper()
        self._linger_seconds = linger_seconds
        self._tree = ProcessTree(self._proc, ignore={os.getpid() if own_pid is None else own_pid})
        self._clock = clock
        self._monotonic = monotonic
        self._boot = ""
        self._runs: dict[str, _Run] = {}
        self._processes: dict[Identity, psutil.Process] = {}

    def collect(self) -> Collected:
        """Look at all processes once."""
        collected = Collected()
        job = self._job()
        if job is None:
            self.members, self.use = (), None
            return collected
        with source(collected, self._proc / "stat"):
            now, boot_time, busy = self._monotonic(), psutil.boot_time(), busy_seconds()
            self._boot = self._boot or read_optional(self._proc / "sys/kernel/random/boot_id") or ""
            for run in {each.process.run for each in job}:
                self._open(run, collected, now)
            members, ended = self._tree.update(
                job, collected=collected, now=now, boot_time=boot_time, uptime=self._clock() - boot_time
            )
            for member in ended:
                known = self._runs.get(member.run)
                if known is not None and known.counts is not None:
                    known.counts.end(member.identity)
            uses = self._count(members, collected, now)
            living = {run for (run, _, _), use in uses.items() if use.living}
            self._keep(living | {each.process.run for each in job if each.alive}, collected, now)
            self._publish(job, uses, collected)
            self.members = tuple(member for member in members if not member.stat.ended)
            self.use = self._machine_use(uses, now, busy)
            if self._tree.hidden:
                collected.unsupported.append(
                    "processes of the job cannot be seen from here (another pid namespace, or hidepid): let the"
                    " exporter run in theirs, or in the host's"
                )
        return collected

    def _open(self, run: str, collected: Collected, now: float) -> _Run:
        """Know a run, and load its counters as soon as they can be had."""
        if run not in self._runs:
            self._runs[run] = _Run(self._keeper.page("processes", run), now)
        known = self._runs[run]
        if known.counts is None:
            with collected.part():
                rows = known.page.load()
                if rows is None:
                    collected.unsupported.append(
                        f"another sidecar counts the processes of run {run!r}: no totals here"
                    )
                    return known
                counts = known.counts = RunCounts(self._boot, rows)
                if counts.seen:
                    known.seen = now - max(0.0, self._clock() - counts.seen)
                for identity, mark in counts.living.items():
                    # Whatever has ended since then is found by not being there any more.
                    rank, role = mark.group
                    self._tree.resume(Member(run, rank, role, Stat(*identity), root=role == "trainer"))
        return known

    def _keep(self, alive: Collection[str], collected: Collected, now: float) -> None:
        """Save the counters, and forget the runs that are long over."""
        for run, known in list(self._runs.items()):
            counts = known.counts
            if run in alive:
                known.seen = now
                if counts is not None:
                    counts.seen = self._clock()
            if counts is not None and (counts.changed or not known.saved):
                known.saved = False
                with collected.part():
                    known.page.save(counts.rows())
                    known.saved, counts.changed = True, False
            if now - known.seen > self._linger_seconds:
                known.page.close()
                del self._runs[run]

    def _count(self, members: Sequence[Member], collected: Collected, now: float) -> Uses:
        uses: Uses = {}
        before, self._processes = self._processes, {}
        for member in members:
            stat, group = member.stat, (member.rank, member.role)
            # A run whose recording processes are long gone was forgotten.
            counts = (self._runs.get(member.run) or self._open(member.run, collected, now)).counts
            use = uses.setdefault((member.run, *group), GroupUse())
            use.states[STATES.get(stat.state, "idle")] += 1
            reading = Reading()
            with source(collected, f"process {stat.pid}"):
                reading = self._read(member, before)
            times = (stat.user_seconds, stat.system_seconds)
            if not stat.ended:
                use.living.append((member, reading))
            if counts is not None:
                counts.count(member.identity, group, (*times, reading.read_bytes, reading.written_bytes))
        return uses

    def _read(self, member: Member, before: dict[Identity, psutil.Process]) -> Reading:
        reading = Reading()
        try:
            process = before.get(member.identity) or psutil.Process(member.stat.pid)
            self._processes[member.identity] = process
            reading = reading._replace(resident_bytes=process.memory_info().rss)
            io = process.io_counters()
            reading = reading._replace(read_bytes=io.read_bytes, written_bytes=io.write_bytes)
            return reading._replace(open_descriptors=process.num_fds())
        except psutil.Error:  # it ends in this moment, or is not ours
            return reading

    def _publish(self, job: Sequence[JobProcess], uses: Uses, collected: Collected) -> None:
        up: dict[tuple[str, str], bool] = {}
        for each in job:
            if each.process.rank is not None:  # one living process of a rank is enough
                labels = each.process.run, str(each.process.rank)
                up[labels] = up.get(labels, False) or each.alive
        for labels, alive in up.items():
            collected.add(UP, int(alive), *labels)
        totals = {
            (run, *group): total
            for run, known in self._runs.items()
            if known.counts is not None and known.saved
            for group, total in known.counts.totals.items()
        }
        for group in sorted({*totals, *uses}):
            use = uses.get(group, GroupUse())
            readings = [reading for _, reading in use.living]
            collected.add(INSTANCES, len(readings), *group)
            for state, count in use.states.items():
                collected.add(STATE, count, *group, state)
            if readings:
                collected.add(THREADS, sum(member.stat.threads for member, _ in use.living), *group)
                collected.add(RESIDENT, _whole(sum, [each.resident_bytes for each in readings]), *group)
                collected.add(OPEN_FDS, _whole(max, [each.open_descriptors for each in readings]), *group)
            if group in totals:
                total = totals[group]
                for mode in ("user", "system"):
                    collected.add(CPU, total[mode], *group, mode)
                if all(each.read_bytes is not None for each in readings):
                    collected.add(IO_READ, total["read_bytes"], *group)
                    collected.add(IO_WRITTEN, total["written_bytes"], *group)
        self._add_gpus(collected, uses)

    def _add_gpus(self, collected: Collected, uses: Uses) -> None:
        owners = {member.stat.pid: group for group, use in uses.items() for member, _ in use.living}
        sizes: dict[tuple[str, ...], list[int | None]] = {}
        for each in self._gpu_use():
            if each.pid in owners:
                sizes.setdefault((*owners[each.pid], each.gpu, each.uuid), []).append(each.memory_bytes)
        for labels, found in sizes.items():
            collected.add(GPU_MEMORY, _whole(sum, found), *labels)

    def _machine_use(self, uses: Uses, now: float, busy: float) -> MachineUse:
        memory = psutil.virtual_memory()
        runs = []
        for run, known in self._runs.items():
            living = [each for group, use in uses.items() if group[0] == run for each in use.living]
            if living and known.counts is not None:
                members = [member for member, _ in living]
                trainers = [member for member in members if member.role == "trainer"] or members
                cpus = len(frozenset[int]().union(*(member.cpus for member in trainers)))
                resident = sum(reading.resident_bytes or 0 for _, reading in living)
                pids = frozenset(member.stat.pid for member in members)
                runs.append(RunUse(run, pids, known.counts.cpu_seconds, cpus, resident))
        used = memory.total - memory.available
        return MachineUse(now, tuple(runs), busy, psutil.cpu_count() or 1, used)


def _whole(fold: Callable[[list[int]], int], found: Sequence[int | None]) -> int | None:
    """A sum or maximum; None where a part is not known, as that of the others would be another number."""
    known = [each for each in found if each is not None]
    return fold(known) if len(known) == len(found) else None
