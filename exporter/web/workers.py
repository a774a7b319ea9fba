"""Worker threads for jobs that would block the event loop, with a shared result for equal requests.

`ThreadPoolExecutor` is not used, because Python joins its threads at exit: a hung render would prevent the exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


class LateError(Exception):
    """Missed deadline of a request. A started job continues, and a later request with the same key waits for it."""


class BusyError(Exception):
    """Request that is refused because too many jobs are queued."""


@dataclass(eq=False, slots=True)
class _Job:
    """Queued or running call of `work`, and the requests that wait for its result."""

    key: Hashable
    work: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    waiters: set[asyncio.Future[Any]] = field(default_factory=set)  # one for each waiting request


class Workers:
    """Daemon threads that run jobs in the order of the requests. A thread is started if no thread is idle.

    Only the event loop changes the tables and counts, so that they need no lock; the threads call `_work`.
    """

    def __init__(self, name: str, max_threads: int = 1, *, max_waiting: int = 64) -> None:
        self._name = name
        self._max_threads = max_threads
        self._thread_count = self._idle_thread_count = 0
        self._max_waiting = max_waiting
        self._jobs: dict[Hashable, _Job] = {}  # queued or running
        self._queue: dict[Hashable, _Job] = {}  # queued
        self._started_jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

    async def run(self, key: Hashable, work: Callable[[], T], deadline: float) -> T:
        """Run `work` on a thread, or join the job with the same key, and return the result.

        `deadline` is a time of the event loop's clock. A queued job without waiting requests is discarded. Raises BusyError
        and LateError.
        """
        loop = asyncio.get_running_loop()
        job = self._jobs.get(key)
        if job is None:
            if len(self._queue) >= self._max_waiting:
                raise BusyError
            job = self._jobs[key] = self._queue[key] = _Job(key, work, loop)
        waiter: asyncio.Future[T] = loop.create_future()
        job.waiters.add(waiter)
        timer = loop.call_at(deadline, _expire, waiter)
        try:
            self._start_jobs()
            return await waiter
        finally:
            timer.cancel()
            # The job continues for other requests after a timeout or a cancellation.
            job.waiters.discard(waiter)
            if not job.waiters and self._queue.get(key) is job:
                del self._queue[key], self._jobs[key]

    def stop(self) -> None:
        """End the threads after their current work. A hung thread is abandoned."""
        for _ in range(self._thread_count):
            self._started_jobs.put(None)

    def _start_jobs(self) -> None:
        """Pass queued jobs to the threads while a thread is idle or can be started. Raises RuntimeError if it cannot be started."""
        while self._queue and (self._idle_thread_count or self._thread_count < self._max_threads):
            if self._idle_thread_count:
                self._idle_thread_count -= 1
            else:
                name = f"{self._name}-{self._thread_count}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
                self._thread_count += 1
            self._started_jobs.put(self._queue.pop(next(iter(self._queue))))

    def _work(self) -> None:
        """Run jobs on a thread until `stop`, and pass each result to the event loop."""
        while (job := self._started_jobs.get()) is not None:
            result, error = None, None
            try:
                result = job.work()
            except Exception as raised:  # noqa: BLE001 - the waiting requests receive the error
                error = raised
            except BaseException as raised:  # noqa: BLE001 - such as a panic of bcrypt; the thread must continue
                error = RuntimeError(f"{type(raised).__name__}: {raised}")
            with contextlib.suppress(RuntimeError):  # the loop is closed
                job.loop.call_soon_threadsafe(self._finish, job, result, error)
            del job, result, error  # a page must not stay in memory between jobs

    def _finish(self, job: _Job, result: object, error: Exception | None) -> None:
        """Pass the result or the error of a job to the waiting requests, on the event loop."""
        self._idle_thread_count += 1
        del self._jobs[job.key]
        for waiter in job.waiters:
            if waiter.done():  # cancelled or expired
                continue
            if error is None:
                waiter.set_result(result)
            else:
                waiter.set_exception(error)
        self._start_jobs()


def _expire(waiter: asyncio.Future[Any]) -> None:
    """Raise LateError in a request that still waits at its deadline."""
    if not waiter.done():
        waiter.set_exception(LateError())
