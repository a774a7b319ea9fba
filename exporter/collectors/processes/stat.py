"""What the kernel says of one process and psutil does not: exit status, own pid, start in ticks, children by thread.

Used in the sidecar by the collector of processes. /proc/<pid>/{stat,status,task/*/children} come in. A process that is
gone is None. No threads, no state.

Source: proc_pid_stat(5), proc_pid_status(5), Documentation/filesystems/proc.rst.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NamedTuple

from exporter.collectors.kernel_files import parse_count, read_file
from exporter.errors import CollectError

_GONE = (errno.ESRCH,)  # said of a file that was open when its process ended

_CLOCK_TICKS = float(os.sysconf("SC_CLK_TCK"))


class Stat(NamedTuple):
    """/proc/<pid>/stat, as far as it is used.

    Attributes:
        pid: Whose.
        comm: The program's name, at most 15 bytes.
        state: One letter: R, S, D, T, t, Z, X, I.
        parent: Its parent.
        user_seconds: CPU time in user mode, threads that have ended included.
        system_seconds: CPU time in the kernel.
        threads: Number of them.
        start_ticks: Since boot; with `pid` it is the process's identity.
        exit_code: Of a zombie, as wait(2) gives it; 0 also where it needs a privilege.
    """

    pid: int
    comm: str
    state: str
    parent: int
    user_seconds: float
    system_seconds: float
    threads: int
    start_ticks: int
    exit_code: int = 0

    @property
    def ended(self) -> bool:
        """Whether it only waits for its parent."""
        return self.state in "ZXx"

    @property
    def start_seconds(self) -> float:
        """Time from boot to its start."""
        return self.start_ticks / _CLOCK_TICKS


class Status(NamedTuple):
    """/proc/<pid>/status, as far as it is used.

    Attributes:
        own_pid: The pid by which the process knows itself, in its innermost pid namespace.
        cpus: Those it may run on.
    """

    own_pid: int
    cpus: frozenset[int]


def read_stat(proc: Path, pid: int) -> Stat | None:
    """Read a process's state.

    Raises:
        CollectError: It is there and cannot be read, or is not what is documented.
    """
    path = proc / str(pid) / "stat"
    text = read_file(path, absent=_GONE)
    if not text:
        return None
    head, _, rest = text.rpartition(")")  # the program's name may hold blanks and parentheses itself
    words = rest.split()
    try:
        return Stat(
            pid=pid,
            comm=head.partition("(")[2],
            state=words[0],
            parent=parse_count(words[1], path),
            user_seconds=parse_count(words[11], path) / _CLOCK_TICKS,
            system_seconds=parse_count(words[12], path) / _CLOCK_TICKS,
            threads=parse_count(words[17], path),
            start_ticks=parse_count(words[19], path),
            exit_code=int(words[49]) if len(words) > 49 else 0,
        )
    except (IndexError, ValueError) as error:
        raise CollectError(f"{path}: not the fields of a process ({error})", reason="malformed") from error


def read_status(proc: Path, pid: int) -> Status | None:
    """Read how a process knows itself, and where it may run; likewise."""
    path = proc / str(pid) / "status"
    text = read_file(path, absent=_GONE)
    if not text:
        return None
    lines = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    try:
        own_pid = parse_count(lines.get("NSpid", str(pid)).split("\t")[-1], path)
        return Status(own_pid, _cpus_of_list(lines["Cpus_allowed_list"]))
    except (KeyError, ValueError) as error:
        raise CollectError(f"{path}: not the lines of a process ({error})", reason="malformed") from error


def read_children(proc: Path, pid: int, *, every_thread: bool) -> set[int] | None:
    """List the children that the main thread, or any, has started.

    None when the process is gone, or the kernel keeps no list (CONFIG_PROC_CHILDREN).

    Raises:
        CollectError: As in `read_stat`.
    """
    tasks = proc / str(pid) / "task"
    threads = [str(pid)]
    if every_thread:
        try:
            threads = os.listdir(tasks)  # noqa: PTH208 - hundreds of names
        except OSError:
            return None
    found: set[int] | None = None
    for thread in threads:
        path = tasks / thread / "children"
        text = read_file(path, absent=_GONE)
        if text is not None:
            found = (found or set()).union(parse_count(word, path) for word in text.split())
    return found


def _cpus_of_list(text: str) -> frozenset[int]:
    """Expand a kernel list of CPUs such as `0-3,8`."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
