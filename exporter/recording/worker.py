"""Worker: one daemon thread with a bounded queue, for code that is not ours; and the handle of a handler, which is one.

What it calls may raise, hang or be slow, which costs its own items, counted by reason. A forked child's begins anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import count
from queue import SimpleQueue
from time import monotonic, time
from typing import Any

from exporter.recording.conversion import safe_repr
from exporter.recording.notices import tell_once


class Counter:
    """Counts from any number of threads without a lock, exactly.

    Attributes:
        bump: Count one more; gives the number of those before it. One call into C.
    """

    def __init__(self) -> None:
        self._count = count()
        self._many = 0
        self.bump: Callable[[], int] = self._count.__next__

    def add(self, number: int) -> None:
        """Count so many more; by one thread at a time."""
        self._many += number

    def read(self) -> int:
        """Give the count."""
        return int(repr(self._count)[6:-1]) + self._many  # the only way to look without taking a number


class Marker:
    """What is put into a queue to learn when all before it was taken; `end` asks the thread to stop there.

    No `threading.Event`: a signal handler that interrupts its `wait` leaves it locked against `set`.
    """

    def __init__(self, *, end: bool) -> None:
        self.end = end
        self._waits = threading.Lock()
        self._waits.acquire()
        self.set = self._waits.release

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until all before it was taken; False where that takes longer."""
        taken = self._waits.acquire(timeout=max(timeout_seconds, 0.0))
        if taken:
            self._waits.release()
        return taken


class Worker:
    """Gives items to a function, on a thread of its own.

    Attributes:
        done: Items that were taken.
        busy_since: Unix time at which the item under way was begun; None while it waits for one.
    """

    def __init__(self, handle: Callable[[Any], object], *, name: str, bound: int) -> None:
        self._handle, self._name, self._bound = handle, name, bound
        self.after_fork()

    def after_fork(self) -> None:
        """Begin anew: what waits belongs to the parent, and so does the thread."""
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
        """Whether nothing waits."""
        return self._queue.empty()

    @property
    def over(self) -> bool:
        """Whether it takes no more, so that its counts are final; once it has been ended."""
        return self._thread is None or self._ended or self._abandoned

    def lost(self) -> dict[str, int]:
        """Items that it missed, by reason; by the thread that publishes."""
        full = self._full.read()
        return self._losses | {"queue_full": full} if full else dict(self._losses)

    def put(self, item: object, *, bounded: bool = True) -> bool:
        """Hand over one item if there is room for it, which it tells; never raises, never waits."""
        if bounded and self._queue.qsize() >= self._bound:
            self._full.bump()
            return False
        self._queue.put(item)
        if self._thread is None:
            self.start()
        return True

    def start(self) -> None:
        """Start the thread: an interpreter that ends starts no more since CPython 3.12, and exit handlers log, too."""
        # Whoever holds the lock is starting the thread; a signal handler that interrupts it must not wait for it.
        if not self._starting.acquire(blocking=False):
            return
        try:
            if self._thread is not None or self._ended:
                return
            thread = threading.Thread(target=self._run, name=f"exporter-{self._name}", daemon=True)
            thread.start()
            self._thread = thread
        except RuntimeError as error:  # no more threads, none that are daemons, or the interpreter is ending
            tell_once(f"worker {self._name} thread", f"{self._name} loses what it is to do: {error}")
            while not self._queue.empty():
                self._queue.get_nowait()
                self._lose("no_thread", 1)
        finally:
            self._starting.release()

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until everything that waits now was taken; False if that takes longer, and on the worker's own thread."""
        marker = self.mark()
        return marker is None or (
            threading.current_thread() is not self._thread and marker.wait(timeout_seconds)
        )

    def finish(self) -> Callable[[float, str], None]:
        """Ask the thread to end after what waits now; gives what waits for that and counts what was not taken by then."""
        marker = self.mark(end=True)

        def wait(timeout_seconds: float, reason: str) -> None:
            if marker is None or threading.current_thread() is self._thread:
                return
            if not marker.wait(timeout_seconds):
                self._abandoned = True  # the thread takes no more, whenever its function returns
                # Without the marker, with the one that it hangs in.
                self._lose(reason, max(self._queue.qsize() - 1, 0) + 1)

        return wait

    def mark(self, *, end: bool = False) -> Marker | None:
        """Put a marker after what waits now, set when all of that was taken; None where nothing waits."""
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
            if not self._abandoned:  # else it was counted as lost when nobody could wait any longer
                self.done += 1
        except BaseException as error:  # noqa: BLE001  # the user's code: SystemExit would end the thread, too
            self._lose("error", 1)
            tell_once(f"worker {self._name}", f"{self._name} has failed: {safe_repr(error)}")
        finally:
            self.busy_since = None

    def _lose(self, reason: str, items: int) -> None:
        # A new dict each time: the recording thread reads it while this one writes.
        self._losses = self._losses | {reason: self._losses.get(reason, 0) + items}


def end_all(workers: Iterable[Worker], *, seconds: float, reason: str) -> None:
    """End several of them; they share the time."""
    waits = [worker.finish() for worker in workers]
    deadline = monotonic() + seconds
    for wait in waits:
        wait(deadline - monotonic(), reason)
