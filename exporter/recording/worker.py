"""Worker threads with a bounded queue, for code of the job and of libraries.

A function that raises, hangs or is slow loses only the items of its own queue, counted by reason. A forked child starts with
an empty queue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import count
from queue import SimpleQueue
from time import monotonic, time
from typing import Any

from exporter.recording.conversion import safe_repr
from exporter.recording.notices import log_once


class Counter:
    """Exact counter of any number of threads, without a lock.

    Attributes:
        bump: Increment the counter and return the number before; a single call into C.
    """

    def __init__(self) -> None:
        self._count = count()
        self._many = 0
        self.bump: Callable[[], int] = self._count.__next__

    def add(self, number: int) -> None:
        """Increment by a number; called by one thread at a time."""
        self._many += number

    def read(self) -> int:
        """Return the count."""
        return int(repr(self._count)[6:-1]) + self._many  # `count` has no other access without an increment


class Marker:
    """Queue item that signals the completion of all items before; with `end`, the thread stops there.

    Not a `threading.Event`: a signal handler that interrupts `wait` would block `set`.
    """

    def __init__(self, *, end: bool) -> None:
        self.end = end
        self._waits = threading.Lock()
        self._waits.acquire()
        self.set = self._waits.release

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until all items before are done; returns False after the time."""
        taken = self._waits.acquire(timeout=max(timeout_seconds, 0.0))
        if taken:
            self._waits.release()
        return taken


class Worker:
    """Thread that calls a function with each item of a queue.

    Attributes:
        done: Items for which the function returned.
        busy_since: Unix time at which the present call started; None while the queue is empty.
    """

    def __init__(self, handle: Callable[[Any], object], *, name: str, bound: int) -> None:
        self._handle, self._name, self._bound = handle, name, bound
        self.after_fork()

    def after_fork(self) -> None:
        """Start with an empty queue and no thread: both belong to the parent."""
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._full = Counter()
        self._losses: dict[str, int] = {}
        self._ended = self._abandoned = False
        self.done = 0
        self.busy_since: float | None = None

    @property
    def idle(self) -> bool:
        """True if the queue is empty."""
        return self._queue.empty()

    @property
    def over(self) -> bool:
        """True if no item will be processed any more, so that the counts are final."""
        return self._thread is None or self._ended or self._abandoned

    def lost(self) -> dict[str, int]:
        """Return the lost items by reason; called by the publishing thread."""
        full = self._full.read()
        return self._losses | {"queue_full": full} if full else dict(self._losses)

    def put(self, item: object, *, bounded: bool = True) -> bool:
        """Queue an item; returns False if the queue is full. Never raises, never waits."""
        if bounded and self._queue.qsize() >= self._bound:
            self._full.bump()
            return False
        self._queue.put(item)
        if self._thread is None:
            self.start()
        return True

    def start(self) -> None:
        """Start the thread. Since CPython 3.12 an exiting interpreter starts no thread, and exit handlers log too."""
        # A thread that holds the lock is starting the worker; a signal handler that interrupts it must not wait.
        if not self._starting.acquire(blocking=False):
            return
        try:
            if self._thread is not None or self._ended:
                return
            thread = threading.Thread(target=self._run, name=f"exporter-{self._name}", daemon=True)
            thread.start()
            self._thread = thread
        except RuntimeError as error:  # no more threads, none that are daemons, or the interpreter is ending
            log_once(
                f"worker {self._name} thread",
                f"the thread {self._name} cannot start, its items are lost: {error}",
            )
            while not self._queue.empty():
                self._queue.get_nowait()
                self._lose("no_thread", 1)
        finally:
            self._starting.release()

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until all items of the queue are done; returns False after the time and on the worker's own thread."""
        marker = self.mark()
        return marker is None or (
            threading.current_thread() is not self._thread and marker.wait(timeout_seconds)
        )

    def finish(self) -> Callable[[float, str], None]:
        """Let the thread end after the queued items; returns the function that waits, and counts the items left then."""
        marker = self.mark(end=True)

        def wait(timeout_seconds: float, reason: str) -> None:
            if marker is None or threading.current_thread() is self._thread:
                return
            if not marker.wait(timeout_seconds):
                self._abandoned = True  # the thread ends when its function returns
                # Without the marker, with the item of the present call.
                self._lose(reason, max(self._queue.qsize() - 1, 0) + 1)

        return wait

    def mark(self, *, end: bool = False) -> Marker | None:
        """Queue a marker, which is set when all items before are done; returns None if there is no thread."""
        if self._thread is None or self._ended:
            return None
        marker = Marker(end=end)
        self._queue.put(marker)
        return marker

    def _run(self) -> None:
        queue = self._queue
        while True:
            item = queue.get()
            if self._abandoned:
                return
            if not isinstance(item, Marker):
                self._take(item)
                continue
            self._ended = self._ended or item.end
            item.set()
            if item.end:
                return

    def _take(self, item: object) -> None:
        self.busy_since = time()
        try:
            self._handle(item)
            if not self._abandoned:  # an abandoned item was counted as lost
                self.done += 1
        except BaseException as error:  # noqa: BLE001  # the user's code: SystemExit would end the thread too
            self._lose("error", 1)
            log_once(f"worker {self._name}", f"{self._name} has failed: {safe_repr(error)}")
        finally:
            self.busy_since = None

    def _lose(self, reason: str, items: int) -> None:
        # A new dict each time: the recording thread reads the old dict meanwhile.
        self._losses = self._losses | {reason: self._losses.get(reason, 0) + items}


def end_all(workers: Iterable[Worker], *, seconds: float, reason: str) -> None:
    """End several workers within one time."""
    waits = [worker.finish() for worker in workers]
    deadline = monotonic() + seconds
    for wait in waits:
        wait(deadline - monotonic(), reason)
