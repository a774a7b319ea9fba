"""Periodic polling on a separate thread, with a last poll at the end of the process.

Used by bridges in the training process. A poll that hangs delays the later polls of the same object. At the end of the process, it
delays the exit, at most until the time limit of the exit.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from exporter.recording.notices import log_once
from exporter.recording.recorder import RECORDER
from exporter.recording.worker import Worker


class Periodic:
    """Function that is called periodically, at ticks of the recording thread.

    Args:
        name: Name of the thread.
        poll: Called on the thread of this object.
        seconds: Minimum interval between two polls.
        after_fork: Called in a forked child, before its first poll.
        at_exit: Called at the exit on the exiting thread, before the last poll. Must not raise.
        wake: True to start the recording thread, and with it the polls, now; False to start them with the first recorded value.
    """

    def __init__(
        self,
        name: str,
        poll: Callable[[], None],
        *,
        seconds: float,
        after_fork: Callable[[], None],
        at_exit: Callable[[], object] = lambda: None,
        wake: bool = False,
    ) -> None:
        self._name, self._call_poll = name, poll
        self._seconds, self._due = seconds, 0.0
        self._reset_in_child, self._at_exit = after_fork, at_exit
        self.restart()
        RECORDER.attach(self, start=wake)

    def restart(self) -> None:
        """Start a new thread, for example in place of a hung thread."""
        self._worker = Worker(lambda _item: self._call_poll(), name=self._name, bound=1)
        self._worker.start()

    def tick(self) -> None:
        """Poll, if a poll is due and the previous poll has returned."""
        now = monotonic()
        if now >= self._due and self._worker.busy_since is None:
            self._due = now + self._seconds
            self._worker.put(None)

    def finish(self) -> Callable[[float, str], object]:
        """Call `at_exit` and queue the last poll. Return a function that waits for the end of the last poll."""
        self._at_exit()  # not on the thread, where an earlier poll may hang
        self._worker.put(None, is_bounded=False)  # an earlier poll may still be queued
        worker = self._worker
        wait_for_end = worker.finish(is_extended=True)

        def wait(timeout_seconds: float, reason: str) -> None:
            wait_for_end(timeout_seconds, reason)
            if reason in worker.lost_items():
                log_once(
                    f"last poll {self._name}",
                    f"the last poll of {self._name} did not end in time at the exit; values that it has not processed are lost",
                )

        return wait

    def after_fork(self) -> None:
        """Discard the state of the parent and start a thread."""
        self._reset_in_child()
        self.restart()
