"""Start and end times of processes, to the hundredth of a second.

The kernel reports the start. A thread that waits for pidfds records the end, at no cost until then. Without pidfds, the next call
of `watch` records the end.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from exporter.collectors.job import ProcessLife
from exporter.collectors.kernel_files import procfs

RETENTION_SECONDS = 120.0
"""Time for which the end of a process is remembered."""

_START_FIELD = 19
"""Place of `starttime` after the command in /proc/PID/stat; man 5 proc_pid_stat."""


class ProcessLives:
    """Lives of watched processes.

    Args:
        monotonic: The clock.
    """

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()  # guards the next two
        self._lives: dict[int, ProcessLife] = {}
        self._waited: set[int] = set()  # pids that the thread waits for
        self._waiter: _Waiter | None = None

    def watch(self, pids: Collection[int]) -> Mapping[int, ProcessLife]:
        """Watch processes and return the lives of running and recently ended processes, by pid."""
        now = self._monotonic()
        with self._lock:
            for pid in pids:
                previous = self._lives.get(pid)
                if previous is None or previous.ended is not None:
                    self._add(pid, previous)
                elif pid not in self._waited and _began(pid) is None:
                    self._lives[pid] = replace(previous, ended=now)
            for pid, life in list(self._lives.items()):
                if life.ended is not None and now - life.ended > RETENTION_SECONDS:
                    del self._lives[pid]
                elif life.ended is None and pid not in self._waited and pid not in pids:
                    self._lives[pid] = replace(life, ended=now)
            return dict(self._lives)

    def stop(self) -> None:
        """End the thread."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.stop()

    def _add(self, pid: int, previous: ProcessLife | None) -> None:
        start = _began(pid)
        if start is None or (previous is not None and abs(previous.began - start) < 0.02):
            return  # has ended
        self._lives[pid] = ProcessLife(pid, start)
        with contextlib.suppress(OSError, AttributeError):  # not permitted, or an old kernel
            descriptor = os.pidfd_open(pid)
            if self._waiter is None:
                self._waiter = _Waiter(self._note_end)
            self._waited.add(pid)
            self._waiter.add(descriptor, pid)

    def _note_end(self, pid: int) -> None:
        now = self._monotonic()
        with self._lock:
            self._waited.discard(pid)
            life = self._lives.get(pid)
            if life is not None:
                self._lives[pid] = replace(life, ended=now)


class _Waiter:
    """Thread that waits for pidfds."""

    def __init__(self, ended: Callable[[int], None]) -> None:
        self._ended = ended
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="exporter-lives", daemon=True)
        self._thread.start()

    def add(self, descriptor: int, pid: int) -> None:
        """Wait for a process; the end of the process closes the descriptor."""
        self._selector.register(descriptor, selectors.EVENT_READ, pid)

    def stop(self) -> None:
        """End the thread and close every descriptor."""
        self._stopping = True
        self._wake_writer.send(b"!")
        self._thread.join(2.0)
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                os.close(key.fd)
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()

    def _run(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
                    self._ended(key.data)


def _began(pid: int) -> float | None:
    """Return the monotonic start time of a process; None for a missing process and a zombie."""
    try:
        text = (procfs() / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    if len(fields) <= _START_FIELD or fields[0] in {"Z", "X"}:
        return None
    since_boot = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
    asleep = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return since_boot - asleep
