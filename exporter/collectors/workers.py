"""Workers: the threads that make the scheduler's calls; more of them while calls hang.

Used in the sidecar by the scheduler, whose lock they share: every method is called with it held, and foreign code runs
without it. A call that hangs keeps its worker, so workers are added while calls wait and end when they are too many.
All are daemons: none of them can keep the sidecar from ending.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable

from exporter.collectors.task import Call

SPARE_WORKERS = 2
"""Workers that stay although there is nothing to do; beyond them, only calls that hang keep one."""

PATIENCE_SECONDS = 0.02
"""How long a call may wait for a worker before one more is started: far above the usual call's duration."""

RETRY_SECONDS = 1.0
"""When to try again after the system refused a thread."""


class Workers:
    """A queue of calls and the threads that work on it.

    Args:
        lock: The scheduler's.
        carry_out: Makes a call; takes the lock itself.
        max_workers: Threads at most.
    """

    def __init__(self, lock: threading.Lock, carry_out: Callable[[Call], None], *, max_workers: int) -> None:
        self._lock = lock
        self._carry_out = carry_out
        self._max_workers = max_workers
        self._work = threading.Condition(lock)
        self._queue: deque[Call] = deque()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._grow_after = -math.inf
        self._stopping = False

    def __len__(self) -> int:
        return len(self._threads)

    @property
    def busy(self) -> bool:
        """Whether calls wait; may be asked without the lock."""
        return bool(self._queue)

    def start(self, now: float) -> None:
        """Begin with the spare ones."""
        for _ in range(SPARE_WORKERS):
            self._add(now)

    def stop(self) -> list[threading.Thread]:
        """Drop what waits and end; gives the threads, of which some may hang."""
        self._stopping = True
        self._queue.clear()
        self._work.notify_all()
        return list(self._threads)

    def put(self, call: Call) -> None:
        """Have a call made."""
        self._queue.append(call)
        self._work.notify()

    def take_back(self, call: Call) -> bool:
        """Take back a call that has not begun; whether that was so."""
        if call not in self._queue:
            return False
        self._queue.remove(call)
        return True

    def grow(self, now: float) -> None:
        """Add workers for the calls that have waited for long."""
        waiting = sum(1 for call in self._queue if call.queued_at + PATIENCE_SECONDS <= now)
        for _ in range(min(waiting, self._max_workers - len(self._threads))):
            if not self._add(now):
                return

    def grows_at(self) -> float:
        """Tell when `grow` will have something to do if nothing happens; infinity for never."""
        if not self._queue or len(self._threads) >= self._max_workers:
            return math.inf
        return max(self._queue[0].queued_at + PATIENCE_SECONDS, self._grow_after)

    def _add(self, now: float) -> bool:
        if now < self._grow_after:
            return False
        thread = threading.Thread(target=self._work_on, name="exporter-collect", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # The system has no thread for us (a limit on pids); calls wait for the workers that there are.
            self._grow_after = now + RETRY_SECONDS
            return False
        self._threads.add(thread)
        return True

    def _work_on(self) -> None:
        while True:
            with self._lock:
                while not self._queue:
                    if self._stopping or self._idle >= SPARE_WORKERS:
                        self._threads.discard(threading.current_thread())
                        return
                    self._idle += 1
                    self._work.wait()
                    self._idle -= 1
                call = self._queue.popleft()
            self._carry_out(call)
