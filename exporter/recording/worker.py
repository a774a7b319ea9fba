"""Worker threads with a bounded queue, for code of the job and of libraries.

A function that raises, hangs or is slow affects only the items of its queue. Items that the function did not process are counted as
lost, by reason, except items that are put after the thread has ended. A forked child starts with an empty queue.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from itertools import count
from queue import SimpleQueue
from time import monotonic, time
from typing import Any

from exporter.recording.conversion import safe_repr
from exporter.recording.notices import log_once

PROGRESS_SECONDS = 0.25
"""A thread that uses no CPU time for this long makes no progress."""
MAX_EXTENSION_SECONDS = 10.0
"""Maximum time for which a wait for a thread that makes progress is longer than its timeout."""


class Counter:
    """Exact counter for any number of threads, without a lock.

    Attributes:
        bump: Increments the counter by 1, in a single call into C.
    """

    def __init__(self) -> None:
        self._count = count()
        self._bulk_count = 0
        self.bump: Callable[[], int] = self._count.__next__

    def add(self, increment: int) -> None:
        """Increment the counter by a number. Must not be called concurrently."""
        self._bulk_count += increment

    def read(self) -> int:
        """Return the count."""
        # `repr` reads a `count` without incrementing it.
        return int(repr(self._count)[6:-1]) + self._bulk_count


class Marker:
    """Queue item that signals the completion of all earlier items. With `ends_thread`, the thread stops at the marker.

    Not a `threading.Event`: its `wait` holds a lock that `set` needs, also while a signal handler interrupts the wait.
    """

    def __init__(self, *, ends_thread: bool) -> None:
        self.ends_thread = ends_thread
        self._completion = threading.Lock()
        self._completion.acquire()
        self.set = self._completion.release

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until all earlier items are processed. Return False after the timeout."""
        is_complete = self._completion.acquire(timeout=max(timeout_seconds, 0.0))
        if is_complete:
            self._completion.release()
        return is_complete


def wait_while_working(marker: Marker, thread: threading.Thread | None, timeout_seconds: float) -> bool:
    """Wait for a marker until the timeout, and longer while the thread uses CPU time, as on a busy machine.

    Returns False after the timeout if the thread makes no progress, and after `MAX_EXTENSION_SECONDS` more.
    """
    end = monotonic() + timeout_seconds + MAX_EXTENSION_SECONDS
    is_complete = marker.wait(timeout_seconds - PROGRESS_SECONDS)
    while not is_complete and monotonic() < end:
        earlier_seconds = _cpu_seconds(thread)
        is_complete = marker.wait(PROGRESS_SECONDS)
        if _cpu_seconds(thread) == earlier_seconds:
            break
    return is_complete


def _cpu_seconds(thread: threading.Thread | None) -> float:
    """Return the CPU time of a thread; 0 if the system does not tell it."""
    if thread is None or thread.native_id is None or sys.platform != "linux":
        return 0.0
    from time import clock_gettime  # noqa: PLC0415  # not on all systems

    try:
        # The clock of a thread in Linux. Unlike `pthread_getcpuclockid`, an ended thread is an error, not a crash.
        return clock_gettime((~thread.native_id << 3) | 6)
    except OSError:
        return 0.0


class Worker:
    """Thread that calls a function with each item of a queue.

    Attributes:
        processed_items: Number of items for which the function returned before `finish` timed out.
        busy_since: Unix time at which the current call started; None between calls.
    """

    def __init__(self, handle: Callable[[Any], object], *, name: str, bound: int) -> None:
        self._handle, self._name, self._bound = handle, name, bound
        self.after_fork()

    def after_fork(self) -> None:
        """Start with an empty queue and no thread, at construction and in a forked child."""
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._start_lock = threading.Lock()
        self._full_count = Counter()  # items that were not queued, because the queue was full
        self._losses: dict[str, int] = {}  # other lost items by reason
        self._has_ended = False  # True after the thread has stopped at a marker
        self._is_abandoned = False  # True after `finish` has timed out
        self.processed_items = 0
        self.busy_since: float | None = None

    @property
    def is_queue_empty(self) -> bool:
        """True if no item is waiting in the queue. The function may still be processing the last item."""
        return self._queue.empty()

    @property
    def has_final_counts(self) -> bool:
        """True after the end of the thread and after a timeout of `finish`, when the counts no longer change, and before the first item."""
        return self._thread is None or self._has_ended or self._is_abandoned

    def lost_items(self) -> dict[str, int]:
        """Return the number of lost items by reason."""
        full_count = self._full_count.read()
        return self._losses | {"queue_full": full_count} if full_count else dict(self._losses)

    def put(self, item: object, *, is_bounded: bool = True) -> bool:
        """Queue an item. Return False if the queue is full; with *is_bounded* False, queue the item all the same. Never raises or waits."""
        if is_bounded and self._queue.qsize() >= self._bound:
            self._full_count.bump()
            return False
        self._queue.put(item)
        if self._thread is None:
            self.start()
        return True

    def start(self) -> None:
        """Start the thread. If the interpreter refuses, as at exit since CPython 3.12, the queued items are counted as lost."""
        # The holder of the lock starts the thread. A signal handler that interrupts the holder must not wait for the lock.
        if not self._start_lock.acquire(blocking=False):
            return
        try:
            if self._thread is not None or self._has_ended:
                return
            thread = threading.Thread(target=self._run, name=f"exporter-{self._name}", daemon=True)
            thread.start()
            self._thread = thread
        except RuntimeError as error:  # the limit of threads is reached, or the interpreter exits
            log_once(
                f"worker {self._name} thread",
                f"the thread {self._name} cannot start, and its items are lost: {error}",
            )
            while not self._queue.empty():
                self._queue.get_nowait()
                self._count_loss("no_thread", 1)
        finally:
            self._start_lock.release()

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until all queued items are processed. Return False after the timeout, and on the worker's own thread."""
        marker = self.mark()
        return marker is None or (
            threading.current_thread() is not self._thread and marker.wait(timeout_seconds)
        )

    def finish(self, *, is_extended: bool = False) -> Callable[[float, str], None]:
        """End the thread after the queued items, and return a function that waits for the end.

        With *is_extended*, the wait is longer while the thread makes progress. If the wait times out, the remaining items are counted as lost.
        """
        marker = self.mark(ends_thread=True)

        def wait(timeout_seconds: float, reason: str) -> None:
            if marker is None or threading.current_thread() is self._thread:
                return
            is_complete = (
                wait_while_working(marker, self._thread, timeout_seconds)
                if is_extended
                else marker.wait(timeout_seconds)
            )
            if not is_complete:
                self._is_abandoned = True  # the thread ends when its function returns
                # The queue contains the marker, and does not contain the item of the current call.
                self._count_loss(reason, max(self._queue.qsize() - 1, 0) + 1)

        return wait

    def mark(self, *, ends_thread: bool = False) -> Marker | None:
        """Queue a marker and return it. Return None before the start and after the end of the thread."""
        if self._thread is None or self._has_ended:
            return None
        marker = Marker(ends_thread=ends_thread)
        self._queue.put(marker)
        return marker

    def _run(self) -> None:
        """Process items until a marker with `ends_thread`, or until `finish` has timed out. Runs on the worker's thread."""
        queue = self._queue
        while True:
            item = queue.get()
            if self._is_abandoned:
                return
            if not isinstance(item, Marker):
                self._process(item)
                continue
            self._has_ended = self._has_ended or item.ends_thread
            item.set()
            if item.ends_thread:
                return

    def _process(self, item: object) -> None:
        """Call the function with an item, and count the result. Never raises."""
        self.busy_since = time()
        try:
            self._handle(item)
            if not self._is_abandoned:  # otherwise `finish` has counted the item as lost
                self.processed_items += 1
        except BaseException as error:  # noqa: BLE001  # SystemExit in the function must not end the thread
            if not self._is_abandoned:
                self._count_loss("error", 1)
            log_once(f"worker {self._name}", f"{self._name} has failed: {safe_repr(error)}")
        finally:
            self.busy_since = None

    def _count_loss(self, reason: str, items: int) -> None:
        # A new dict, because the recording thread may be reading the current dict.
        self._losses = self._losses | {reason: self._losses.get(reason, 0) + items}


def end_all(workers: Iterable[Worker], *, seconds: float, reason: str) -> None:
    """End workers within a common timeout, and count their remaining items as lost for the reason."""
    waits = [worker.finish() for worker in workers]
    deadline = monotonic() + seconds
    for wait in waits:
        wait(deadline - monotonic(), reason)
