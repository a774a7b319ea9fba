"""Write queue: recordings that are aggregated and not written to the feed yet.

A write can block for as long as the file system does. Therefore no lock of the recording is held during a write: samples are
aggregated, and the identity of the process changes, while the recording thread writes. A thread of the job requests a write and waits
for a limited time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from exporter.recording.conversion import safe_repr
from exporter.recording.notices import log_once
from exporter.recording.value_class import Value, value_class
from exporter.recording.values import ProcessIdentity, Recording
from exporter.recording.worker import Marker

MAX_RECORDINGS = 16
"""Capacity of the queue, which fills up only if the job changes its identity again and again during a write that hangs."""


@value_class
class UnwrittenRecording(Value):
    """Recording, and the identity under which it was recorded."""

    recording: Recording
    identity: ProcessIdentity


class WriteRequest(Marker):
    """Request to write the recordings that are queued at the time of the request.

    Attributes:
        is_written: True if the latest of these recordings was written; False before the completion.
    """

    def __init__(self) -> None:
        super().__init__(ends_thread=False)
        self.is_written = False

    def complete(self, *, is_written: bool) -> None:
        """Set the result and end the waits."""
        self.is_written = is_written
        self.set()


class WriteQueue:
    """Queue of recordings, which one thread at a time writes in order.

    Recordings of an identity are cumulative: a later recording replaces an earlier one that is not written yet. The last recording of
    an identity is final.

    Args:
        write: Function that writes a recording and returns True, or returns False on a failure.
    """

    def __init__(self, write: Callable[[UnwrittenRecording], bool]) -> None:
        self._write = write
        self.after_fork()

    def after_fork(self) -> None:
        """Discard the queue of the parent in a forked child."""
        # No lock guards the queue, because a signal handler that interrupts the holder could flush. A single thread appends, within
        # `RecordingThread.run_exclusively`, and a single thread removes, which holds the write lock.
        self._queue: deque[UnwrittenRecording] = deque()
        self._requests: deque[WriteRequest] = deque()
        self._write_lock = threading.Lock()
        self._current: UnwrittenRecording | None = None  # recording that is being written
        self._is_written = True  # result of the latest write

    def is_full(self) -> bool:
        """Return True if the queue accepts no recording."""
        return len(self._queue) >= MAX_RECORDINGS

    def latest(self) -> UnwrittenRecording | None:
        """Return the latest recording that is not written yet, or None."""
        recordings = list(self._queue)
        return recordings[-1] if recordings else self._current

    def add(self, recording: UnwrittenRecording) -> bool:
        """Append a recording, or replace the latest one if neither is final. Never waits.

        Returns False for a recording that is not final if the queue is full. The next recording of the identity contains the same data.
        """
        is_final = recording.recording.final
        with suppress(IndexError):  # the queue is empty, or the writing thread has just emptied it
            if not is_final and not self._queue[-1].recording.final:
                self._queue[-1] = recording
                return True
        if self.is_full() and not is_final:
            return False
        self._queue.append(recording)
        return True

    def request_write(self) -> WriteRequest:
        """Return a request that the next call of `write_all` completes. Never waits."""
        request = WriteRequest()
        self._requests.append(request)
        return request

    def write_all(self, timeout_seconds: float) -> bool:
        """Write the recordings that are queued now on the caller's thread, and complete the requests. Later ones are left to the next call.

        Returns False if the latest write failed, and if another thread still writes after the timeout.
        """
        write_lock = self._write_lock  # a fork during the write replaces the attribute
        if not write_lock.acquire(timeout=timeout_seconds):
            return False
        requests = [self._requests.popleft() for _ in range(len(self._requests))]
        try:
            self._write_queued()
        except Exception as error:  # noqa: BLE001  # a defect must not end the thread or reach the job
            log_once(f"defect {safe_repr(error)}", f"a defect in the recording: {safe_repr(error)}")
            self._is_written = False
        finally:
            self._current = None
            write_lock.release()
            for request in requests:
                request.complete(is_written=self._is_written)
        return self._is_written

    def _write_queued(self) -> None:
        """Write the queued recordings. A recording that a later recording of its identity replaces is skipped."""
        # If each write takes longer than the flush interval, the queue is never empty, and a thread of the job would write forever.
        for remaining in reversed(range(len(self._queue))):
            # Set before the removal, so that `latest` returns a recording meanwhile. `add` may replace it before the removal.
            self._current = self._queue[0]
            self._current = self._queue.popleft()
            if self._current.recording.final or not remaining:
                self._is_written = self._write(self._current)
