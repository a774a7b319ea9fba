"""Looking again and again at what does not call by itself, on a thread of its own, and once more when the process ends.

Used in the training process by bridges. A look that hangs costs the further ones, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from exporter.recording.recorder import RECORDER
from exporter.recording.worker import Worker

LAST = object()
"""Item of the worker that stands for the last look."""


class Periodic:
    """Takes a look every so many seconds, at the times of the recording thread.

    `after_fork` is called in a forked child; `at_exit` before the last look. They begin with the first thing that is recorded; now, where `wake`.
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
        """Go on with a thread that has not hung."""
        self._worker = Worker(self._run_item, name=self._name, bound=1)
        self._worker.start()

    def tick(self) -> None:
        """Look, if it is time and the last look is over."""
        now = monotonic()
        if now >= self._due and self._worker.busy_since is None:
            self._due = now + self._seconds
            self._worker.put(None)

    def _run_item(self, item: object) -> None:
        if item is LAST:
            self._at_exit()
        self._look()

    def finish(self) -> Callable[[float, str], object]:
        """Start the last look; returns the function that waits for it."""
        self._worker.put(LAST)
        return self._worker.finish()

    def after_fork(self) -> None:
        """Begin anew."""
        self._forget()
        self.restart()
