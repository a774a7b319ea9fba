"""Worker threads of the web server: work that would block the loop, with a shared result for equal requests.

Not a `ThreadPoolExecutor`, because the threads are joined at exit and a hung render would prevent the exit.
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
    """Work that missed its deadline; started work continues, and a later request joins the work."""


class BusyError(Exception):
    """Work that was refused because too many jobs are queued."""


@dataclass(eq=False, slots=True)
class _Job:
    key: Hashable
    work: Callable[[], Any]
    result: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    waiters: int = 0


class Workers:
    """Daemon threads that work in the order of the requests; a thread is started when no other is idle."""

    def __init__(self, name: str, threads: int = 1, *, max_waiting: int = 64) -> None:
        self._name = name
        self._threads = threads
        self._started = self._idle = 0
        self._max_waiting = max_waiting
        self._jobs: dict[Hashable, _Job] = {}  # requested and not done
        self._waiting: dict[Hashable, _Job] = {}  # requested and not started
        self._begun: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

    async def run(self, key: Hashable, work: Callable[[], T], deadline: float) -> T:
        """Run `work` on a thread, or join running work with the same key, until a time of the loop's clock.

        Work that no request waits for any more is not begun. Raises BusyError and LateError.
        """
        job = self._jobs.get(key)
        if job is None:
            if len(self._waiting) >= self._max_waiting:
                raise BusyError
            job = self._jobs[key] = self._waiting[key] = _Job(key, work)
        job.waiters += 1
        try:
            self._begin()
            # A late or cancelled request leaves the job running for other requests: `wait` never cancels the future.
            timeout = max(0.0, deadline - asyncio.get_running_loop().time())
            await asyncio.wait([job.result], timeout=timeout)
        finally:
            job.waiters -= 1
            if not job.waiters and self._waiting.get(key) is job:
                del self._waiting[key], self._jobs[key]
        if not job.result.done():
            raise LateError
        result: T = job.result.result()
        return result

    def stop(self) -> None:
        """Let the threads end after their present work; a hung thread is abandoned."""
        for _ in range(self._started):
            self._begun.put(None)

    def _begin(self) -> None:
        while self._waiting and (self._idle or self._started < self._threads):
            if self._idle:
                self._idle -= 1
            else:
                name = f"{self._name}-{self._started}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
                self._started += 1
            self._begun.put(self._waiting.pop(next(iter(self._waiting))))

    def _work(self) -> None:
        while (job := self._begun.get()) is not None:
            result, error = None, None
            try:
                result = job.work()
            except Exception as raised:  # noqa: BLE001 - foreign code; the requests that wait get the error
                error = raised
            except BaseException as raised:  # noqa: BLE001 - e.g. a panic of bcrypt; the thread must continue
                error = RuntimeError(f"{type(raised).__name__}: {raised}")
            with contextlib.suppress(RuntimeError):  # the loop is closed
                job.result.get_loop().call_soon_threadsafe(self._finish, job, result, error)
            del job, result, error  # do not hold a page between jobs

    def _finish(self, job: _Job, result: object, error: Exception | None) -> None:
        self._idle += 1
        del self._jobs[job.key]
        if error is None:
            job.result.set_result(result)
        else:
            job.result.set_exception(error)
            job.result.exception()  # retrieved: asyncio logs an error that every request was too late for
        self._begin()
