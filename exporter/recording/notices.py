"""Notices to the job's operator: each is written to standard error once, by a daemon thread.

Runs on any thread. Notices avoid the job's `logging`: a log handler of the job could hang and hold the lock that
`logging.shutdown` needs. They avoid the buffer of `sys.stderr` too: the exiting interpreter needs the buffer's lock.
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

EXIT_SECONDS = 0.5
"""Longest time that an exiting process waits for its last notices."""
MAX_NOTICES = 100
"""Different notices per process; further ones are counted as dropped."""
MAX_NOTICE_CHARACTERS = 2000
"""Characters of one notice."""


class Notices:
    """The notices of one process.

    Attributes:
        dropped: Notices that were not written: too many, or no thread could be started.
        is_quiet: Whether notices are not written to standard error.
        listeners: Functions that the thread also calls with each notice.
    """

    def __init__(self) -> None:
        self._logged: set[str] = set()  # kept by forked children, which repeat no notice
        self.reset()

    def reset(self) -> None:
        """Forget the thread and the notices that wait: what a forked child does."""
        self._waiting: deque[str] = deque()
        self._starting = threading.Lock()
        self._is_writing = self.is_quiet = False
        self.dropped = 0
        self.listeners: list[Callable[[str], object]] = []

    def log_once(self, key: str, message: str) -> None:
        """Write a notice unless this key had one; never raises, never waits."""
        if key in self._logged:
            return
        if len(self._logged) >= MAX_NOTICES:
            self.dropped += 1
            return
        self._logged.add(key)
        self._waiting.append(message[:MAX_NOTICE_CHARACTERS])
        # A thread that holds the lock is starting the writer; a signal handler that interrupts it must not wait.
        if self._is_writing or not self._starting.acquire(blocking=False):
            return
        try:
            if not self._is_writing:
                self._is_writing = True
                threading.Thread(target=self._write_all, name="exporter-notices", daemon=True).start()
        except RuntimeError:  # an exiting interpreter, since CPython 3.12, or no threads are left
            self._is_writing = False
            self._write_now()
        finally:
            self._starting.release()

    def flush(self, timeout_seconds: float = EXIT_SECONDS) -> None:
        """Wait until all notices are written, for a bounded time."""
        until = monotonic() + timeout_seconds
        while (self._is_writing or self._waiting) and monotonic() < until:
            sleep(0.002)

    def _write_now(self) -> None:
        """Write the waiting notices on this thread if standard error accepts bytes at once."""
        original = sys.__stderr__
        with suppress(Exception):
            if original is not None and sys.stderr is original and select.select([], [original], [], 0)[1]:
                self._write_all()
        self.dropped += len(self._waiting)
        self._waiting.clear()

    def _write_all(self) -> None:
        while True:
            while self._waiting:
                message = self._waiting.popleft()
                if not self.is_quiet:
                    self._write(f"exporter: {message}\n")
                self._call_listeners(message)
            self._is_writing = False
            if not self._waiting:  # a notice of the meantime found the writer at work
                return
            self._is_writing = True

    def _call_listeners(self, message: str) -> None:
        for listener in self.listeners:
            try:
                listener(message)
            except Exception:  # noqa: BLE001, PERF203  # such as a full disk
                self.dropped += 1

    def _write(self, line: str) -> None:
        stream, original = sys.stderr, sys.__stderr__
        try:
            if original is not None and stream is original:
                os.write(original.fileno(), line.encode(original.encoding or "utf-8", "backslashreplace"))
            elif stream is not None:
                stream.write(line)
                stream.flush()
        except Exception:  # noqa: BLE001  # a stream of the job's own, or a closed one
            self.dropped += 1


NOTICES = Notices()
"""The notices of this process; reset by the recorder."""

log_once = NOTICES.log_once
