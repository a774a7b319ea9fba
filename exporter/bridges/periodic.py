"""A daemon thread that does one thing again and again, until the process ends and once more then.

Used in the training process by bridges that have to look, since what they watch does not call.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable

from exporter.patching import never_raises
from exporter.recording.notices import tell_once

EXIT_SECONDS = 2.0


def _nothing() -> None:
    pass


class Periodic:
    """Calls a step, from one thread at a time; what it raises is told once and changes nothing.

    `after_fork` is called in a forked child before its first step; `at_exit` at exit, before the last step, and when no
    thread can be started. An exiting process waits at most `exit_seconds` for a step under way.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], None],
        *,
        seconds: float,
        after_fork: Callable[[], None] = _nothing,
        at_exit: Callable[[], object] = _nothing,
        exit_seconds: float = EXIT_SECONDS,
    ) -> None:
        self._name, self._seconds, self._exit_seconds = name, seconds, exit_seconds
        self._step, self._forked, self._at_exit = map(never_raises, (step, after_fork, at_exit))
        self._start()
        # After the recorder's, hence called before it: what the last step records is published.
        atexit.register(self.stop)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def _start(self) -> None:
        self._ended = threading.Event()
        self._working = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads
            tell_once(self._name, f"{self._name} does not run: {error}")
            self._ended.set()
            self._at_exit()

    def stop(self) -> None:
        """End the thread and do the last step; again is harmless."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._at_exit()
        if self._thread.is_alive():
            # One that still wants the interpreter lock while the interpreter ends may end the process with it.
            self._thread.join(self._exit_seconds)
        if self._working.acquire(timeout=0.1 if self._thread.is_alive() else EXIT_SECONDS):
            try:
                self._step()
            finally:
                self._working.release()

    def _after_fork(self) -> None:
        if not self._ended.is_set():
            self._forked()
            self._start()

    def _run(self) -> None:
        ended, working = self._ended, self._working
        while not ended.wait(self._seconds):
            with working:
                self._step()
