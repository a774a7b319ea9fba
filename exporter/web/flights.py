"""Work that must not run on the web server's loop: worker threads, and the sharing of one result by many.

Used in the sidecar. `Workers` are daemon threads of our own: those of a `ThreadPoolExecutor` are joined when
the interpreter exits, so one hung render would keep the process alive for ever. `Flights` belongs to the loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable
from queue import SimpleQueue
from typing import Any, TypeVar

from exporter.web.counts import Counts

T = TypeVar("T")


class LateError(Exception):
    """The work was not done in time; it goes on, and whoever asks again joins it."""


class Workers:
    """Daemon threads that do one piece of work each at a time, in the order in which it came.

    They are started with the first piece of work.

    Args:
        name: Of the threads.
        count: How many.
    """

    def __init__(self, name: str, count: int) -> None:
        self._names = [f"{name}-{number}" for number in range(count)]
        self._queue: SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Have `work` done; called on the loop, where the future is fulfilled too."""
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._run, name=name, daemon=True) for name in self._names
            ]
            for thread in self._threads:
                thread.start()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.put((future, work))
        return future

    def stop(self) -> None:
        """Let the threads end when they have done what was asked; a hung one is left behind."""
        for _ in self._threads:
            self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            future, work = item
            result, error = None, None
            try:
                result = work()
            except Exception as raised:  # noqa: BLE001 - foreign code; whoever waits is told
                error = raised
            except BaseException as raised:  # noqa: BLE001 - e.g. a panic of bcrypt; the thread must go on
                error = RuntimeError(f"{type(raised).__name__}: {raised}")
            try:
                future.get_loop().call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more
            del future, work, item, result, error  # keep no page alive while waiting for the next


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
        self._flying: dict[Hashable, asyncio.Future[Any]] = {}

    def join(self, key: Hashable, work: Callable[[], T]) -> asyncio.Future[T]:
        """The result of the work under way for `key`, which is begun where there is none."""
        flight = self._flying.get(key)
        if flight is not None:
            self._counts.renders_joined += 1
            return flight
        flight = self._workers.submit(work)
        self._counts.renders += 1
        self._flying[key] = flight
        flight.add_done_callback(lambda _: self._flying.pop(key))
        return flight

    def under_way(self, key: Hashable) -> asyncio.Future[Any] | None:
        """The work in progress for `key`."""
        return self._flying.get(key)


async def result_by(future: asyncio.Future[T], deadline: float) -> T:
    """Await a shared future until a time of the loop's clock.

    Being late, or being cancelled (the client was evicted), leaves the future to the others: `asyncio.wait`
    never cancels what it waits for, which is what `wait_for(shield(...))` gives too, without its races of
    Python 3.10 and 3.11 and its two kinds of TimeoutError.

    Raises:
        LateError: The time came first.
    """
    if not future.done():
        remaining = deadline - asyncio.get_running_loop().time()
        await asyncio.wait([future], timeout=max(0.0, remaining))
    if not future.done():
        raise LateError
    return future.result()
