"""Looking again and again at what does not call by itself, on a thread of its own, and once more when the process ends.

Used in the training process by bridges. A look that hangs costs the further ones, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from exporter.recording.events import EVENTS
from exporter.recording.worker import Worker


class Periodic:
    """Takes a look every so many seconds, at the times of the recording thread.

    `after_fork` is called in a forked child; `at_exit` before the last look, for which an exiting process waits at most
    `exit_seconds`. They begin with the first thing that is recorded; now, where `wake`.
    """

    def __init__(
        self,
        name: str,
        look: Callable[[], None],
        *,
        seconds: float,
        after_fork: Callable[[], None],
        at_exit: Callable[[], object] = lambda: None,
        exit_seconds: float = 2.0,
        wake: bool = False,
    ) -> None:
        self._name, self._look = name, look
        self._seconds, self._exit_seconds, self._due = seconds, exit_seconds, 0.0
        self._forget, self._at_exit = after_fork, at_exit
        self.restart()
        EVENTS.attach(self, wake=wake)

    def restart(self) -> None:
        """Go on with a thread that has not hung."""
        self._worker = Worker(lambda _: self._look(), name=self._name, bound=1)
        self._worker.start()

    def tick(self) -> None:
        """Look, if it is time and the last look is over."""
        now = monotonic()
        if now >= self._due and self._worker.busy_since is None:
            self._due = now + self._seconds
            self._worker.put(None)

    def close(self) -> None:
        """Look once more, for the last time."""
        self._at_exit()
        self._worker.put(None)
        self._worker.finish()(self._exit_seconds, "exit")

    def after_fork(self) -> None:
        """Begin anew."""
        self._forget()
        self.restart()
