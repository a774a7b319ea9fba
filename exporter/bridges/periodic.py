"""Periodic polling on a separate thread, with a last poll at the end of the process.

Used in the training process by bridges. A poll that hangs prevents only later polls of the same object.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from exporter.recording.recorder import RECORDER
from exporter.recording.worker import Worker

LAST = object()
"""Item of the worker that marks the last poll."""


class Periodic:
    """Poll at an interval, at the times of the recording thread.

    Polls start with the first recorded value, or at once with `wake`. `after_fork` is called in a forked child, `at_exit`
    before the last poll.
    """

    def __init__(
        self,
        name: str,
        look: Callable[[], None],
        *,
        seconds: float,
        after_fork: Callable[[], None],
        at_exit: Callable[[], object] = lambda: None,
        wake: bool = False,
    ) -> None:
        self._name, self._look = name, look
        self._seconds, self._due = seconds, 0.0
        self._forget, self._at_exit = after_fork, at_exit
        self.restart()
        RECORDER.attach(self, start=wake)

    def restart(self) -> None:
        """Replace a hung thread."""
        self._worker = Worker(self._run_item, name=self._name, bound=1)
        self._worker.start()

    def tick(self) -> None:
        """Poll, if a poll is due and the previous poll has returned."""
        now = monotonic()
        if now >= self._due and self._worker.busy_since is None:
            self._due = now + self._seconds
            self._worker.put(None)

    def _run_item(self, item: object) -> None:
        if item is LAST:
            self._at_exit()
        self._look()

    def finish(self) -> Callable[[float, str], object]:
        """Start the last poll, and return the function that waits for its end."""
        self._worker.put(LAST)
        return self._worker.finish()

    def after_fork(self) -> None:
        """Discard the state of the parent and start a thread."""
        self._forget()
        self.restart()
