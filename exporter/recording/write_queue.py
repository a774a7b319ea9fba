"""Write queue: recordings that are aggregated and not written to the feed yet.

A write can block for as long as the file system does. Therefore no lock of the recording is held during a write: samples are
aggregated, and the identity of the process changes, while another thread writes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress

from exporter.recording.conversion import safe_repr
from exporter.recording.notices import log_once
from exporter.recording.signal_safety import SignalSafeLock, is_from_signal_handler
from exporter.recording.value_class import Value, value_class
from exporter.recording.values import ProcessIdentity, Recording

MAX_RECORDINGS = 16
"""Capacity of the queue, which fills up only if the job changes its identity again and again during a write that hangs."""


@value_class
class UnwrittenRecording(Value):
    """Recording, and the identity under which it was recorded."""

    recording: Recording
    identity: ProcessIdentity


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
        self._write_lock = SignalSafeLock()
        self._current: UnwrittenRecording | None = None  # recording that is being written
        self._is_written = True  # result of the latest write

    def is_full(self) -> bool:
        """Return True if the queue accepts no recording."""
        return len(self._queue) >= MAX_RECORDINGS

    def is_writing(self) -> bool:
        """Return True while a thread writes."""
        return self._current is not None

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

    def write_all(self, timeout_seconds: float) -> bool:
        """Write the recordings that are queued now on the caller's thread. Later ones are left to the next call.

        Returns False if the latest write failed, and if another thread still writes after the timeout.
        """
        write_lock = self._write_lock  # a fork during the write replaces the attribute
        try:
            return bool(write_lock.run(self._write_queued, timeout_seconds))
        except Exception as error:  # a defect must not end the thread or reach the job
            if is_from_signal_handler(error):
                raise
            log_once(f"defect {safe_repr(error)}", f"a defect in the recording: {safe_repr(error)}")
            self._is_written = False
            return False

    def _write_queued(self) -> bool:
        """Write the queued recordings, and return the result of the latest write.

        A recording that a later recording of its identity replaces is skipped.
        """
        # If each write takes longer than the flush interval, the queue is never empty, and a thread of the job would write forever.
        try:
            for remaining in reversed(range(len(self._queue))):
                # Set before the removal, so that `latest` returns a recording meanwhile. `add` may replace it before the removal.
                self._current = self._queue[0]
                self._current = self._queue.popleft()
                if self._current.recording.final or not remaining:
                    self._is_written = self._write(self._current)
        finally:
            self._current = None
        return self._is_written
