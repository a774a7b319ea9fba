"""Processes of the job on this machine, by run, rank and role.

A process that writes a feed is a recording process. A descendant that writes no feed belongs to its nearest recording ancestor:
the children of a rank belong to the rank, and not to torchrun's agent, which started the rank. A process remains a member until it
ends, even if its trainer ended before.
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
"""Interval between two searches for new descendants. A search reads the parent of every process on the machine."""
YOUNG_SECONDS = 2.0
"""Minimum age at which the role of a child is determined: a younger child may still call exec."""
CLOCK_STEP_SECONDS = 60.0
"""Tolerance in the comparison of the start of a process and the start of its recording, for steps of the wall clock."""

# Texts from which the role of a child process is determined.
_WORKER_THREAD = "pt_data_worker"  # name that torch gives a DataLoader worker
_SPAWN = "multiprocessing.spawn"  # in the command line of a spawned process
_FORKSERVER = "multiprocessing.forkserver"  # in the command line of the server that forks processes


@dataclass(slots=True, eq=False)
class Member:
    """Process of a run."""

    run: str
    rank: str  # "" for a process of the run without a rank, such as torchrun's agent
    role: Role
    process: psutil.Process
    is_root: bool = False  # True for a recording process without a recording ancestor in the same rank
    program: str = ""  # name of the program when the role was determined; exec changes the name
    cpus: frozenset[int] = frozenset()  # of a root: the CPUs that it may run on
    parent_pid: int = 0  # at the last search for descendants

    def is_same_rank(self, member: Member) -> bool:
        """Return True if both processes belong to the same rank."""
        return (self.run, self.rank) == (member.run, member.rank)


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """Fields of /proc/<pid>/status that psutil does not read."""

    own_pid: int  # pid in the innermost pid namespace of the process
    cpus: frozenset[int]  # CPUs that the process may run on; empty if the file does not list them (gVisor)


class ProcessTree:
    """Processes of all runs. The processes in `ignore` and their descendants belong to no run.

    `hidden_count` is the number of running recording processes that are not visible in this pid namespace.
    """

    def __init__(self, *, ignore: Collection[int], discover_seconds: float = DISCOVER_SECONDS) -> None:
        self._proc = procfs()
        self._ignored_pids = frozenset(ignore)
        self._discover_seconds = discover_seconds
        self._members: dict[psutil.Process, Member] = {}
        self._last_discovery_time = -math.inf
        self.hidden_count = 0
        self._job: Sequence[JobProcess] = ()  # of the last pass
        # Ids of the recording processes that were not visible: in the last pass, and in the last pass before the feed was read again.
        self._invisible_ids: set[str] = set()
        self._earlier_invisible_ids: set[str] = set()

    def update(
        self, job: Sequence[JobProcess], *, collected: Collected, now: float, wall: float
    ) -> Sequence[Member]:
        """Update and return the members, zombies included. `now` is the monotonic time, `wall` the Unix time."""
        self._remove_ended()
        new_roots = self._add_recording(job, collected)
        if new_roots or now - self._last_discovery_time >= self._discover_seconds:
            self._last_discovery_time = now
            with source(collected, "processes"):
                self._discover(collected, wall)
        return list(self._members.values())

    def _remove_ended(self) -> None:
        """Remove the members that have exited; a zombie stays a member."""
        for process in [member for member in self._members if not _exists(member)]:
            del self._members[process]

    def _add_recording(self, job: Sequence[JobProcess], collected: Collected) -> bool:
        """Add the recording processes as roots. Return True if a process is new, or has changed its run or rank."""
        if job is not self._job:  # the feed was read again
            self._job, self._earlier_invisible_ids = job, self._invisible_ids
        self.hidden_count, has_new_process, invisible_ids = 0, False, set[str]()
        for process in job:
            if process.is_alive:
                member = None
                with source(collected, f"process {process.pid}"):
                    member = self._recording_member(process)
                    if process.pid is None:
                        self.hidden_count += 1
                    elif member is None:
                        invisible_ids.add(process.identity.id)
                if member is not None and self._members.get(member.process) is not member:
                    self._members[member.process] = member  # new, or with a new run or rank
                    has_new_process = True
        # A process that ended after the feed was read is invisible too, but the feed's next list does not contain it. Therefore only a
        # process that was invisible with two lists is hidden.
        self.hidden_count += len(invisible_ids & self._earlier_invisible_ids)
        self._invisible_ids = invisible_ids
        return has_new_process

    def _recording_member(self, recording: JobProcess) -> Member | None:
        """Return the member of a recording process, or None if the process is not visible.

        The pid may be that of a process on another machine, because it comes from a lock, which may be on a network filesystem. The process
        must therefore have started before the recording, and its pid in the innermost pid namespace must be the pid of the snapshot.
        """
        pid, identity = recording.pid, recording.identity
        if pid is None:
            return None
        status_path = self._proc / str(pid) / "status"
        try:
            process = from_psutil(f"process {pid}", lambda: psutil.Process(pid))
            text = read_optional(status_path)
            if not text:
                return None
            rank, role = ("", "other") if identity.rank is None else (str(identity.rank), "trainer")
            member = self._members.get(process)
            if member is not None and (member.run, member.rank) == (identity.run, rank):
                return member  # not checked again, because the wall clock may have been set
            start_time = from_psutil(f"process {pid}", process.create_time)
        except psutil.Error:
            return None
        status = parse(status_path, _parse_status, text)
        if status.own_pid != identity.pid or start_time > identity.started + CLOCK_STEP_SECONDS:
            return None
        cpus = status.cpus or frozenset(range(psutil.cpu_count() or 1))
        return Member(identity.run, rank, role, process, is_root=True, cpus=cpus)  # type: ignore[arg-type]

    def _discover(self, collected: Collected, wall: float) -> None:
        """Add the descendants of the roots. If the nearest root above a root has the same rank, the lower root becomes a descendant."""
        descendants = {process.pid: process for process in self._descendants()}
        parents = {process.pid: _parent(process) for process in descendants.values()}
        roots = {member.process.pid: member for member in self._members.values() if member.is_root}
        roots_by_age = sorted(roots.values(), key=lambda root: root.process.create_time())
        for root in roots_by_age:
            # A recording worker belongs to the trainer that started it.
            owner = self._owner(root.process.pid, parents, roots)
            if owner is not None and owner.is_same_rank(root):
                del roots[root.process.pid], self._members[root.process]
        for pid, process in sorted(descendants.items()):
            owner = None if pid in roots else self._owner(pid, parents, roots)
            if owner is not None:
                with source(collected, f"process {pid}"):
                    self._add(process, descendants.get(parents[pid], owner.process), owner, wall)
        for member in self._members.values():
            member.parent_pid = parents.get(member.process.pid, member.parent_pid)

    def _descendants(self) -> Iterator[psutil.Process]:
        """Yield the parents of all roots, and the descendants of the parents.

        The search starts at the parents, because the ranks of a job usually share one.
        """
        search_roots: dict[int, psutil.Process] = {}
        for member in self._members.values():
            if member.is_root:
                parent = _parent(member.process)
                try:
                    search_root = psutil.Process(parent) if parent > 1 else member.process
                except psutil.Error:
                    search_root = member.process
                search_roots[search_root.pid] = search_root
                search_roots.setdefault(member.process.pid, member.process)
        visited_pids: set[int] = set()
        for search_root in sorted(search_roots.values(), key=lambda root: root.pid):
            if search_root.pid not in visited_pids:
                visited_pids.add(search_root.pid)
                yield search_root
                for process in _descendants_of(search_root):
                    if process.pid not in visited_pids:
                        visited_pids.add(process.pid)
                        yield process

    def _owner(self, pid: int, parents: Mapping[int, int], roots: Mapping[int, Member]) -> Member | None:
        """Return the nearest root above a process. Return None if there is no root, or if an ignored process is in between."""
        visited_pids: set[int] = set()
        while pid in parents and pid not in visited_pids and pid not in self._ignored_pids:
            visited_pids.add(pid)
            pid = parents[pid]
            if pid in roots:
                return roots[pid]
        return None

    def _add(self, process: psutil.Process, parent: psutil.Process, root: Member, wall: float) -> None:
        """Add a descendant of a root, unless its role cannot be determined yet. After exec, the role is determined again."""
        try:
            name = from_psutil(f"process {process.pid}", process.name)
            member = self._members.get(process)
            if member is not None and member.program == name and member.is_same_rank(root):
                return
            is_young = wall - process.create_time() < YOUNG_SECONDS
            role = _role(process, name, parent, root, is_young=is_young)
        except psutil.Error:
            return  # the process has ended
        if role is not None:
            self._members[process] = Member(root.run, root.rank, role, process, program=name)


def _role(
    process: psutil.Process, name: str, parent: psutil.Process, root: Member, *, is_young: bool
) -> Role | None:
    """Return the role of a descendant, or None if the role cannot be determined yet."""
    if root.role != "trainer":
        return "other"
    if name == _WORKER_THREAD:
        return "dataloader"
    if is_young and process.status() != psutil.STATUS_ZOMBIE:
        return None
    command, parent_command = _command(process), _command(parent)
    if parent == root.process and (_SPAWN in command or (command and command == parent_command)):
        return "dataloader"
    return "dataloader" if _FORKSERVER in parent_command else "other"


def _exists(process: psutil.Process) -> bool:
    """Return True if a process is running or a zombie."""
    try:
        return process.is_running()
    except psutil.ZombieProcess:
        return True
    except (psutil.Error, ValueError, LookupError):  # damaged files; reading the process reports the problem
        return True


def _descendants_of(process: psutil.Process) -> list[psutil.Process]:
    """Return the descendants of a process, or an empty list if the process has ended."""
    try:
        return from_psutil(f"children of {process.pid}", lambda: process.children(recursive=True))
    except psutil.Error:
        return []


def _parent(process: psutil.Process) -> int:
    """Return the pid of a process's parent, or 0 if the process has ended or the parent is not readable."""
    try:
        return from_psutil(f"process {process.pid}", process.ppid)
    except (psutil.Error, CollectError):
        return 0


def _command(process: psutil.Process) -> str:
    """Return a command line; "" for zombies, ended processes and processes of other users."""
    try:
        return "\0".join(process.cmdline())
    except (psutil.Error, OSError):
        return ""


def _parse_status(text: str) -> ProcessStatus:
    """Parse /proc/<pid>/status. Raises LookupError and ValueError."""
    lines = dict(line.split(":\t", 1) for line in text.split("\n") if ":\t" in line)
    pids = (
        lines["NSpid"] if "NSpid" in lines else lines["Pid"]
    )  # NSpid: by pid namespace, the process's own last
    cpu_list = lines.get("Cpus_allowed_list")
    cpus = frozenset[int]() if cpu_list is None else _parse_cpu_list(cpu_list)
    *_, own_pid = pids.split("\t")
    return ProcessStatus(own_pid=int(own_pid), cpus=cpus)


def _parse_cpu_list(text: str) -> frozenset[int]:
    """Parse a kernel list of CPUs such as `0-3,8`."""
    ranges = (part.partition("-") for part in text.strip().split(","))
    return frozenset(cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1))
