"""Scheduler: runs every collector on its own interval, with its own deadline, in a daemon thread of its own.

A watchdog gives the verdict 0 to what is past its deadline and withdraws a block when nothing was published for
`max(3 intervals, interval + deadline)`: a gap instead of a frozen value. A collector is never called while its previous
call has not returned, not even after it was removed and added.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from exporter.collectors.status import CollectorStatus, Totals, status_families
from exporter.errors import CollectError, StartError
from exporter.families import AnyCollector, Collected

LOG = logging.getLogger("exporter.collectors")

WATCH_SECONDS = 0.25
"""How often the watchdog looks."""

EASE_SECONDS = 5.0
"""How far the passes of a collector that eases may be apart: as far as most others' are."""

Problems = Sequence[tuple[str, str]]
"""(reason, message) of what failed."""


@dataclass(slots=True, eq=False)
class _Task:
    """A collector's name with its thread, over whatever is scheduled under it; guarded by the scheduler's lock."""

    name: str
    wake: threading.Condition
    collector: AnyCollector | None = None  # None while there is none
    interval_seconds: float = 0.0
    deadline_seconds: float = 0.0
    eases: bool = False
    totals: Totals = field(default_factory=Totals)
    delivery: threading.Lock = field(default_factory=threading.Lock)  # around publishing and withdrawing
    thread: threading.Thread | None = None
    due: float = -math.inf
    running_since: float | None = None
    expired: bool = False
    published_at: float | None = None
    published_by: AnyCollector | None = None
    problems: Problems | None = None  # of the last pass; None before the first has ended
    duration_seconds: float | None = None  # of the last pass that returned
    unsupported: tuple[str, ...] = ()
    told: set[str] = field(default_factory=set)

    def schedule(self, collector: AnyCollector, interval: float, deadline: float, *, eases: bool) -> None:
        """Begin with a collector; the counters of the name go on."""
        self.collector, self.eases = collector, eases
        self.interval_seconds, self.deadline_seconds = interval, deadline
        self.due, self.duration_seconds, self.unsupported = -math.inf, None, ()
        self.told.clear()
        hangs = self.expired and self.running_since is not None
        self.problems = [("timeout", "a previous pass has not returned")] if hangs else None

    def next_due(self, origin: float, now: float, unwatched_seconds: float) -> float:
        """Find the next moment of a grid that all of one interval share; not so early that a rate over it is noise."""
        interval = self.interval_seconds
        due = origin + (math.floor((now - origin) / interval) + 1) * interval
        if due - now < interval / 2:
            due += interval
        if self.eases:
            spare = now + min(unwatched_seconds, EASE_SECONDS) - due
            due += max(0, math.floor(spare / interval)) * interval
        return due

    def is_late(self, now: float) -> bool:
        """Whether the pass under way is past its deadline."""
        return self.running_since is not None and now - self.running_since >= self.deadline_seconds

    def is_stale(self, now: float) -> bool:
        """Whether the published block is too old to be shown, or of a collector that was removed."""
        interval = max(self.interval_seconds, EASE_SECONDS if self.eases else 0.0)
        longest = max(3 * interval, interval + self.deadline_seconds)
        late = self.published_at is not None and now - self.published_at >= longest
        return late or self.published_by is not self.collector

    def note_unsupported(self, unsupported: Sequence[str]) -> None:
        self.unsupported = tuple(unsupported)
        for what in dict.fromkeys(unsupported):
            if what not in self.told:
                self.told.add(what)
                LOG.info("collector %s: %s", self.name, what)

    def judge(self, problems: Problems) -> None:
        """Pass the verdict on a pass; a change of state is told once, the same reasons in other words are none."""
        before, self.problems = self.problems, tuple(problems)
        reasons = {reason for reason, _ in problems}
        for reason in reasons:
            self.totals.errors[reason] = self.totals.errors.get(reason, 0) + 1
        if not problems:
            self.totals.last_success = time.time()
            if before:
                LOG.info("collector %s works again", self.name)
        elif before is None or {reason for reason, _ in before} != reasons:
            LOG.warning("collector %s fails: %s", self.name, _message(problems))

    def status(self, now: float) -> CollectorStatus:
        running, problems = self.running_since, self.problems or ()
        return CollectorStatus(
            name=self.name,
            success=None if self.problems is None else not problems,
            reason=",".join(sorted({reason for reason, _ in problems})),
            message=_message(problems),
            age_seconds=None if self.published_at is None else now - self.published_at,
            last_success=self.totals.last_success,
            duration_seconds=now - running if running and self.is_late(now) else self.duration_seconds,
            interval_seconds=self.interval_seconds,
            deadline_seconds=self.deadline_seconds,
            running=running is not None,
            unsupported=self.unsupported,
        )


class Scheduler:
    """Calls collectors in the background; `unwatched` says for how many seconds nobody will look, 0 where unknown."""

    def __init__(
        self,
        *,
        publish: Callable[[str, Sequence[Metric]], None],
        withdraw: Callable[[str], None],
        unwatched: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._publish = publish
        self._withdraw = withdraw
        self._unwatched = unwatched
        self._lock = threading.Lock()  # everything below; never held while foreign code runs
        self._origin = time.monotonic()
        self._tasks: dict[str, _Task] = {}  # by name, also those that were removed
        self._watchdog = threading.Thread(target=self._watch, name="exporter-watchdog", daemon=True)
        self._started = False
        self._stopping = threading.Event()

    def add(
        self,
        collector: AnyCollector,
        *,
        interval_seconds: float,
        deadline_seconds: float,
        eases: bool = False,
    ) -> None:
        """Schedule a collector, at once or when the scheduler starts; raises ValueError where the name is taken.

        The counters of a name continue when it was there before. One that eases is called less often while the next
        scrape is known to be far: what it would publish is replaced before anybody sees it.
        """
        with self._lock:
            task = self._tasks.setdefault(
                collector.name, _Task(collector.name, threading.Condition(self._lock))
            )
            if task.collector is not None:
                raise ValueError(f"a collector {task.name} is already scheduled")
            task.schedule(collector, interval_seconds, deadline_seconds, eases=eases)
            if self._started and task.thread is None:
                self._start_task(task)
            task.wake.notify()

    def remove(self, name: str) -> None:
        """End a collector's schedule and withdraw its block; a pass under way ends in nothing."""
        with self._lock:
            task = self._tasks.get(name)
            if task is None:
                return
            task.collector = None
        self._take_back(task)

    def start(self) -> None:
        """Begin; to be called once; raises StartError: the system gives no threads."""
        with self._lock:
            started = [self._start_task(task) for task in self._scheduled()]
            self._started = True
        try:
            self._watchdog.start()
        except RuntimeError:
            started.append(False)
        if not all(started):
            self.stop()
            raise StartError(
                f"{len(started)} threads are needed for the collectors and {sum(started)} could be started; raise "
                "the limit of processes (ulimit -u, pids.max) or of memory (ulimit -v), or switch collectors off"
            )

    def stop(self, timeout_seconds: float = 2.0) -> None:
        """End, waiting at most so long; a collector that hangs is left behind in its daemon thread.

        Nothing is published after this, and nothing is withdrawn: the last blocks stay for the last scrape.
        """
        self._stopping.set()
        with self._lock:
            for task in self._tasks.values():
                task.wake.notify()
            threads = [self._watchdog, *(task.thread for task in self._tasks.values())]
        end = time.monotonic() + timeout_seconds
        for thread in threads:
            if thread is not None and thread.ident is not None:
                thread.join(max(0.0, end - time.monotonic()))

    def run_soon(self, name: str) -> None:
        """Collect now, or as soon as the present pass has ended; nothing for a name that is not there."""
        with self._lock:
            for task in self._scheduled():
                if task.name == name:
                    task.due = -math.inf
                    task.wake.notify()

    def statuses(self) -> Sequence[CollectorStatus]:
        """Describe all collectors, in the order of their names."""
        with self._lock:
            now = time.monotonic()
            return [task.status(now) for task in self._scheduled()]

    def families(self) -> Sequence[Metric]:
        """Make the families about the collectors."""
        with self._lock:
            now = time.monotonic()
            return status_families((task.status(now), task.totals) for task in self._scheduled())

    def _scheduled(self) -> list[_Task]:
        return [task for _, task in sorted(self._tasks.items()) if task.collector is not None]

    def _start_task(self, task: _Task) -> bool:
        thread = threading.Thread(target=self._run, args=(task,), name="exporter-collect", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # a limit on processes or memory
            task.problems = [("internal", "the system gives no thread")]
            return False
        task.thread = thread
        return True

    def _run(self, task: _Task) -> None:
        while True:
            with self._lock:
                while not self._stopping.is_set():
                    seconds = math.inf if task.collector is None else task.due - time.monotonic()
                    if seconds <= 0:
                        break
                    task.wake.wait(min(seconds, threading.TIMEOUT_MAX))
                collector = task.collector
                if collector is None or self._stopping.is_set():
                    return
                now = task.running_since = time.monotonic()
                task.expired = False
                task.due = math.inf  # until the pass has ended, or somebody wants another one
            self._pass(task, collector, now)
            unwatched_seconds = self._unwatched() if task.eases else 0.0
            with self._lock:
                task.due = min(task.due, task.next_due(self._origin, now, unwatched_seconds))

    def _pass(self, task: _Task, collector: AnyCollector, began: float) -> None:
        families: Sequence[Metric] = ()
        problems: list[tuple[str, str]] = []
        unsupported: list[str] = []
        try:
            # What comes from a collector is taken apart here, where a fault in it is still its own.
            collected = collector.collect()
            families = tuple(map(_checked, collected))
            if isinstance(collected, Collected):
                problems, unsupported = [*collected.problems], collected.unsupported
        except CollectError as error:
            problems = [(error.reason, str(error))]
        except (Exception, SystemExit) as error:  # noqa: BLE001 - border to the collectors: a fault in one costs only itself
            problems = [_unexpected(error)]
        with task.delivery:
            with self._lock:
                wanted = not (task.expired or task.collector is not collector or self._stopping.is_set())
            published = wanted and bool(families or not problems)
            if published:
                try:
                    self._publish(task.name, families)
                except Exception as error:  # noqa: BLE001 - border to the page: a block it cannot take is the collector's failure
                    published = False
                    problems.append(_unexpected(error))
            with self._lock:
                now = time.monotonic()
                task.running_since = None
                task.duration_seconds = now - began
                task.totals.duration_seconds += task.duration_seconds
                if published:
                    task.published_at, task.published_by = now, collector
                    task.note_unsupported(unsupported)
                if wanted and not task.expired:
                    task.judge(problems)
        if task.collector is not collector:
            self._take_back(task)

    def _take_back(self, task: _Task) -> None:
        """Withdraw the block of a task that is stale, unless a new one is just coming."""
        if task.delivery.acquire(blocking=False):
            try:
                with self._lock:
                    if task.published_at is None or not task.is_stale(time.monotonic()):
                        return
                    task.published_at = None
                if not self._stopping.is_set():
                    self._withdraw(task.name)
            finally:
                task.delivery.release()

    def _watch(self) -> None:
        while not self._stopping.wait(WATCH_SECONDS):
            with self._lock:
                now, tasks = time.monotonic(), self._scheduled()
                for task in tasks:
                    if task.is_late(now) and not task.expired:
                        task.expired = True
                        task.totals.timeouts += 1
                        task.judge([("timeout", f"no result after {task.deadline_seconds:g} s")])
            for task in tasks:
                if task.is_stale(now):
                    self._take_back(task)


def _checked(metric: Metric) -> Metric:
    if not isinstance(metric, Metric):
        raise TypeError(f"a collector gives metric families, not {type(metric).__name__}")
    return metric


def _message(problems: Problems) -> str:
    return "; ".join(f"{message} ({reason})" for reason, message in problems)


def _unexpected(error: BaseException) -> tuple[str, str]:
    """Give class and message, also of an exception that cannot be printed."""
    LOG.debug("the failure in full", exc_info=error)
    return "internal", "".join(traceback.format_exception_only(error)).strip()
