"""Work that must not run on the web server's loop: worker threads, and the sharing of one result by many.

Used in the sidecar. `Workers` are daemon threads of our own: those of a `ThreadPoolExecutor` are joined when
the interpreter exits, so one hung render would keep the process alive for ever. `Flights` belongs to the loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from exporter.web.counts import Counts

T = TypeVar("T")


class LateError(Exception):
    """The work was not done in time. If it has begun it goes on, and whoever asks again joins it."""


class BusyError(Exception):
    """Too much work is waiting; this was not taken."""


class Job(asyncio.Future[T]):
    """A piece of work and its result.

    Attributes:
        begun: Whether a worker has taken it; before that it can be cancelled.
        waiters: How many requests want it.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self.work: Callable[[], T] | None = work
        self.begun = False
        self.waiters = 0


class Workers:
    """Daemon threads that do one piece of work each at a time, in the order in which it came.

    They are started with the first piece of work.

    Args:
        name: Of the threads.
        count: How many.
        max_waiting: Pieces of work that may wait for a thread.
    """

    def __init__(self, name: str, count: int, *, max_waiting: int = 64) -> None:
        self._names = [f"{name}-{number}" for number in range(count)]
        self._max_waiting = max_waiting
        self._ready = threading.Condition()  # guards the next two
        self._queue: deque[Job[Any]] = deque()
        self._stopping = False
        self._threads: list[threading.Thread] = []

    def submit(self, work: Callable[[], T]) -> Job[T]:
        """Have `work` done; called on the loop, where the job is fulfilled too.

        Raises:
            BusyError: Too much is waiting.
        """
        job = Job(work)
        self.put(job)
        return job

    def put(self, job: Job[Any]) -> None:
        """Have a job done that was made before; as `submit`."""
        with self._ready:
            if len(self._queue) >= self._max_waiting:
                self._queue = deque(each for each in self._queue if not each.done())
                if len(self._queue) >= self._max_waiting:
                    raise BusyError
            self._queue.append(job)
            self._ready.notify()
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._run, name=name, daemon=True) for name in self._names
            ]
            for thread in self._threads:
                thread.start()

    def stop(self) -> None:
        """Let the threads end when they have done what was asked; a hung one is left behind."""
        with self._ready:
            self._stopping = True
            self._ready.notify_all()

    def _take(self) -> Job[Any] | None:
        with self._ready:
            while not self._queue:
                if self._stopping:
                    return None
                self._ready.wait()
            return self._queue.popleft()

    def _run(self) -> None:
        while (job := self._take()) is not None:
            work, job.work, job.begun = job.work, None, True
            if work is None or job.cancelled():  # nobody waits for it any more
                continue
            result, error = None, None
            try:
                result = work()
            except Exception as raised:  # noqa: BLE001 - foreign code; whoever waits is told
                error = raised
            except BaseException as raised:  # noqa: BLE001 - e.g. a panic of bcrypt; the thread must go on
                error = RuntimeError(f"{type(raised).__name__}: {raised}")
            try:
                job.get_loop().call_soon_threadsafe(_settle, job, result, error)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more
            del job, work, result, error  # keep no page alive while waiting for the next


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
        return
    future.set_exception(error)
    future.exception()  # seen: without this a failure that everybody was too late for is logged by asyncio


class Flights:
    """Pieces of work in progress, each of which serves everybody who asks for the same meanwhile.

    A piece of work that hangs stays here: those who ask later join it and are late like the first, instead
    of hanging the next worker.

    Args:
        workers: Who does the work.
        counts: Where it is counted.
    """

    def __init__(self, workers: Workers, counts: Counts) -> None:
        self._workers = workers
        self._counts = counts
        self._flying: dict[Hashable, Job[Any]] = {}

    def join(self, key: Hashable, work: Callable[[], T]) -> Job[T]:
        """The result of the work under way for `key`, which is begun where there is none.

        Raises:
            BusyError: It cannot be begun, as too much is waiting.
        """
        flight = self._flying.get(key)
        if flight is not None:
            self._counts.renders_joined += 1
            return flight
        flight = self._workers.submit(work)
        self._counts.renders += 1
        self._flying[key] = flight
        flight.add_done_callback(lambda _: self._flying.pop(key))
        return flight

    def under_way(self, key: Hashable) -> Job[Any] | None:
        """The work in progress for `key`."""
        return self._flying.get(key)


async def result_by(job: Job[T], deadline: float) -> T:
    """Await a shared job until a time of the loop's clock.

    Being late, or being cancelled (the client was evicted), leaves the job to the others: `asyncio.wait` never cancels
    what it waits for. Where there are no others and it has not begun, it is dropped.

    Raises:
        LateError: The time came first.
    """
    job.waiters += 1
    try:
        if not job.done():
            remaining = deadline - asyncio.get_running_loop().time()
            await asyncio.wait([job], timeout=max(0.0, remaining))
    finally:
        job.waiters -= 1
        if not (job.waiters or job.begun or job.done()):
            job.cancel()
    if not job.done() or job.cancelled():
        raise LateError
    return job.result()
