"""Files of /proc/<pid>: what the kernel says of one process, strictly parsed.

Used in the sidecar by the collectors of processes. Three outcomes stay apart: the process is gone (None), what
is asked for needs a privilege (`DENIED`), and a file that holds something else than documented (`CollectError`).
No threads, no state.

Source: proc_pid_stat(5), proc_pid_status(5), Documentation/filesystems/proc.rst.
"""

from __future__ import annotations

import enum
import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from exporter.collectors.kernel_files import (
    MAX_BYTES,
    NOT_OFFERED,
    named_values,
    parse_count,
    parse_kibibytes,
    parse_signed,
    refuse,
)
from exporter.errors import CollectError


class Denied(enum.Enum):
    """What only the process's own user, or root, may know."""

    DENIED = "denied"


DENIED: Final = Denied.DENIED

_GONE = NOT_OFFERED | {errno.ESRCH}
"""What reading says of a process that has ended; ESRCH, when its file was open already."""
_DENIALS = frozenset({errno.EACCES, errno.EPERM})
_PIECE = 1 << 16

# Fields of /proc/<pid>/stat after the program's name, which may hold spaces and parentheses itself.
_STATE, _PPID, _MAJFLT, _UTIME, _STIME, _THREADS, _STARTTIME, _VSIZE, _EXIT_CODE = (
    0,
    1,
    9,
    11,
    12,
    17,
    19,
    20,
    49,
)
_LAST_FIELD = 21  # the rest is younger than some kernels
_LONGEST_CMDLINE = 4096


@dataclass(frozen=True, slots=True)
class Stat:
    """/proc/<pid>/stat.

    Attributes:
        pid: Whose.
        comm: The program's name, at most 15 bytes.
        state: One letter: R, S, D, T, t, Z, X, I.
        parent: Its parent.
        major_faults: Page faults that had to read.
        user_ticks: CPU time in user mode, threads that have ended included.
        system_ticks: CPU time in the kernel.
        threads: Number of them.
        start_ticks: Since boot; with `pid` it is the process's identity.
        virtual_bytes: Address space.
        exit_code: Of a zombie, as wait(2) gives it; 0 also where it needs a privilege.
    """

    pid: int
    comm: str
    state: str
    parent: int
    major_faults: int
    user_ticks: int
    system_ticks: int
    threads: int
    start_ticks: int
    virtual_bytes: int
    exit_code: int

    @property
    def ended(self) -> bool:
        """Whether it only waits for its parent."""
        return self.state in "ZXx"


@dataclass(frozen=True, slots=True)
class Status:
    """/proc/<pid>/status, as far as it is used.

    Attributes:
        voluntary: Context switches.
        involuntary: Context switches.
        own_pid: The pid by which the process knows itself, in its innermost pid namespace.
        cpus: Those it may run on, as the kernel writes the list.
    """

    voluntary: int
    involuntary: int
    own_pid: int
    cpus: str


class ProcessFiles:
    """Reads the files of processes.

    Args:
        proc: Where procfs is mounted.
        page_size: Bytes.
    """

    def __init__(self, proc: Path, *, page_size: int) -> None:
        self._proc = str(proc)
        self._page_size = page_size
        self._sizes_tell: bool | None = None

    def stat(self, pid: int) -> Stat | None:
        """Read what is cheap and public.

        Raises:
            CollectError: As the module says; so in all that follows.
        """
        path = f"{self._proc}/{pid}/stat"
        content = self._read(path)
        if not content:
            return None
        text = content.decode("utf-8", "replace")
        head, _, rest = text.rpartition(")")
        words = rest.split()
        if len(words) < _LAST_FIELD or len(words[_STATE]) != 1:
            refuse(text, (path,), "the fields of a process")
        return Stat(
            pid,
            head.partition("(")[2],
            words[_STATE],
            parse_count(words[_PPID], path),
            parse_count(words[_MAJFLT], path),
            parse_count(words[_UTIME], path),
            parse_count(words[_STIME], path),
            parse_count(words[_THREADS], path),
            parse_count(words[_STARTTIME], path),
            parse_count(words[_VSIZE], path),
            parse_signed(words[_EXIT_CODE], path) if len(words) > _EXIT_CODE else 0,
        )

    def status(self, pid: int) -> Status | None:
        """Read context switches, pids by namespace and affinity."""
        path = f"{self._proc}/{pid}/status"
        content = self._read(path)
        if not content:
            return None
        text = content.decode("utf-8", "replace")
        pids = _line(text, "NSpid")  # older than 4.1: it cannot be told
        return Status(
            parse_count(_line(text, "voluntary_ctxt_switches") or "", path),
            parse_count(_line(text, "nonvoluntary_ctxt_switches") or "", path),
            pid if pids is None else parse_count(pids.rpartition("\t")[2], path),
            _line(text, "Cpus_allowed_list") or "",
        )

    def resident_and_shared(self, pid: int) -> tuple[int, int] | None:
        """Read bytes in RAM, and those of them that files and shared memory hold."""
        path = f"{self._proc}/{pid}/statm"
        content = self._read(path)
        if not content:
            return None
        words = content.decode("utf-8", "replace").split()
        if len(words) < 3:
            refuse(" ".join(words), (path,), "the sizes of a process")
        return parse_count(words[1], path) * self._page_size, parse_count(words[2], path) * self._page_size

    def io(self, pid: int) -> tuple[int, ...] | Denied | None:
        """Read bytes from and to storage, bytes of read and write calls, and those calls."""
        path = f"{self._proc}/{pid}/io"
        content = self._read_own(path)
        if not isinstance(content, bytes):
            return content
        values = named_values(content.decode("utf-8", "replace"), ":")
        try:
            names = ("read_bytes", "write_bytes", "rchar", "wchar", "syscr", "syscw")
            return tuple(parse_count(values[name], path) for name in names)
        except KeyError as error:
            refuse("", (path,), f"a line {error.args[0]}")

    def open_descriptors(self, pid: int) -> int | Denied | None:
        """Count descriptors: since Linux 6.2 the directory's size tells, before it must be listed."""
        path = f"{self._proc}/{pid}/fd"
        if self._sizes_tell is None:
            self._sizes_tell = _sizes_tell(f"{self._proc}/self/fd")
        try:
            return os.stat(path).st_size if self._sizes_tell else len(os.listdir(path))  # noqa: PTH116, PTH208 - some hundred times per pass
        except OSError as error:
            if error.errno in _DENIALS:
                return DENIED
            if error.errno in _GONE:
                return None
            raise CollectError(f"{path}: {error.strerror or error}", reason="unreadable") from error

    def descriptor_limit(self, pid: int) -> int | None:
        """Read the soft limit of descriptors; None without one."""
        path = f"{self._proc}/{pid}/limits"
        content = self._read_own(path)
        if not isinstance(content, bytes):
            return None
        _, found, rest = content.decode("utf-8", "replace").partition("Max open files")
        soft = rest.split(maxsplit=1)[:1]
        if not found or not soft:
            refuse("", (path,), "a line `Max open files`")
        return None if soft == ["unlimited"] else parse_count(soft[0], path)

    def unique_and_proportional(self, pid: int) -> tuple[int, int] | Denied | None:
        """Read bytes that would be free without it, and its share of all that it maps.

        Slow: the kernel walks the page tables, and holds the process's memory lock while it does.
        """
        path = f"{self._proc}/{pid}/smaps_rollup"
        content = self._read_own(path)
        if not isinstance(content, bytes):
            return content
        values = named_values(content.decode("utf-8", "replace"), ":")
        try:
            unique = sum(parse_kibibytes(values[name], path) for name in ("Private_Clean", "Private_Dirty"))
            unique += parse_kibibytes(values.get("Private_Hugetlb", "0 kB"), path)
            return unique, parse_kibibytes(values["Pss"], path)
        except KeyError as error:
            refuse("", (path,), f"a line {error.args[0]}")

    def command(self, pid: int) -> bytes:
        """Read the first bytes of the command line; empty for a zombie and for what is gone or not ours."""
        try:
            content = self._read_own(f"{self._proc}/{pid}/cmdline")
        except CollectError:
            return b""  # whatever it is: then its command line says nothing about its role
        return content[:_LONGEST_CMDLINE] if isinstance(content, bytes) else b""

    def children(self, pid: int, *, every_thread: bool) -> set[int] | None:
        """List the children that the main thread, or any, has started.

        None when the process is gone, or the kernel keeps no list (CONFIG_PROC_CHILDREN).
        """
        tasks = f"{self._proc}/{pid}/task"
        threads = [str(pid)]
        if every_thread:
            try:
                threads = os.listdir(tasks)  # noqa: PTH208 - hundreds of threads
            except OSError:
                return None
        found: set[int] | None = None
        for thread in threads:
            path = f"{tasks}/{thread}/children"
            content = self._read_any(path)
            if isinstance(content, bytes):
                words = content.decode("utf-8", "replace").split()
                found = (found or set()).union(parse_count(word, path) for word in words)
        return found

    def _read(self, path: str) -> bytes | None:
        content = self._read_own(path)
        if isinstance(content, Denied):
            raise CollectError(f"{path}: {os.strerror(errno.EACCES)}", reason="permission")
        return content

    def _read_own(self, path: str) -> bytes | Denied | None:
        return self._read_any(path) or None  # a zombie has files, but nothing in them

    def _read_any(self, path: str) -> bytes | Denied | None:
        """Read a file.

        Not by `read_bytes`: hundreds of paths are made here in every pass, and each as a Path costs as much as
        reading the file does.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                content = piece = os.read(descriptor, _PIECE)
                while piece and len(content) < MAX_BYTES:
                    piece = os.read(descriptor, _PIECE)
                    content += piece
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno in _DENIALS:
                return DENIED
            if error.errno in _GONE:
                return None
            raise CollectError(f"{path}: {error.strerror or error}", reason="unreadable") from error
        return content


def _line(text: str, name: str) -> str | None:
    """Give the value of a line of /proc/<pid>/status; of its sixty lines four are of interest."""
    _, found, rest = text.partition(f"\n{name}:")
    return rest.partition("\n")[0].strip() if found else None


def _sizes_tell(path: str) -> bool:
    try:
        # The descriptor that lists is among those that it lists; other threads may come in between.
        return abs(os.stat(path).st_size - len(os.listdir(path))) <= 2  # noqa: PTH116, PTH208 - one kind of path within this class
    except OSError:
        return False
