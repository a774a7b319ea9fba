"""ProcessTree: which processes of this machine belong to which rank, and what each is there for.

A process belongs to the nearest recording process above it, so that the ranks below torchrun's agent are not the agent's,
and stays a member for as long as it lives, also without its trainer. Source: proc_pid_stat(5), proc_pid_status(5).
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from exporter.collectors.job import JobProcess, Role
from exporter.collectors.kernel_files import read_optional, source
from exporter.families import Collected

FULL_WALK_SECONDS = 15.0
"""How often the children of every thread are listed; in between those of the main threads, which start nearly all."""
YOUNG_SECONDS = 2.0
"""A younger process may be about to become another program: nobody knows yet what it is."""
STEP_SECONDS = 60.0
"""By how much the wall clock may have been set between the start of a process and its first snapshot."""

_WORKER_THREAD = "pt_data_worker"
_SPAWNED = "multiprocessing.spawn"
_FORKSERVER = "multiprocessing.forkserver"
_CLOCK_TICKS = float(os.sysconf("SC_CLK_TCK"))

Identity = tuple[int, int]
"""Pid and start time in ticks since boot."""


class Stat(NamedTuple):
    """/proc/<pid>/stat, as far as it is used; psutil does not tell the start in ticks."""

    pid: int
    start_ticks: int
    comm: str = ""  # the program's name, at most 15 bytes
    state: str = "S"  # one letter: R, S, D, T, t, Z, X, I
    parent: int = 0
    user_seconds: float = 0.0
    system_seconds: float = 0.0
    threads: int = 0

    @property
    def ended(self) -> bool:
        """Whether it only waits for its parent."""
        return self.state in "ZXx"

    @property
    def start_seconds(self) -> float:
        """Time from boot to its start."""
        return self.start_ticks / _CLOCK_TICKS


@dataclass(slots=True, eq=False)
class Member:
    """One process of a run."""

    run: str
    rank: str  # "" for one of the run that is no rank, such as torchrun's agent
    role: Role
    stat: Stat
    root: bool = False  # a recording process that no other one of its rank has started
    known_as: str = ""  # the program's name when its role was found; it may become another program
    cpus: frozenset[int] = frozenset()  # of a root: those it may run on

    @property
    def identity(self) -> Identity:
        """What tells it from every other process since boot."""
        return self.stat.pid, self.stat.start_ticks

    def is_kin(self, other: Member) -> bool:
        """Whether both belong to one rank."""
        return (self.run, self.rank) == (other.run, other.rank)


class ProcessTree:
    """Finds the members; pids to `ignore` belong to nobody, with all below them: the sidecar's own.

    `hidden` counts living processes that record and cannot be seen from here.
    """

    def __init__(self, proc: Path, *, ignore: Collection[int]) -> None:
        self._proc = proc
        self._ignore = frozenset(ignore)
        self._members: dict[Identity, Member] = {}
        self._before: dict[Identity, Member] = {}
        self._roots: dict[int, Member] = {}
        self._walked = -math.inf
        self.hidden = 0

    def resume(self, member: Member) -> None:
        """Take over a member that an earlier sidecar has found."""
        self._members.setdefault(member.identity, member)

    def update(
        self, job: Sequence[JobProcess], *, collected: Collected, now: float, boot_time: float, uptime: float
    ) -> tuple[list[Member], list[Member]]:
        """Look once, at a monotonic time that is `uptime` seconds since boot.

        Returns:
            All members, as they are now, and those that have ended since the last time, as they were then.
            A zombie is among the first.
        """
        self._before, self._members, self._roots, self.hidden = self._members, {}, {}, 0
        for each in job:
            if each.alive:
                with source(collected, f"process {each.pid}"):
                    root = self._recording(each, boot_time)
                    if root is None:
                        self.hidden += 1
                    else:
                        self._roots[root.stat.pid] = root
        every_thread = now - self._walked >= FULL_WALK_SECONDS
        if every_thread:
            self._walked = now
        for root in sorted(self._roots.values(), key=lambda root: root.stat.start_ticks):
            known = self._before.get(root.identity)
            # Whom an older process of the same rank has started is below that one, and stays there.
            if root.identity not in self._members and (known is None or known.root or not known.is_kin(root)):
                self._members[root.identity] = root
                level = [root]
                while level:
                    level = [
                        child
                        for parent in level
                        for child in self._children(
                            parent, root, collected, every_thread=every_thread, uptime=uptime
                        )
                    ]
        ended = []
        for identity, member in self._before.items():
            if identity not in self._members:
                stat = None
                with source(collected, f"process {identity[0]}"):
                    stat = self._stat(identity[0])
                if stat is not None and stat.start_ticks == identity[1]:
                    member.stat = stat
                    self._members[identity] = member
                else:
                    ended.append(member)
        return list(self._members.values()), ended

    def _recording(self, each: JobProcess, boot_time: float) -> Member | None:
        """Find a recording process; None for one that cannot be seen from here.

        A pid alone means nothing: it is the one that holds the lock of the feed file, if it also began before its
        recording and knows itself by the pid in the snapshot (locks on network file systems have pids of elsewhere).
        """
        stat = None if each.pid is None else self._stat(each.pid)
        status = None if stat is None else read_optional(self._proc / str(stat.pid) / "status")
        if stat is None or not status:
            return None
        process = each.process
        rank, role = ("", "other") if process.rank is None else (str(process.rank), "trainer")
        lines = dict(line.split(":\t", 1) for line in status.split("\n") if ":\t" in line)
        cpus = _cpus_of_list(lines["Cpus_allowed_list"])
        member = Member(process.run, rank, role, stat, root=True, cpus=cpus)  # type: ignore[arg-type]
        known = self._before.get(member.identity)
        if known is not None and known.root and known.is_kin(member):
            return member  # was accepted before; the clock may have been set since
        own_pid = int(lines.get("NSpid", str(stat.pid)).split("\t")[-1])
        began = boot_time + stat.start_seconds
        return member if own_pid == process.pid and began <= process.started + STEP_SECONDS else None

    def _children(
        self, parent: Member, root: Member, collected: Collected, *, every_thread: bool, uptime: float
    ) -> list[Member]:
        """Add the children of a member to the members, without those of other ranks."""
        found: list[Member] = []
        with source(collected, f"process {parent.stat.pid}"):
            tasks = self._proc / str(parent.stat.pid) / "task"
            threads = os.listdir(tasks) if every_thread else [str(parent.stat.pid)]  # noqa: PTH208 - hundreds
            lists = [read_optional(tasks / thread / "children") or "" for thread in threads]
            for pid in sorted({int(word) for each in lists for word in each.split()} - self._ignore):
                stop = self._roots.get(pid)
                if stop is None or stop.is_kin(root):
                    with source(collected, f"process {pid}"):
                        member = self._descendant(pid, parent, root, uptime)
                        if member is not None and member.identity not in self._members:
                            self._members[member.identity] = member
                            found.append(member)
        return found

    def _descendant(self, pid: int, parent: Member, root: Member, uptime: float) -> Member | None:
        stat = self._stat(pid)
        if stat is None or stat.parent != parent.stat.pid:
            return None  # gone, or the pid is another's already
        known = self._before.get((stat.pid, stat.start_ticks))
        if known is not None and known.known_as == stat.comm and known.is_kin(root):
            known.stat = stat
            return known
        role = _role(stat, parent, root, young=uptime - stat.start_seconds < YOUNG_SECONDS)
        return None if role is None else Member(root.run, root.rank, role, stat, known_as=stat.comm)

    def _stat(self, pid: int) -> Stat | None:
        text = read_optional(self._proc / str(pid) / "stat")
        if not text:
            return None  # it has ended
        head, _, rest = text.rpartition(")")  # the program's name may hold blanks and parentheses itself
        words = rest.split()
        return Stat(
            pid=pid,
            comm=head.partition("(")[2],
            state=words[0],
            parent=int(words[1]),
            user_seconds=int(words[11]) / _CLOCK_TICKS,
            system_seconds=int(words[12]) / _CLOCK_TICKS,
            threads=int(words[17]),
            start_ticks=int(words[19]),
        )


def _role(stat: Stat, parent: Member, root: Member, *, young: bool) -> Role | None:
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


def _cpus_of_list(text: str) -> frozenset[int]:
    """Expand a kernel list of CPUs such as `0-3,8`."""
    ranges = (part.partition("-") for part in text.strip().split(","))
    return frozenset(cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1))
