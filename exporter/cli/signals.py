"""Signals as values for the main thread of the sidecar and of `push`.

The main thread waits for the byte that CPython's C handler writes: otherwise a signal just before the system call would stay
unnoticed. Signals are not blocked, because programs started by collectors would inherit the mask.
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
        ending: True after the first SIGTERM or SIGINT, so the next signal terminates the process at once.
    """

    def __init__(self) -> None:
        self.ending = False
        # SimpleQueue.put is reentrant: a handler can interrupt `get`.
        self._came: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        signal.set_wakeup_fd(self._ringer.fileno(), warn_on_full_buffer=False)
        for number in (*ENDING, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._take)
        # Possibly blocked by the parent process.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP, signal.SIGINT})

    def wait(self, timeout_seconds: float | None) -> int | None:
        """Return the next signal, or None after the timeout or earlier."""
        if self._came.empty():
            select.select([self._bell], [], [], timeout_seconds)
            with contextlib.suppress(BlockingIOError):
                self._bell.recv(4096)
        with contextlib.suppress(queue.Empty):  # handlers have run
            return self._came.get_nowait()
        return None

    def _take(self, number: int, _frame: object) -> None:
        if self.ending and number in ENDING:
            os._exit(128 + number)
        self._came.put(number)
