"""Notices for the job's operator, which a daemon thread writes to standard error.

`log_once` may be called on any thread. Notices do not go through the job's loggers, because a log handler of the job could hang
and hold the lock that `logging.shutdown` needs. They also bypass the buffer of the original `sys.stderr`, whose lock the exiting
interpreter needs.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, sleep

MAX_NOTICES = 100
"""Maximum number of keys of a process, including the keys of its parent before a fork. Further notices are counted as dropped."""
MAX_NOTICE_CHARACTERS = 2000
"""Maximum length of a notice."""


class Notices:
    """Notices of a process.

    Attributes:
        dropped_notices: Notices above the limit, failed writes, and failed calls of a listener.
        is_quiet: True to pass notices to the listeners only.
        listeners: Functions that are called with each notice, on the thread that writes it.
    """

    def __init__(self) -> None:
        # Not reset, so that a forked child does not repeat the notices of its parent.
        self._logged_keys: set[str] = set()
        self.reset()

    def reset(self) -> None:
        """Discard the queue, the listeners and the counts, and expect no writer thread, as in a forked child.

        The keys stay logged.
        """
        self._queue: deque[str] = deque()
        self._start_lock = threading.Lock()
        self._is_writing = self.is_quiet = False
        self.dropped_notices = 0
        self.listeners: list[Callable[[str], object]] = []

    def log_once(self, key: str, message: str) -> None:
        """Queue a notice unless a notice with the same key was queued. Does not raise, and does not wait for standard error."""
        if key in self._logged_keys:
            return
        if len(self._logged_keys) >= MAX_NOTICES:
            self.dropped_notices += 1
            return
        self._logged_keys.add(key)
        self._queue.append(message[:MAX_NOTICE_CHARACTERS])
        # The holder of the lock starts the writer thread. A signal handler that interrupts the holder must not wait for the lock.
        if self._is_writing or not self._start_lock.acquire(blocking=False):
            return
        try:
            if not self._is_writing:
                self._is_writing = True
                threading.Thread(target=self._write_all, name="exporter-notices", daemon=True).start()
        except RuntimeError:  # the interpreter exits (since CPython 3.12), or the limit of threads is reached
            self._is_writing = False
            self._write_now()
        finally:
            self._start_lock.release()

    def flush(self, timeout_seconds: float) -> None:
        """Wait until all queued notices are written, at most for the timeout."""
        deadline = monotonic() + timeout_seconds
        while (self._is_writing or self._queue) and monotonic() < deadline:
            sleep(0.002)

    def _write_now(self) -> None:
        """Write the queued notices on this thread, if `sys.stderr` is the original and accepts bytes without blocking.

        Otherwise the notices are dropped.
        """
        original = sys.__stderr__
        with suppress(Exception):
            if original is not None and sys.stderr is original and select.select([], [original], [], 0)[1]:
                self._write_all()
        self.dropped_notices += len(self._queue)
        self._queue.clear()

    def _write_all(self) -> None:
        """Write the queued notices and call the listeners, until the queue is empty."""
        while True:
            while self._queue:
                message = self._queue.popleft()
                if not self.is_quiet:
                    self._write(f"exporter: {message}\n")
                self._call_listeners(message)
            self._is_writing = False
            if not self._queue:  # a notice may have been queued before the flag was cleared
                return
            self._is_writing = True

    def _call_listeners(self, message: str) -> None:
        for listener in self.listeners:
            try:
                listener(message)
            except Exception:  # noqa: BLE001, PERF203  # a listener may fail, for example on a full disk
                self.dropped_notices += 1

    def _write(self, line: str) -> None:
        """Write a line to the descriptor of the original `sys.stderr`, or to the stream that the job has put in its place."""
        stream, original = sys.stderr, sys.__stderr__
        try:
            if original is not None and stream is original:
                os.write(original.fileno(), line.encode(original.encoding or "utf-8", "backslashreplace"))
            elif stream is not None:
                stream.write(line)
                stream.flush()
        except Exception:  # noqa: BLE001  # the stream may be closed, or a class of the job
            self.dropped_notices += 1


NOTICES = Notices()
"""Notices of this process, reset by the recorder."""

log_once = NOTICES.log_once
