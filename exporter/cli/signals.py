"""Queue of received signals for the main thread of the sidecar and of `push`.

CPython's signal handler in C writes a byte to a socket, on which the main thread waits. A signal that arrives just before the wait
thus ends it. Signals are not blocked, because the programs that collectors start would inherit the mask.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Queue of SIGTERM, SIGINT, SIGHUP and SIGUSR1.

    Attributes:
        is_ending: Set by the caller when it ends. From then on, SIGTERM or SIGINT terminates the process at once.
    """

    def __init__(self) -> None:
        self.is_ending = False
        # SimpleQueue.put is reentrant, because a handler may interrupt a call of the queue.
        self._queue: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        handled_signals = (*ENDING_SIGNALS, signal.SIGHUP, signal.SIGUSR1)
        for number in handled_signals:
            signal.signal(number, self._handle)
        # The program has blocked SIGHUP and SIGINT during its start, and the parent process may have blocked any signal.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled_signals)

    def wait(self, timeout_seconds: float | None) -> int | None:
        """Return the next signal. Return None after the timeout, or earlier after a spurious wake-up."""
        if self._queue.empty():
            select.select([self._reader], [], [], timeout_seconds)
            with contextlib.suppress(BlockingIOError):
                self._reader.recv(4096)
        with contextlib.suppress(queue.Empty):  # the handlers in Python have run by now
            return self._queue.get_nowait()
        return None

    def _handle(self, number: int, _frame: object) -> None:
        """Queue a signal, or terminate the process at once if it is ending."""
        if self.is_ending and number in ENDING_SIGNALS:
            os._exit(128 + number)
        self._queue.put(number)
