"""ProcessTree: which processes of this machine belong to which rank, and what each is there for.

Used in the sidecar by the collector of processes, on one thread. The processes that record come in, as the feed
knows them; their descendants are found by the kernel's lists of children, never by a scan of all of /proc. A
process belongs to the nearest recording process above it, so that the ranks below torchrun's agent are not the
agent's. One that was found stays a member for as long as it lives, also when its parent is gone: a worker that
outlives its trainer is what one wants to see.

A pid alone means nothing: a process is a pid and a start time, and a recording process is the one that holds
the lock of the feed file, if it also began before its recording and knows itself by the pid in the snapshot
(locks on network file systems come with pids of other machines).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from exporter.collectors.job import JobProcess, Role
from exporter.collectors.kernel_files import source
from exporter.collectors.processes.stat import Stat, read_children, read_stat, read_status
from exporter.families import Collected

FULL_WALK_SECONDS = 15.0
"""How often all members' children are listed, by every thread; in between those of the recording processes' main
threads, which start nearly all."""
YOUNG_SECONDS = 2.0
"""A younger process may be about to become another program: nobody knows yet what it is."""
STEP_SECONDS = 60.0
"""By how much the wall clock may have been set between the start of a process and its first snapshot."""

_WORKER_THREAD = "pt_data_worker"
_SPAWNED = "multiprocessing.spawn"
_FORKSERVER = "multiprocessing.forkserver"

Identity = tuple[int, int]
"""Pid and start time in ticks since boot."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose process it is."""

    run: str
    rank: str


@dataclass(slots=True, eq=False)
class Member:
    """One process of a run.

    Attributes:
        owner: Whose.
        role: What it is there for.
        stat: As last read.
        root: Whether it is a recording process that no other one of its rank has started.
        known_as: The program's name when its role was found; it may become another program.
        process_id: Of a root: its id in the feed.
        cpus: Of a root: those it may run on.
    """

    owner: Owner
    role: Role
    stat: Stat
    root: bool = False
    known_as: str = ""
    process_id: str = ""
    cpus: frozenset[int] = frozenset()

    @property
    def identity(self) -> Identity:
        """What tells it from every other process since boot."""
        return self.stat.pid, self.stat.start_ticks


class ProcessTree:
    """Finds the members.

    Args:
        proc: Where procfs is mounted.
        ignore: Pids that belong to nobody, with all below them: the sidecar's own.

    Attributes:
        hidden: Living processes that record and cannot be seen from here.
        listed: Whether the kernel keeps lists of children.
    """

    def __init__(self, proc: Path, *, ignore: Collection[int]) -> None:
        self._proc = proc
        self._ignore = frozenset(ignore)
        self._members: dict[Identity, Member] = {}
        self._accepted: dict[str, Identity] = {}
        self._walked = -math.inf
        self.hidden = 0
        self.listed = True

    def resume(self, member: Member) -> None:
        """Take over a member that an earlier sidecar has found."""
        self._members.setdefault(member.identity, member)

    def update(
        self, job: Sequence[JobProcess], *, collected: Collected, now: float, boot_time: float, uptime: float
    ) -> tuple[list[Member], list[Member]]:
        """Look once.

        Args:
            job: The processes that record.
            collected: Takes what went wrong.
            now: Monotonic time.
            boot_time: Unix time.
            uptime: Since boot, seconds.

        Returns:
            All members, as they are now, and those that have ended since the last time, as they were then.
            A zombie is among the first.
        """
        before = self._members
        self._members = {}
        stops = self._find_roots(job, before, collected, boot_time)
        deep = now - self._walked >= FULL_WALK_SECONDS
        if deep:
            self._walked = now
        for _, root in sorted(stops.items(), key=lambda item: item[1].stat.start_ticks):
            known = before.get(root.identity)
            # Whom an older process of the same rank has started is below that one, and stays there.
            if root.identity not in self._members and (
                known is None or known.root or known.owner != root.owner
            ):
                self._members[root.identity] = root
                self._walk(root, stops, before, collected, deep=deep, uptime=uptime)
        ended: list[Member] = []
        for identity, member in before.items():
            if identity in self._members:
                continue
            stat = member.stat
            with source(collected, self._proc):
                found = read_stat(self._proc, stat.pid)
                if found is not None and found.start_ticks == stat.start_ticks:
                    member.stat = found
                    self._members[identity] = member
                    continue
            ended.append(member)
        return list(self._members.values()), ended

    def _find_roots(
        self,
        job: Iterable[JobProcess],
        before: dict[Identity, Member],
        collected: Collected,
        boot_time: float,
    ) -> dict[int, Member]:
        """Find the recording processes that are alive and can be seen; by pid."""
        found: dict[int, Member] = {}
        accepted: dict[str, Identity] = {}
        self.hidden = 0
        for each in job:
            if not each.alive:
                continue
            with source(collected, self._proc):
                member = self._recording(each, before, boot_time)
                if member is None:
                    self.hidden += 1
                    continue
                accepted[each.process.id] = member.identity
                found[member.stat.pid] = member
        self._accepted = accepted
        return found

    def _recording(self, each: JobProcess, before: dict[Identity, Member], boot_time: float) -> Member | None:
        process = each.process
        if each.pid is None:
            return None
        stat = read_stat(self._proc, each.pid)
        if stat is None:
            return None
        rank = "" if process.rank is None else str(process.rank)
        owner = Owner(process.run, rank)
        identity = stat.pid, stat.start_ticks
        status = read_status(self._proc, each.pid)
        known, resumed = self._accepted.get(process.id), before.get(identity)
        if known is not None:
            fits = known == identity
        elif resumed is not None and resumed.root and resumed.owner == owner:
            fits = True  # an earlier sidecar has accepted it; the clock may have been set since
        else:
            began = boot_time + stat.start_seconds
            fits = (
                status is not None
                and status.own_pid == process.pid
                and began <= process.started + STEP_SECONDS
            )
        if not fits:
            return None
        role: Role = "other" if process.rank is None else "trainer"
        cpus = status.cpus if status is not None else frozenset()
        return Member(owner, role, stat, root=True, process_id=process.id, cpus=cpus)

    def _walk(
        self,
        root: Member,
        stops: dict[int, Member],
        before: dict[Identity, Member],
        collected: Collected,
        *,
        deep: bool,
        uptime: float,
    ) -> None:
        level = [root]
        while level:
            below: list[Member] = []
            for parent in level:
                with source(collected, self._proc):
                    children = read_children(self._proc, parent.stat.pid, every_thread=deep)
                    if children is None:
                        if parent is root:
                            self.listed = False
                        continue
                    self.listed = True
                    for pid in sorted(children - self._ignore):
                        stop = stops.get(pid)
                        if stop is not None and stop.owner != root.owner:
                            continue
                        with source(collected, self._proc):
                            member = self._descendant(pid, parent, root, before, uptime)
                            if member is not None and member.identity not in self._members:
                                self._members[member.identity] = member
                                below.append(member)
            level = below if deep else []

    def _descendant(
        self, pid: int, parent: Member, root: Member, before: dict[Identity, Member], uptime: float
    ) -> Member | None:
        stat = read_stat(self._proc, pid)
        if stat is None or stat.parent != parent.stat.pid:
            return None  # gone, or the pid is another's already
        known = before.get((stat.pid, stat.start_ticks))
        if known is not None and known.known_as == stat.comm and known.owner == root.owner:
            known.stat = stat
            return known
        young = uptime - stat.start_seconds < YOUNG_SECONDS
        role = self._role(stat, parent, root, young=young)
        return None if role is None else Member(root.owner, role, stat, known_as=stat.comm)

    def _role(self, stat: Stat, parent: Member, root: Member, *, young: bool) -> Role | None:
        """Tell what a descendant is for; None while that cannot be known."""
        if root.role != "trainer":
            return "other"
        if stat.comm == _WORKER_THREAD:
            return "dataloader"
        if young and not stat.ended:
            return None
        command, above = _command(stat.pid), _command(parent.stat.pid)
        if parent.root and (_SPAWNED in command or (command and command == above)):
            return "dataloader"
        return "dataloader" if _FORKSERVER in above else "other"


def _command(pid: int) -> str:
    """Read a command line; empty for a zombie and for what is gone or not ours."""
    try:
        return "\0".join(psutil.Process(pid).cmdline())
    except (psutil.Error, OSError):
        return ""
