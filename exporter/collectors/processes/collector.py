"""Processes: what the processes of the job use, by run, rank and role.

Used in the sidecar; `collect` is called from one thread at a time, `use` and `members` may be read from any.
What the feed knows of recording processes comes in through a callable, the rest from /proc and psutil; families go
out, and what each run uses of the machine, for the attribution of energy. Totals are kept in the ledger's state, one
page per run: they are published only once they are saved there, as a counter that steps back reads as a reset.

State and CPU time of every process are read in every pass. Memory, I/O and descriptors cost more: a pass reads them for
as long as its budget lasts, recording processes first, then those that were read longest ago; sums are of the last
readings.

When a process dies its last values stay in the totals. When the sidecar dies the next one goes on from the page.
Where another sidecar of this machine keeps the page, this one publishes gauges only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import psutil

from exporter.collectors.host.cpu import busy_seconds
from exporter.collectors.job import GpuProcessUse, JobProcess, MachineUse, RunUse
from exporter.collectors.keeping import Fleeting, Keeper, Page
from exporter.collectors.kernel_files import procfs, read_file, source
from exporter.collectors.processes.counters import RunCounts
from exporter.collectors.processes.families import GPU_MEMORY, SPECS, UP
from exporter.collectors.processes.stat import Stat
from exporter.collectors.processes.tree import Identity, Member, Owner, ProcessTree
from exporter.collectors.processes.use import (
    STATES,
    GroupUse,
    Reading,
    Samples,
    add_counts,
    add_use,
    status_of,
)
from exporter.families import Collected

LINGER_SECONDS = 900.0
Uses = dict[tuple[str, str, str], GroupUse]
"""By run, rank and role."""

BUDGET_SECONDS = 0.025
"""Time of a pass in which it may begin to read another process: half a per cent of a core by default."""


@dataclass(slots=True, eq=False)
class _Run:
    """A run in memory.

    Attributes:
        page: Where its counters are kept.
        seen: Monotonic time of its last living process.
        counts: Its counters; None until the page could be read.
        saved: Whether the counters may be shown as they are.
    """

    page: Page
    seen: float
    counts: RunCounts | None = None
    saved: bool = False


class ProcessCollector:
    """Reads the processes of the job.

    Args:
        job: Gives the recording processes as the feed shows them; None while it cannot be read.
        gpu_use: Gives what each process uses of each GPU.
        keeper: Where totals are kept; None keeps them for the life of this process.
        linger_seconds: How long the counters of a run are shown after its last process has ended.
        clock: Unix time.
        monotonic: Seconds.
        own_pid: This process, which is not of the job even where the job has started it; None asks the system.
        budget_seconds: Of one pass.

    Attributes:
        members: The living processes at the last pass.
        use: What the runs used until the last pass; None while nothing is known.
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
        budget_seconds: float = BUDGET_SECONDS,
    ) -> None:
        self.members: tuple[Member, ...] = ()
        self.use: MachineUse | None = None
        self._proc = procfs()
        self._job = job
        self._gpu_use = gpu_use
        self._keeper = keeper or Fleeting()
        self._linger_seconds = linger_seconds
        self._tree = ProcessTree(self._proc, ignore={os.getpid() if own_pid is None else own_pid})
        self._clock = clock
        self._monotonic = monotonic
        self._budget_seconds = budget_seconds
        self._boot = ""
        self._runs: dict[str, _Run] = {}
        self._undecided: list[Member] = []  # trainers that are gone, though the feed has not noticed yet
        self._readings: dict[Identity, Reading] = {}

    def collect(self) -> Collected:
        """Look at all processes once."""
        collected = Collected()
        job = self._job()
        if job is None:
            self.members, self.use = (), None
            return collected
        with source(collected, self._proc / "stat"):
            self._collect(job, collected)
        return collected

    def _collect(self, job: Sequence[JobProcess], collected: Collected) -> None:
        now, boot_time, busy = self._monotonic(), psutil.boot_time(), busy_seconds()
        self._boot = self._boot or (read_file(self._proc / "sys/kernel/random/boot_id") or "").strip()
        for run in {each.process.run for each in job}:
            self._open(run, collected, now)
        members, ended = self._tree.update(
            job, collected=collected, now=now, boot_time=boot_time, uptime=self._clock() - boot_time
        )
        self._note_ends(ended, job)
        self._read(members, collected, now)
        uses = self._count(members, collected, now)
        alive = {each.process.run for each in job if each.alive}
        self._note_life(alive | {run for (run, _, _), use in uses.items() if use.living}, now)
        self._save(collected)
        self._publish(job, uses, collected)
        self._forget(now)
        self.members = tuple(member for member in members if not member.stat.ended)
        self.use = self._machine_use(uses, now, busy, collected)
        self._say_what_is_hidden(collected)

    # Runs -----------------------------------------------------------------------------------------------

    def _open(self, run: str, collected: Collected, now: float) -> _Run:
        """Know a run, and load its counters as soon as they can be had."""
        known = self._runs.get(run)
        if known is None:
            known = self._runs[run] = _Run(self._keeper.page("processes", run), now)
        if known.counts is not None:
            return known
        with collected.part():
            rows = known.page.load()
            if rows is None:
                collected.unsupported.append(
                    f"another sidecar counts the processes of run {run!r}: no totals here"
                )
                return known
            counts = RunCounts(self._boot)
            counts.resume(rows)
            if counts.seen:
                known.seen = now - max(0.0, self._clock() - counts.seen)
            for (pid, start), (rank, role) in counts.living().items():
                # Whatever has ended since then is found by not being there any more.
                unread = Stat(pid, "", "S", 0, 0.0, 0.0, 0, start)
                self._tree.resume(Member(Owner(run, rank), role, unread, root=role == "trainer"))
            known.counts = counts
        return known

    def _note_life(self, alive: Collection[str], now: float) -> None:
        for run, known in self._runs.items():
            if run in alive:
                known.seen = now
                if known.counts is not None:
                    known.counts.seen = self._clock()

    def _forget(self, now: float) -> None:
        for run, known in list(self._runs.items()):
            if now - known.seen > self._linger_seconds:
                known.page.close()
                del self._runs[run]

    def _save(self, collected: Collected) -> None:
        for known in self._runs.values():
            counts = known.counts
            if counts is not None and (counts.changed or not known.saved):
                known.saved = False
                with collected.part():
                    known.page.save(counts.rows())
                    known.saved, counts.changed = True, False

    # Counting -------------------------------------------------------------------------------------------

    def _note_ends(self, ended: Sequence[Member], job: Sequence[JobProcess]) -> None:
        """Count who is gone; of recording processes once the feed has noticed too, which knows how."""
        by_id = {each.process.id: each for each in job}
        waiting: list[Member] = []
        for member in [*self._undecided, *ended]:
            recorded = by_id.get(member.process_id)
            if recorded is not None and recorded.alive:
                waiting.append(member)
                continue
            known = self._runs.get(member.owner.run)
            if known is not None and known.counts is not None:
                orderly = recorded is not None and recorded.final
                known.counts.end(member.identity, "orderly" if orderly else "unknown")
        self._undecided = waiting

    def _read(self, members: Sequence[Member], collected: Collected, now: float) -> None:
        """Read what costs more than the state, for as many processes as there is time for."""
        before, self._readings = self._readings, {}
        for member in members:
            self._readings[member.identity] = before.get(member.identity, Reading())

        def urgency(member: Member) -> tuple[bool, float]:
            at = self._readings[member.identity].at
            return not member.root, float("-inf") if at is None else at

        for member in sorted(members, key=urgency):
            if self._monotonic() - now >= self._budget_seconds:
                break
            if not member.stat.ended:
                with source(collected, f"process {member.stat.pid}"):
                    try:
                        self._readings[member.identity].update(member.stat.pid, now)
                    except psutil.NoSuchProcess:
                        continue  # it ends in this moment, which the next pass will notice

    def _count(self, members: Sequence[Member], collected: Collected, now: float) -> Uses:
        uses: Uses = {}
        for member in members:
            stat, group = member.stat, (member.owner.rank, member.role)
            # A run whose recording processes are long gone was forgotten.
            known = self._runs.get(member.owner.run) or self._open(member.owner.run, collected, now)
            use = uses.setdefault((member.owner.run, *group), GroupUse())
            use.states[STATES.get(stat.state, "idle")] += 1
            reading = self._readings[member.identity]
            values = [stat.user_seconds, stat.system_seconds, *(reading.io or (None, None))]
            if not stat.ended:
                use.living.append((member, reading))
                if known.counts is not None:
                    known.counts.count(member.identity, group, values)
            elif known.counts is not None and known.counts.knows(member.identity):
                # A zombie that was seen alive; once, since it is not known after that.
                known.counts.count(member.identity, group, values)
                known.counts.end(member.identity, status_of(stat, reading))
        return uses

    # What goes out --------------------------------------------------------------------------------------

    def _publish(
        self,
        job: Sequence[JobProcess],
        uses: Uses,
        collected: Collected,
    ) -> None:
        samples: Samples = {spec: {} for spec in SPECS}
        for each in job:
            if each.process.rank is not None:  # one living process of a rank is enough
                labels = each.process.run, str(each.process.rank)
                samples[UP][labels] = max(samples[UP].get(labels, 0.0), float(each.alive))
        for run, known in self._runs.items():
            if known.counts is not None and known.saved:
                for group, values, ends in known.counts.groups():
                    add_counts(samples, (run, *group), values, ends, uses.get((run, *group)))
        for group_labels, use in uses.items():
            add_use(samples, group_labels, use)
        self._add_gpus(samples[GPU_MEMORY], uses)
        for spec, values_by_labels in samples.items():
            collected.add_family(spec, values_by_labels)

    def _add_gpus(self, memory: dict[tuple[str, ...], float], uses: Uses) -> None:
        owners = {member.stat.pid: labels for labels, use in uses.items() for member, _ in use.living}
        sizes: dict[tuple[str, ...], list[int | None]] = {}
        for each in self._gpu_use():
            if each.pid in owners:
                sizes.setdefault((*owners[each.pid], each.gpu, each.uuid), []).append(each.memory_bytes)
        for labels, found in sizes.items():
            known = [size for size in found if size is not None]
            if len(known) == len(found):  # a part of the sum would be another number
                memory[labels] = sum(known)

    def _machine_use(
        self,
        uses: Uses,
        now: float,
        busy: float,
        collected: Collected,
    ) -> MachineUse:
        used: int | None = None
        with source(collected, self._proc / "meminfo"):
            memory = psutil.virtual_memory()
            used = memory.total - memory.available
        runs = []
        for run, known in self._runs.items():
            living = [each for labels, use in uses.items() if labels[0] == run for each in use.living]
            if living and known.counts is not None:
                roots = sorted((member for member, _ in living), key=lambda member: member.role != "trainer")
                trainers = [member for member in roots if member.role == "trainer"] or roots
                cpus = len(frozenset[int]().union(*(member.cpus for member in trainers)))
                resident = sum(reading.resident_bytes or 0 for _, reading in living)
                pids = frozenset(member.stat.pid for member, _ in living)
                runs.append(RunUse(run, pids, known.counts.cpu_seconds, cpus, resident))
        return MachineUse(now, tuple(runs), busy, psutil.cpu_count() or 1, used)

    def _say_what_is_hidden(self, collected: Collected) -> None:
        if self._tree.hidden:
            collected.unsupported.append(
                "processes of the job cannot be seen from here (another pid namespace, or hidepid): let the"
                " exporter run in theirs, or in the host's"
            )
        if not self._tree.listed:
            collected.unsupported.append(
                "the kernel keeps no lists of children (CONFIG_PROC_CHILDREN): trainers only"
            )
