"""Recording thread of a process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, perf_counter, sleep

from exporter.recording.conversion import safe_repr
from exporter.recording.notices import log_once
from exporter.recording.signal_safety import SignalSafeLock, is_from_signal_handler
from exporter.recording.worker import Marker, wait_while_working

SLICE_SECONDS = 0.0004
"""Time for which the recording thread works before it releases the interpreter lock."""


class ThreadCall:
    """Call of a function on the recording thread, for which another thread waits.

    Attributes:
        result: Result of the function; False before the end of the call.
    """

    def __init__(self, work: Callable[[], bool]) -> None:
        self._work = work
        self._completion = Marker(ends_thread=False)
        self.result = False

    def run(self) -> None:
        """Call the function, which must not raise."""
        self.result = self._work()
        self._completion.set()

    def wait(self, timeout_seconds: float, working_thread: threading.Thread | None = None) -> bool:
        """Return the result of the function, or False after the timeout, which is extended while *working_thread* makes progress."""
        if working_thread is None:
            return self._completion.wait(timeout_seconds) and self.result
        return wait_while_working(self._completion, working_thread, timeout_seconds) and self.result


class RecordingThread:
    """Thread that runs the recording of a process.

    Threads of the job let this thread work for them, see `call`. An exception of a signal handler thus ends the wait of the main thread,
    and does not interrupt the work. If this thread does not run or is writing, other threads work themselves. A lock ensures that only one
    thread works at a time.

    Args:
        run: Function that the thread calls. The function must call `run_calls` after each `sleep_until`, and return once `sleep_until`
            has returned False.
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
        self._work_lock = SignalSafeLock()
        self._alarm = threading.Lock()  # held unless a wake is pending; a release wakes the thread
        self._alarm.acquire()
        self._thread: threading.Thread | None = None
        self._slice_start = 0.0
        self._calls: deque[ThreadCall] = deque()
        self._has_ended = False  # True after the end of the thread
        self.is_stopping = False

    def start(self) -> None:
        """Start the thread if it is not running. Never raises."""
        # If the lock is held, its holder starts the thread. Waiting for the lock in a signal handler that interrupts the holder would
        # be a deadlock.
        if self._thread is not None or self.is_stopping or not self._start_lock.acquire(blocking=False):
            return
        try:
            if self._thread is None and self._prepare():
                thread = threading.Thread(
                    target=self._register_and_run, name="exporter-recording", daemon=True
                )
                thread.start()
                self._thread = thread
        except Exception as error:  # a failed start must not stop the job
            if is_from_signal_handler(error):
                raise
            log_once("thread", f"nothing is recorded: the recording thread cannot start: {safe_repr(error)}")
        finally:
            self._start_lock.release()

    def _register_and_run(self) -> None:
        """Run on the new thread, unless another thread runs: an exception of a signal handler may end `start` before its last line."""
        with self._start_lock:
            if self._thread is None:
                self._thread = threading.current_thread()
            is_registered = self._thread is threading.current_thread()
        if is_registered:
            try:
                self._run()
            finally:
                self._has_ended = True

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
        # Not `is_alive`: in CPython 3.11, an exception of a signal handler during this method makes the thread look ended.
        return self._thread not in {None, threading.current_thread()} and not self._has_ended

    def join(self, timeout_seconds: float) -> None:
        """Wait for the end of the thread. Returns at once on the thread itself, and without a thread."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_seconds)

    def call(self, work: Callable[[], bool], timeout_seconds: float) -> bool:
        """Let this thread call *work*, which must not raise, and return the result, or False after the timeout.

        On this thread, and if this thread does not run, *work* is called on the caller's thread, without the timeout. During the exit,
        the wait is longer than the timeout while this thread makes progress.
        """
        if not self.is_running():
            return work()
        call = ThreadCall(work)
        self._calls.append(call)
        self.wake()
        return call.wait(timeout_seconds, self._thread if self.is_stopping else None)

    def run_calls(self) -> None:
        """Run the calls that other threads have requested. Runs on this thread."""
        while self._calls:
            self._calls.popleft().run()

    def run_exclusively(self, work: Callable[[], object], timeout_seconds: float = -1) -> bool:
        """Run *work* while no other thread runs work of the recording. A negative timeout waits without a limit.

        Returns False after the timeout, in a signal handler that has interrupted such work, and if *work* raises or returns False. An exception is logged once.
        """
        lock = self._work_lock  # a fork within the work replaces the attribute
        try:
            return bool(lock.run(lambda: work() is not False, timeout_seconds))
        except Exception as error:  # a defect must not end the thread or reach the job
            if is_from_signal_handler(error):
                raise
            log_once(f"defect {safe_repr(error)}", f"a defect in the recording: {safe_repr(error)}")
            return False

    def yield_gil(self) -> None:
        """Release the interpreter lock after `SLICE_SECONDS` of work, except during the shutdown."""
        if perf_counter() - self._slice_start > SLICE_SECONDS and not self.is_stopping:
            sleep(0)
            self._slice_start = perf_counter()
