"""Processes of the job on this machine, by run, rank and role.

A process belongs to the nearest recording ancestor: ranks below torchrun's agent do not belong to the agent. A process remains a
member until the end of the process, even after the end of the trainer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import psutil

from exporter.collectors.job import JobProcess, Role
from exporter.collectors.kernel_files import from_psutil, parse, procfs, read_optional, source
from exporter.errors import CollectError
from exporter.families import Collected

DISCOVER_SECONDS = 15.0
"""Interval between two searches for new descendants, which read the parent of every process of the machine."""
YOUNG_SECONDS = 2.0
"""Age at which the role of a child is determined: a younger child may execute a different program."""
CLOCK_STEP_SECONDS = 60.0
"""Largest step of the wall clock between the start of a process and its first snapshot."""

_WORKER_THREAD = "pt_data_worker"
_SPAWNED = "multiprocessing.spawn"
_FORKSERVER = "multiprocessing.forkserver"


@dataclass(slots=True, eq=False)
class Member:
    """Process of a run."""

    run: str
    rank: str  # "" for a process of the run without a rank, such as torchrun's agent
    role: Role
    process: psutil.Process
    root: bool = False  # a recording process without a recording ancestor of the same rank
    known_as: str = (
        ""  # name of the program when the role was found; a process may execute a different program
    )
    cpus: frozenset[int] = frozenset()  # of a root: the CPUs that it may run on

    def is_kin(self, other: Member) -> bool:
        """Return whether both belong to the same rank."""
        return (self.run, self.rank) == (other.run, other.rank)


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """Fields of /proc/<pid>/status that psutil does not read."""

    own_pid: int  # pid in the innermost pid namespace of the process
    cpus: frozenset[int]


class ProcessTree:
    """Members of all runs; processes in `ignore` and the descendants of these belong to no run.

    `hidden` counts living recording processes that are not visible from here.
    """

    def __init__(self, *, ignore: Collection[int], discover_seconds: float = DISCOVER_SECONDS) -> None:
        self._proc = procfs()
        self._ignore = frozenset(ignore)
        self._discover_seconds = discover_seconds
        self._members: dict[psutil.Process, Member] = {}
        self._discovered = -math.inf
        self.hidden = 0
        self._missed: set[str] = set()  # ids of recording processes that the last pass did not find

    def update(
        self, job: Sequence[JobProcess], *, collected: Collected, now: float, wall: float
    ) -> Sequence[Member]:
        """Return the living members (zombies included) at a monotonic and a wall clock time."""
        self._remove_ended()
        new_roots = self._add_recording(job, collected)
        if new_roots or now - self._discovered >= self._discover_seconds:
            self._discovered = now
            with source(collected, "processes"):
                self._discover(collected, wall)
        return list(self._members.values())

    def _remove_ended(self) -> None:
        for process in [member for member in self._members if not _exists(member)]:
            del self._members[process]

    def _add_recording(self, job: Sequence[JobProcess], collected: Collected) -> bool:
        """Add the recording processes as roots and return whether a new process was added."""
        self.hidden, added, missed = 0, False, set[str]()
        for process in job:
            if process.alive:
                member = None
                with source(collected, f"process {process.pid}"):
                    member = self._recording(process)
                    if process.pid is None:
                        self.hidden += 1
                    elif member is None:
                        missed.add(process.process.id)
                if member is not None and member.process not in self._members:
                    self._members[member.process] = member
                    added = True
        # A process that was killed since the feed was read is missed once.
        self.hidden += len(missed & self._missed)
        self._missed = missed
        return added

    def _recording(self, recording: JobProcess) -> Member | None:
        """Return the member of a recording process; None if the process is not visible from here.

        A pid alone is not enough. The process holds the lock of the feed file, started before the recording, and has the pid
        of the snapshot in the innermost namespace (locks on network file systems have pids of other machines).
        """
        pid, recorded = recording.pid, recording.process
        if pid is None:
            return None
        status_path = self._proc / str(pid) / "status"
        try:
            process = from_psutil(f"process {pid}", lambda: psutil.Process(pid))
            text = read_optional(status_path)
            if not text:
                return None
            rank, role = ("", "other") if recorded.rank is None else (str(recorded.rank), "trainer")
            member = self._members.get(process)
            if member is not None and (member.run, member.rank) == (recorded.run, rank):
                return member  # the clock may have been set since
            started = from_psutil(f"process {pid}", process.create_time)
        except psutil.Error:
            return None
        status = parse(status_path, _parse_status, text)
        if status.own_pid != recorded.pid or started > recorded.started + CLOCK_STEP_SECONDS:
            return None
        return Member(recorded.run, rank, role, process, root=True, cpus=status.cpus)  # type: ignore[arg-type]

    def _discover(self, collected: Collected, wall: float) -> None:
        """Add the descendants of the roots."""
        descendants = {process.pid: process for process in self._descendants()}
        parents = {process.pid: _parent(process) for process in descendants.values()}
        roots = {member.process.pid: member for member in self._members.values() if member.root}
        started = sorted(roots.values(), key=lambda root: root.process.create_time())
        for root in started:
            # A recording worker belongs to the trainer that started it.
            owner = self._owner(root.process.pid, parents, roots)
            if owner is not None and owner.is_kin(root):
                del roots[root.process.pid], self._members[root.process]
        for pid, process in sorted(descendants.items()):
            owner = None if pid in roots else self._owner(pid, parents, roots)
            if owner is not None:
                with source(collected, f"process {pid}"):
                    self._add(process, descendants.get(parents[pid], owner.process), owner, wall)

    def _descendants(self) -> Iterator[psutil.Process]:
        """Yield the descendants of the parents of all roots: the ranks of a job usually share a parent."""
        tops: dict[int, psutil.Process] = {}
        for member in self._members.values():
            if member.root:
                parent = _parent(member.process)
                try:
                    top = psutil.Process(parent) if parent > 1 else member.process
                except psutil.Error:
                    top = member.process
                tops[top.pid] = top
                tops.setdefault(member.process.pid, member.process)
        visited: set[int] = set()
        for top in sorted(tops.values(), key=lambda root: root.pid):
            if top.pid not in visited:
                visited.add(top.pid)
                yield top
                for process in _below(top):
                    if process.pid not in visited:
                        visited.add(process.pid)
                        yield process

    def _owner(self, pid: int, parents: Mapping[int, int], roots: Mapping[int, Member]) -> Member | None:
        """Return the nearest root above a process; None without a root, or if an ignored process is nearer."""
        passed: set[int] = set()
        while pid in parents and pid not in passed and pid not in self._ignore:
            passed.add(pid)
            pid = parents[pid]
            if pid in roots:
                return roots[pid]
        return None

    def _add(self, process: psutil.Process, parent: psutil.Process, root: Member, wall: float) -> None:
        try:
            name = from_psutil(f"process {process.pid}", process.name)
            member = self._members.get(process)
            if member is not None and member.known_as == name and member.is_kin(root):
                return
            young = wall - process.create_time() < YOUNG_SECONDS
            role = _role(process, name, parent, root, young=young)
        except psutil.Error:
            return  # the process has ended
        if role is not None:
            self._members[process] = Member(root.run, root.rank, role, process, known_as=name)


def _role(
    process: psutil.Process, name: str, parent: psutil.Process, root: Member, *, young: bool
) -> Role | None:
    """Return the role of a descendant; None while the role is not known."""
    if root.role != "trainer":
        return "other"
    if name == _WORKER_THREAD:
        return "dataloader"
    if young and process.status() != psutil.STATUS_ZOMBIE:
        return None
    command, above = _command(process), _command(parent)
    if parent == root.process and (_SPAWNED in command or (command and command == above)):
        return "dataloader"
    return "dataloader" if _FORKSERVER in above else "other"


def _exists(process: psutil.Process) -> bool:
    """Return whether a process is running or a zombie."""
    try:
        return process.is_running()
    except psutil.ZombieProcess:
        return True
    except (psutil.Error, ValueError, LookupError):  # damaged: reading it reports the problem
        return True


def _below(process: psutil.Process) -> list[psutil.Process]:
    """Return the descendants of a process; an empty list if the process has ended."""
    try:
        return from_psutil(f"children of {process.pid}", lambda: process.children(recursive=True))
    except psutil.Error:
        return []


def _parent(process: psutil.Process) -> int:
    """Return the pid of a process's parent; 0 if the process has ended or the parent is not readable."""
    try:
        return from_psutil(f"process {process.pid}", process.ppid)
    except (psutil.Error, CollectError):
        return 0


def _command(process: psutil.Process) -> str:
    """Return a command line; empty for zombies, ended processes and processes of other users."""
    try:
        return "\0".join(process.cmdline())
    except (psutil.Error, OSError):
        return ""


def _parse_status(text: str) -> ProcessStatus:
    lines = dict(line.split(":\t", 1) for line in text.split("\n") if ":\t" in line)
    pids = lines["NSpid"] if "NSpid" in lines else lines["Pid"]
    return ProcessStatus(own_pid=int(pids.split("\t")[-1]), cpus=_parse_cpu_list(lines["Cpus_allowed_list"]))


def _parse_cpu_list(text: str) -> frozenset[int]:
    """Parse a kernel list of CPUs such as `0-3,8`."""
    ranges = (part.partition("-") for part in text.strip().split(","))
    return frozenset(cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1))
