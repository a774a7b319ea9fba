"""Recording thread of a process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, perf_counter, sleep

from exporter.recording.conversion import safe_repr
from exporter.recording.notices import log_once

SLICE_SECONDS = 0.0004
"""Time for which the recording thread works before it releases the interpreter lock."""


class RecordingThread:
    """Thread that runs the recording of a process.

    Other threads may do work of the recording too, such as a flush. A lock ensures that only one thread does such work at a time.

    Args:
        run: Function that the thread calls. The function must return once `sleep_until` returns False.
        prepare: Function that is called before the start, and returns False if nothing is recorded.

    Attributes:
        is_stopping: True once the process exits. The thread then ends and is not started again.
    """

    def __init__(self, run: Callable[[], None], prepare: Callable[[], bool]) -> None:
        self._run = run
        self._prepare = prepare
        self.after_fork()

    def after_fork(self) -> None:
        """Set the initial state, with new locks and without a thread. Called by the constructor and in a forked child."""
        self._start_lock = threading.Lock()
        self._work_lock = threading.Lock()
        self._alarm = threading.Lock()  # held unless a wake is pending; a release wakes the thread
        self._alarm.acquire()
        self._thread: threading.Thread | None = None
        self._slice_start = 0.0
        self.is_stopping = False

    def start(self) -> None:
        """Start the thread if it is not running. Never raises."""
        # If the lock is held, its holder starts the thread. Waiting for the lock in a signal handler that interrupts the holder would
        # be a deadlock.
        if self._thread is not None or self.is_stopping or not self._start_lock.acquire(blocking=False):
            return
        try:
            if self._thread is None and self._prepare():
                thread = threading.Thread(target=self._run, name="exporter-recording", daemon=True)
                thread.start()
                self._thread = thread
        except Exception as error:  # noqa: BLE001  # a failed start must not stop the job
            log_once("thread", f"nothing is recorded: the recording thread cannot start: {safe_repr(error)}")
        finally:
            self._start_lock.release()

    def wake(self) -> None:
        """End the current sleep of the thread, or the next one if the thread is awake."""
        with suppress(RuntimeError):  # an earlier wake is still pending
            self._alarm.release()

    def sleep_until(self, wake_time: float) -> bool:
        """Sleep until a monotonic time or the next `wake`. Return False if the thread must end."""
        if not self.is_stopping:
            self._alarm.acquire(timeout=max(wake_time - monotonic(), 0.0))
            self._slice_start = perf_counter()
        return not self.is_stopping

    def wait_for_wake(self) -> None:
        """Wait for a `wake`, also after the thread must end."""
        self._alarm.acquire()

    def is_running(self) -> bool:
        """Return True if the thread runs and is not the calling thread."""
        thread = self._thread
        return thread is not None and thread is not threading.current_thread() and thread.is_alive()

    def join(self, timeout_seconds: float) -> None:
        """Wait for the end of the thread. Returns at once on the thread itself, and without a thread."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_seconds)

    def run_exclusively(self, work: Callable[[], object], timeout_seconds: float = -1) -> bool:
        """Run *work* while no other thread runs work of the recording. A negative timeout waits without a limit.

        Returns False after the timeout, and if *work* raises or returns False. An exception is logged once.
        """
        lock = self._work_lock  # a fork within the work replaces the attribute
        if not lock.acquire(timeout=timeout_seconds):
            return False
        try:
            return work() is not False
        except Exception as error:  # noqa: BLE001  # a defect must not end the thread or reach the job
            log_once(f"defect {safe_repr(error)}", f"a defect in the recording: {safe_repr(error)}")
            return False
        finally:
            lock.release()

    def yield_gil(self) -> None:
        """Release the interpreter lock after `SLICE_SECONDS` of work, except during the shutdown."""
        if perf_counter() - self._slice_start > SLICE_SECONDS and not self.is_stopping:
            sleep(0)
            self._slice_start = perf_counter()
