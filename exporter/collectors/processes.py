"""Processes: what the processes of the job use, by run, rank and role.

Used in the sidecar; `collect` is called from one thread at a time, `use` and `members` may be read from any.
What the feed knows of recording processes comes in through a callable, the rest from /proc; families go out, and
what each run uses of the machine, for the attribution of energy. Totals are kept in the ledger's state, one page
per run: they are published only once they are saved there, as a counter that steps back reads as a reset.

When a process dies its last values stay in the totals. When the sidecar dies the next one goes on from the page.
Where another sidecar of this machine keeps the page, this one publishes gauges only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from exporter.collectors.draft import Draft
from exporter.collectors.family import Collected
from exporter.collectors.job import GpuProcessUse, JobProcess, MachineUse, RunUse
from exporter.collectors.keeping import Fleeting, Keeper, Page
from exporter.collectors.kernel_files import FILE_REASONS, read_file
from exporter.collectors.machine_use import Machine, cpus_of_list, read_machine, read_used_memory
from exporter.collectors.process_counts import Group, RunCounts
from exporter.collectors.process_families import SPECS, STATES, GroupUse, ProcessBlock
from exporter.collectors.process_files import DENIED, ProcessFiles, Stat
from exporter.collectors.process_tree import Identity, Member, Owner, ProcessTree

LINGER_SECONDS = 900.0
_UNREAD_IO = (None,) * 6


def no_job() -> Sequence[JobProcess] | None:
    """Stand for a feed that has not been read."""
    return None


def no_gpus() -> Sequence[GpuProcessUse]:
    """Stand for a machine without GPUs."""
    return ()


@dataclass(slots=True, eq=False)
class _Run:
    """A run in memory.

    Attributes:
        page: Where its counters are kept.
        seen: Monotonic time of its last living process.
        counts: Its counters; None until the page could be read.
        saved: Whether the counters may be shown as they are.
        uses: What its groups use in the present pass.
        cpus: CPUs that its processes may use, by whether they are trainers.
    """

    page: Page
    seen: float
    counts: RunCounts | None = None
    saved: bool = False
    uses: dict[Group, GroupUse] = field(default_factory=dict)
    cpus: dict[bool, set[int]] = field(default_factory=dict)


class ProcessCollector:
    """Reads the processes of the job.

    Args:
        proc: Where procfs is mounted.
        job: Gives the recording processes as the feed shows them; None while it cannot be read.
        gpu_use: Gives what each process uses of each GPU.
        keeper: Where totals are kept; None keeps them for the life of this process.
        linger_seconds: How long the counters of a run are shown after its last process has ended.
        ticks_per_second: The unit of the kernel's CPU times; None asks the system.
        page_size: Bytes; None asks the system.
        clock: Unix time.
        monotonic: Seconds.
        own_pid: This process, which is not of the job even where the job has started it; None asks the system.

    Attributes:
        members: The living processes at the last pass.
        use: What the runs used until the last pass; None while nothing is known.
    """

    name = "processes"
    specs = SPECS
    reasons = (*FILE_REASONS, "state")

    def __init__(
        self,
        *,
        proc: Path = Path("/proc"),
        job: Callable[[], Sequence[JobProcess] | None] = no_job,
        gpu_use: Callable[[], Sequence[GpuProcessUse]] = no_gpus,
        keeper: Keeper | None = None,
        linger_seconds: float = LINGER_SECONDS,
        ticks_per_second: int | None = None,
        page_size: int | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        own_pid: int | None = None,
    ) -> None:
        self.members: tuple[Member, ...] = ()
        self.use: MachineUse | None = None
        self._proc = proc
        self._job = job
        self._gpu_use = gpu_use
        self._keeper = keeper or Fleeting()
        self._linger_seconds = linger_seconds
        self._hertz = ticks_per_second or os.sysconf("SC_CLK_TCK")
        self._files = ProcessFiles(proc, page_size=page_size or os.sysconf("SC_PAGE_SIZE"))
        own = os.getpid() if own_pid is None else own_pid
        self._tree = ProcessTree(self._files, ticks_per_second=self._hertz, ignore={own})
        self._clock = clock
        self._monotonic = monotonic
        self._boot = ""
        self._runs: dict[str, _Run] = {}
        self._undecided: list[Member] = []  # trainers that are gone, though the feed has not noticed yet
        self._limits: dict[Identity, int | None] = {}

    def collect(self) -> Collected:
        """Look at all processes once.

        Raises:
            CollectError: Nothing could be read.
        """
        job = self._job()
        if job is None:
            self.members, self.use = (), None
            return Collected(())
        now = self._monotonic()
        machine = read_machine(self._proc, ticks_per_second=self._hertz)
        self._boot = self._boot or (read_file(self._proc / "sys/kernel/random/boot_id") or "").strip()
        draft = Draft()
        for known in self._runs.values():
            known.uses, known.cpus = {}, {True: set(), False: set()}
        for run in {each.process.run for each in job}:
            self._open(run, draft, now)
        members, ended = self._tree.update(
            job, draft=draft, now=now, boot_time=machine.boot_time, uptime=machine.uptime
        )
        self._note_ends(ended, job)
        self._read(members, machine, draft)
        gpus = self._join_gpus(members)
        self._note_life({each.process.run for each in job if each.alive}, now)
        self._save(draft)
        self._publish(job, gpus, draft)
        self._forget(now)
        self.members = tuple(member for member in members if not member.stat.ended)
        self.use = self._machine_use(machine, now, draft)
        self._say_what_is_hidden(draft)
        return draft.finish()

    # Runs -----------------------------------------------------------------------------------------------

    def _open(self, run: str, draft: Draft, now: float) -> None:
        """Know a run, and load its counters as soon as they can be had."""
        known = self._runs.get(run)
        if known is None:
            known = self._runs[run] = _Run(
                self._keeper.page("processes", run), now, cpus={True: set(), False: set()}
            )
        if known.counts is not None:
            return
        with draft.part():
            rows = known.page.load()
            if rows is None:
                draft.unsupported(f"another sidecar counts the processes of run {run!r}: no totals here")
                return
            counts = RunCounts(self._boot)
            counts.resume(rows)
            if counts.seen:
                known.seen = now - max(0.0, self._clock() - counts.seen)
            for (pid, start), (rank, role) in counts.living().items():
                # Whatever has ended since then is found by not being there any more.
                unread = Stat(pid, "", "S", 0, 0, 0, 0, 0, start, 0, 0)
                self._tree.resume(Member(Owner(run, rank), role, unread, root=role == "trainer"))
            known.counts = counts

    def _note_life(self, alive: Collection[str], now: float) -> None:
        for run, known in self._runs.items():
            if run in alive or any(use.instances for use in known.uses.values()):
                known.seen = now
                if known.counts is not None:
                    known.counts.seen = self._clock()

    def _forget(self, now: float) -> None:
        for run, known in list(self._runs.items()):
            if now - known.seen > self._linger_seconds:
                known.page.close()
                del self._runs[run]

    def _save(self, draft: Draft) -> None:
        for known in self._runs.values():
            counts = known.counts
            if counts is None or not (counts.changed or not known.saved):
                continue
            known.saved = False
            with draft.part():
                known.page.save(counts.rows())
                known.saved, counts.changed = True, False

    # Counting -------------------------------------------------------------------------------------------

    def _note_ends(self, ended: Sequence[Member], job: Sequence[JobProcess]) -> None:
        """Count who is gone; of recording processes once the feed has noticed too, which knows how."""
        by_id = {each.process.id: each for each in job}
        waiting: list[Member] = []
        for member in [*self._undecided, *ended]:
            self._limits.pop(member.identity, None)
            recorded = by_id.get(member.process_id)
            if recorded is not None and recorded.alive:
                waiting.append(member)
                continue
            known = self._runs.get(member.owner.run)
            if known is not None and known.counts is not None:
                orderly = recorded is not None and recorded.final
                known.counts.end(member.identity, "orderly" if orderly else "unknown")
        self._undecided = waiting

    def _read(self, members: Sequence[Member], machine: Machine, draft: Draft) -> None:
        for member in members:
            run = member.owner.run
            known = self._runs.get(run)
            if known is None:  # its recording processes are long gone, and were forgotten
                self._open(run, draft, self._monotonic())
                known = self._runs[run]
            use = known.uses.setdefault((member.owner.rank, member.role), GroupUse())
            use.states[STATES.get(member.stat.state, "idle")] += 1
            with draft.part():
                if member.stat.ended:
                    self._bury(member, known)
                else:
                    self._read_member(member, known, use, machine)

    def _bury(self, member: Member, known: _Run) -> None:
        """Count a zombie that was seen alive; once, since it has no mark after that."""
        counts = known.counts
        if counts is None or not counts.knows(member.identity):
            return
        counts.count(member.identity, (member.owner.rank, member.role), self._public_values(member.stat))
        how = "unknown"
        if member.stat.exit_code:
            how = "failed"
        elif isinstance(self._files.io(member.stat.pid), tuple):  # needs the same right as the status does
            how = "completed"
        counts.end(member.identity, how)

    def _public_values(self, stat: Stat) -> list[float | None]:
        return [stat.user_ticks / self._hertz, stat.system_ticks / self._hertz, stat.major_faults]

    def _read_member(self, member: Member, known: _Run, use: GroupUse, machine: Machine) -> None:
        stat = member.stat
        status, memory = self._files.status(stat.pid), self._files.resident_and_shared(stat.pid)
        if status is None or memory is None:
            return  # it ends in this moment, which the next pass will notice
        io = self._files.io(stat.pid)
        use.instances += 1
        use.io_denied = use.io_denied or io is DENIED
        use.resident_bytes += memory[0]
        use.shared_bytes += memory[1]
        use.virtual_bytes += stat.virtual_bytes
        use.threads += stat.threads
        started = machine.boot_time + stat.start_ticks / self._hertz
        use.start_seconds = started if use.start_seconds is None else min(started, use.start_seconds)
        known.cpus[member.role == "trainer"] |= cpus_of_list(status.cpus)
        if known.counts is not None:
            values = [*self._public_values(stat), status.voluntary, status.involuntary]
            values += io if isinstance(io, tuple) else _UNREAD_IO
            known.counts.count(member.identity, (member.owner.rank, member.role), values)
        self._read_descriptors(member, use)

    def _read_descriptors(self, member: Member, use: GroupUse) -> None:
        pid = member.stat.pid
        opened = self._files.open_descriptors(pid)
        if opened is DENIED:
            use.descriptors_denied = True
        elif opened is not None and (use.open_descriptors is None or opened > use.open_descriptors):
            if member.identity not in self._limits:
                self._limits[member.identity] = self._files.descriptor_limit(pid)
            use.open_descriptors, use.descriptor_limit = opened, self._limits[member.identity]

    def _join_gpus(self, members: Sequence[Member]) -> dict[tuple[str, ...], list[GpuProcessUse]]:
        """Find whose processes use which GPU, and count their SM seconds."""
        by_pid = {member.stat.pid: member for member in members if not member.stat.ended}
        found: dict[tuple[str, ...], list[GpuProcessUse]] = {}
        busy: dict[tuple[int, str, str], float] = {}
        for use in self._gpu_use():
            member = by_pid.get(use.pid)
            if member is None:
                continue
            labels = (member.owner.run, member.owner.rank, member.role, use.gpu, use.uuid)
            found.setdefault(labels, []).append(use)
            if use.sm_seconds is not None:  # a process may have several MIG instances of one GPU
                key = (use.pid, use.gpu, use.uuid)
                busy[key] = busy.get(key, 0.0) + use.sm_seconds
        for (pid, gpu, uuid), seconds in busy.items():
            member = by_pid[pid]
            counts = self._runs[member.owner.run].counts
            if counts is not None and counts.knows(member.identity):
                counts.count_gpu(member.identity, gpu, uuid, seconds)
        return found

    # What goes out --------------------------------------------------------------------------------------

    def _publish(
        self,
        job: Sequence[JobProcess],
        gpus: dict[tuple[str, ...], list[GpuProcessUse]],
        draft: Draft,
    ) -> None:
        block = ProcessBlock()
        for each in job:
            if each.process.rank is not None:
                block.add_up(each.process.run, str(each.process.rank), alive=each.alive)
        for run, known in self._runs.items():
            for (rank, role), use in known.uses.items():
                block.add_use((run, rank, role), use)
            if known.counts is not None and known.saved:
                block.add_counts(run, known.counts, known.uses)
        for labels, uses in gpus.items():
            block.add_gpu(labels, uses)
        block.put_into(draft)

    def _machine_use(self, machine: Machine, now: float, draft: Draft) -> MachineUse:
        used: int | None = None
        with draft.part():
            used = read_used_memory(self._proc)
        runs = []
        for run, known in self._runs.items():
            pids = frozenset(member.stat.pid for member in self.members if member.owner.run == run)
            if pids and known.counts is not None:
                cpus = len(known.cpus[True] or known.cpus[False])
                resident = sum(use.resident_bytes for use in known.uses.values())
                runs.append(RunUse(run, pids, known.counts.cpu_seconds, cpus, resident))
        return MachineUse(now, tuple(runs), machine.busy_seconds, machine.cpus, used)

    def _say_what_is_hidden(self, draft: Draft) -> None:
        if self._tree.hidden:
            draft.unsupported(
                "processes of the job cannot be seen from here (another pid namespace, or hidepid): let the"
                " exporter run in theirs, or in the host's"
            )
        if not self._tree.listed:
            draft.unsupported("the kernel keeps no lists of children (CONFIG_PROC_CHILDREN): trainers only")
