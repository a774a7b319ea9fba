"""Start and end times of processes.

The start is read from /proc, in clock ticks of usually 10 ms. A thread that waits for pidfds records the end. Without a
pidfd (on an old kernel, without permission or without a free thread), the next call of `watch` records the end. Such a process also
counts as exited if the call does not contain the pid.
"""

from __future__ import annotations

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
"""Retention of the start and end times of an exited process whose pid is no longer watched."""

START_TOLERANCE_SECONDS = 0.02
"""Maximum difference of two readings of the same start, because the clocks are read one after the other."""

# Indices of the fields `state` and `starttime` after the command in /proc/PID/stat; see proc_pid_stat(5).
_STATE_FIELD = 0
_START_FIELD = 19


class ProcessLives:
    """Start and end times of watched processes on the monotonic clock."""

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()  # guards the next two attributes
        self._lives: dict[int, ProcessLife] = {}
        self._waiting_pids: set[int] = set()  # pids that the thread waits for
        self._waiter: _Waiter | None = None

    def watch(self, pids: Collection[int]) -> Mapping[int, ProcessLife]:
        """Watch processes, and return the start and end times by pid.

        The result also contains the processes of earlier calls that are running or exited within `RETENTION_SECONDS`. A process that
        had exited before the first call with the pid is missing.
        """
        now = self._monotonic()
        with self._lock:
            for pid in pids:
                previous = self._lives.get(pid)
                if previous is None or previous.ended_at is not None:
                    self._record_start(pid, previous)
                elif pid not in self._waiting_pids and _start_time(pid) is None:
                    self._lives[pid] = replace(previous, ended_at=now)
            for pid, life in list(self._lives.items()):
                # A driver may list a pid for as long as a process that has ended holds GPU memory: the end stays known.
                is_retained = pid in pids or life.ended_at is None or now - life.ended_at <= RETENTION_SECONDS
                if not is_retained:
                    del self._lives[pid]
                elif life.ended_at is None and pid not in self._waiting_pids and pid not in pids:
                    self._lives[pid] = replace(life, ended_at=now)
            return dict(self._lives)

    def stop(self) -> None:
        """Stop the thread, if it is running."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.stop()

    def _record_start(self, pid: int, previous: ProcessLife | None) -> None:
        """Record the start of a process, and wait for the exit if the kernel permits. Does nothing for the process of *previous*."""
        start = _start_time(pid)
        if start is None or (
            previous is not None and abs(previous.started_at - start) < START_TOLERANCE_SECONDS
        ):
            return  # the process has ended
        self._lives[pid] = ProcessLife(pid, start)
        try:
            descriptor = os.pidfd_open(pid)
        except (OSError, AttributeError):  # no permission, or a kernel without pidfds
            return
        try:
            if self._waiter is None:
                self._waiter = _Waiter(self._record_end)
            self._waiter.add(descriptor, pid)
        except (OSError, RuntimeError):  # a limit on descriptors, processes or memory
            os.close(descriptor)
            return
        self._waiting_pids.add(pid)

    def _record_end(self, pid: int) -> None:
        now = self._monotonic()
        with self._lock:
            self._waiting_pids.discard(pid)
            life = self._lives.get(pid)
            if life is not None:
                self._lives[pid] = replace(life, ended_at=now)


class _Waiter:
    """Thread that waits for pidfds."""

    def __init__(self, on_exit: Callable[[int], None]) -> None:
        self._on_exit = on_exit
        self._is_stopping = False
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="exporter-lives", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._close()
            raise

    def add(self, descriptor: int, pid: int) -> None:
        """Wait for the end of a process, then close the descriptor."""
        self._selector.register(descriptor, selectors.EVENT_READ, pid)

    def stop(self) -> None:
        """Stop the thread and close all descriptors."""
        self._is_stopping = True
        self._wake_writer.send(b"!")
        self._thread.join(2.0)
        self._close()

    def _close(self) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                os.close(key.fd)
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()

    def _run(self) -> None:
        """Report the exit of each process until `stop` is called."""
        while not self._is_stopping:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
                    self._on_exit(key.data)


def _start_time(pid: int) -> float | None:
    """Return the monotonic start time of a process. Returns None for a missing process and for a zombie."""
    try:
        text = (procfs() / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The command before the last parenthesis may contain spaces.
    _, _, text_after_command = text.rpartition(")")
    fields = text_after_command.split()
    if len(fields) <= _START_FIELD or fields[_STATE_FIELD] in {"Z", "X"}:
        return None
    seconds_after_boot = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
    suspended_seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return seconds_after_boot - suspended_seconds
