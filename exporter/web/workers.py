"""Work that must not run on the web server's loop: daemon threads, and one result for all who ask for the same.

Not a `ThreadPoolExecutor`, whose threads are joined at exit: one hung render would keep the process alive forever.
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
    """The work was not done in time. If it has begun it goes on, and whoever asks again joins it."""


class BusyError(Exception):
    """Too much work is waiting; this was not taken."""


@dataclass(eq=False, slots=True)
class _Job:
    key: Hashable
    work: Callable[[], Any]
    result: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    waiters: int = 0


class Workers:
    """Daemon threads that work in the order of the requests; they are started with the first piece of work."""

    def __init__(self, name: str, threads: int = 1, *, max_waiting: int = 64) -> None:
        self._name = name
        self._idle = self._count = threads
        self._max_waiting = max_waiting
        self._jobs: dict[Hashable, _Job] = {}  # asked for and not done
        self._waiting: dict[Hashable, _Job] = {}  # those of them for which there was no thread yet
        self._begun: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._started = False

    async def run(self, key: Hashable, work: Callable[[], T], deadline: float) -> T:
        """Have `work` done, or share what is being done for `key`, until a time of the loop's clock.

        One that hangs is joined by those who ask later; one that nobody waits for is not begun. Raises BusyError and LateError.
        """
        job = self._jobs.get(key)
        if job is None:
            if len(self._waiting) >= self._max_waiting:
                raise BusyError
            job = self._jobs[key] = self._waiting[key] = _Job(key, work)
        job.waiters += 1
        try:
            self._begin()
            # Being late or cancelled leaves the job to the others: `wait` never cancels what it waits for.
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
        """Let the threads end when they have done what they have begun; a hung one is left behind."""
        for _ in range(self._count):
            self._begun.put(None)

    def _begin(self) -> None:
        if not self._started:
            for number in range(self._count):
                threading.Thread(target=self._work, name=f"{self._name}-{number}", daemon=True).start()
            self._started = True
        while self._idle and self._waiting:
            self._idle -= 1
            self._begun.put(self._waiting.pop(next(iter(self._waiting))))

    def _work(self) -> None:
        while (job := self._begun.get()) is not None:
            result, error = None, None
            try:
                result = job.work()
            except Exception as raised:  # noqa: BLE001 - foreign code; whoever waits is told
                error = raised
            except BaseException as raised:  # noqa: BLE001 - e.g. a panic of bcrypt; the thread must go on
                error = RuntimeError(f"{type(raised).__name__}: {raised}")
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                job.result.get_loop().call_soon_threadsafe(self._finish, job, result, error)
            del job, result, error  # keep no page alive while waiting for the next

    def _finish(self, job: _Job, result: object, error: Exception | None) -> None:
        self._idle += 1
        del self._jobs[job.key]
        if error is None:
            job.result.set_result(result)
        else:
            job.result.set_exception(error)
            job.result.exception()  # seen: asyncio logs a failure that everybody was too late for
        self._begin()
