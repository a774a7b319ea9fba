"""Signals as values for a main thread that waits for them, in the sidecar and in `push`.

The wait is for a byte that the system's handler writes: a signal between Python's last look and a system call would lie
there unseen. They are not blocked, since every program that a collector starts would inherit that.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket

ENDING = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """SIGTERM, SIGINT, SIGHUP and SIGUSR1 as values on the main thread; a second SIGTERM or SIGINT ends the process.

    Attributes:
        ending: Whether the end has begun, so that the next signal is the second one.
    """

    def __init__(self) -> None:
        self.ending = False
        # SimpleQueue.put may interrupt any code, its own get included.
        self._came: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        signal.set_wakeup_fd(self._ringer.fileno(), warn_on_full_buffer=False)
        for number in (*ENDING, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._take)
        # Blocked since the process began.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP, signal.SIGINT})

    def wait(self, timeout_seconds: float | None) -> int | None:
        """The next signal, None when none came in time; or earlier, so that it has to be asked again."""
        if self._came.empty():
            select.select([self._bell], [], [], timeout_seconds)
            with contextlib.suppress(BlockingIOError):
                self._bell.recv(4096)
        with contextlib.suppress(queue.Empty):  # handlers have run by now
            return self._came.get_nowait()
        return None

    def _take(self, number: int, _frame: object) -> None:
        if self.ending and number in ENDING:
            os._exit(128 + number)
        self._came.put(number)
