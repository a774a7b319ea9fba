"""Scheduler: runs every collector on its own interval, with its own deadline, away from the scrape.

Used in the sidecar. Threads: one daemon a collector, which calls it and publishes what it gave, so that a collector, or a
publication, that hangs costs itself only; and a watchdog, which gives the verdict 0 to what is past its deadline and
withdraws a block when nothing was published for `max(3 intervals, interval + deadline)`: a gap instead of a frozen
value. A collector is never called while its previous call has not returned, not even after it was removed and added.
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

STANDSTILL_SECONDS = 1.0
"""Waking up later by more than this is a standstill, a stopped or suspended process: no missed deadline."""

EASE_SECONDS = 5.0
"""How far the passes of a collector that eases may be apart: as far as most others' are."""

MAX_TOLD_PROBLEMS = 5
"""How many problems a log line names."""

Problems = Sequence[tuple[str, str]]
"""(reason, message) of what failed."""
Lines = list[tuple[int, str]]
"""Level and text of lines for the log; made under the lock, written after it."""


@dataclass(slots=True, eq=False)
class _Task:
    """One scheduled collector; guarded by the scheduler's lock."""

    name: str
    collector: AnyCollector
    totals: Totals
    wake: threading.Condition
    predecessor: _Task | None
    eases: bool
    delivery: threading.Lock = field(
        default_factory=threading.Lock
    )  # around publish and withdraw of this block
    thread: threading.Thread | None = None
    interval_seconds: float = math.inf
    deadline_seconds: float = math.inf
    due: float = -math.inf
    running_since: float | None = None
    deadline_at: float = math.inf
    expired: bool = False
    removed: bool = False
    published_at: float | None = None
    stale_at: float = math.inf
    problems: Problems | None = None  # of the last pass; None before the first has ended
    duration_seconds: float | None = None  # of the last pass that returned
    unsupported: tuple[str, ...] = ()
    told: set[str] = field(default_factory=set)

    def set_times(self, interval_seconds: float, deadline_seconds: float) -> None:
        for what, seconds in (("interval", interval_seconds), ("deadline", deadline_seconds)):
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"{what} of collector {self.name} must be above 0 seconds, not {seconds!r}")
        self.interval_seconds, self.deadline_seconds = interval_seconds, deadline_seconds

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

    def note_published(self, now: float | None) -> None:
        self.published_at, self.stale_at = now, math.inf
        if now is not None:
            interval = max(self.interval_seconds, EASE_SECONDS if self.eases else 0.0)
            self.stale_at = now + max(3 * interval, interval + self.deadline_seconds)

    def note_unsupported(self, unsupported: Sequence[str]) -> Lines:
        self.unsupported = tuple(unsupported)
        new = [what for what in self.unsupported if what not in self.told]
        self.told.update(new)
        return [(logging.INFO, f"collector {self.name}: {what}") for what in new]

    def judge(self, problems: Problems, wall: float) -> Lines:
        """Pass the verdict on a pass; a change of state is told once, the same reasons in other words are none."""
        before, self.problems = self.problems, tuple(problems)
        reasons = {reason for reason, _ in problems}
        for reason in reasons:
            self.totals.errors[reason] = self.totals.errors.get(reason, 0) + 1
        if not problems:
            self.totals.last_success = wall
            return [(logging.INFO, f"collector {self.name} works again")] if before else []
        if before is not None and {reason for reason, _ in before} == reasons:
            return []
        return [(logging.WARNING, f"collector {self.name} fails: {_message(problems, MAX_TOLD_PROBLEMS)}")]

    def status(self, now: float) -> CollectorStatus:
        running, problems = self.running_since, self.problems or ()
        hangs = running is not None and now - running >= self.deadline_seconds
        return CollectorStatus(
            name=self.name,
            success=None if self.problems is None else not problems,
            reason=",".join(sorted({reason for reason, _ in problems})),
            message=_message(problems, len(problems)),
            age_seconds=None if self.published_at is None else now - self.published_at,
            last_success=self.totals.last_success,
            duration_seconds=now - running if running is not None and hangs else self.duration_seconds,
            interval_seconds=self.interval_seconds,
            deadline_seconds=self.deadline_seconds,
            running=running is not None,
            unsupported=self.unsupported,
        )


class Scheduler:
    """Calls collectors in the background.

    Args:
        publish: Takes a collector's name and its families.
        withdraw: Takes the name of a collector whose families must go.
        unwatched: Says for how many seconds nobody is expected to look; 0 where that is not known.
    """

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
        self._tasks: dict[str, _Task] = {}
        self._leaving: dict[str, _Task] = {}
        self._totals: dict[str, Totals] = {}
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
        """Schedule a collector; its first pass begins at once, or when the scheduler starts.

        The counters of a name continue when it was there before. One that eases is called less often while the next
        scrape is known to be far: what it would publish is replaced before anybody sees it.

        Raises:
            ValueError: The name is taken, or a time is not positive and finite.
        """
        name = collector.name
        with self._lock:
            if name in self._tasks:
                raise ValueError(f"a collector {name} is already scheduled")
            before = self._leaving.pop(name, None)
            totals = self._totals.setdefault(name, Totals())
            task = _Task(name, collector, totals, threading.Condition(self._lock), before, eases)
            task.set_times(interval_seconds, deadline_seconds)
            if before is not None and before.expired and before.running_since is not None:
                task.problems = [("timeout", "a previous pass has not returned")]
            self._tasks[name] = task
            if self._started:
                self._start_task(task)

    def remove(self, name: str) -> None:
        """End a collector's schedule and withdraw its block; a pass under way ends in nothing."""
        with self._lock:
            task = self._tasks.pop(name, None)
            if task is None:
                return
            task.removed = True
            task.wake.notify()
            self._leaving[name] = task
        self._take_back(task)

    def reschedule(self, name: str, *, interval_seconds: float, deadline_seconds: float) -> None:
        """Give a collector other times and collect at once; block, verdict and a pass under way stay.

        Raises:
            KeyError: There is no such collector.
            ValueError: A time is not positive and finite.
        """
        with self._lock:
            task = self._tasks[name]
            task.set_times(interval_seconds, deadline_seconds)
            task.note_published(task.published_at and time.monotonic())
        self.run_soon(name)

    def start(self) -> None:
        """Begin; to be called once.

        Raises:
            StartError: The system gives no threads.
        """
        with self._lock:
            started = [self._start_task(task) for task in self._tasks.values()]
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
            if name in self._tasks:
                self._tasks[name].due = -math.inf
                self._tasks[name].wake.notify()

    def statuses(self) -> Sequence[CollectorStatus]:
        """Describe all collectors, in the order of their names."""
        with self._lock:
            now = time.monotonic()
            return [task.status(now) for _, task in sorted(self._tasks.items())]

    def families(self) -> Sequence[Metric]:
        """Make the families about the collectors."""
        with self._lock:
            now = time.monotonic()
            return status_families((task.status(now), task.totals) for _, task in sorted(self._tasks.items()))

    def _start_task(self, task: _Task) -> bool:
        thread = threading.Thread(target=self._run, args=(task,), name="exporter-collect", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # a limit on processes or memory
            task.problems = [("unexpected", "the system gives no thread")]
            return False
        task.thread = thread
        return True

    def _run(self, task: _Task) -> None:
        if task.predecessor is not None and task.predecessor.thread is not None:
            task.predecessor.thread.join()
            task.predecessor = None
        while True:
            with self._lock:
                while not (self._stopping.is_set() or task.removed):
                    seconds = task.due - time.monotonic()
                    if seconds <= 0:
                        break
                    task.wake.wait(min(seconds, threading.TIMEOUT_MAX))
                if self._stopping.is_set() or task.removed:
                    return
                now = time.monotonic()
                task.expired = False
                task.running_since, task.deadline_at = now, now + task.deadline_seconds
                task.due = math.inf  # until the pass has ended, or somebody wants another one
            self._pass(task, now)
            unwatched_seconds = self._unwatched() if task.eases else 0.0
            with self._lock:
                task.due = min(task.due, task.next_due(self._origin, now, unwatched_seconds))

    def _pass(self, task: _Task, began: float) -> None:
        families: Sequence[Metric] | None = None
        problems: list[tuple[str, str]] = []
        unsupported: list[str] = []
        try:
            # What comes from a collector is taken apart here, where a fault in it is still its own.
            collected = task.collector.collect()
            made = tuple(map(_checked, collected))
            if isinstance(collected, Collected):
                problems, unsupported = [*collected.problems], collected.unsupported
            families = made if made or not problems else None
        except CollectError as error:
            problems = [(error.reason, str(error))]
        except (Exception, SystemExit) as error:  # noqa: BLE001 - border to the collectors: a fault in one costs only itself
            problems = [_unexpected(error)]
        with task.delivery:
            with self._lock:
                wanted = not (task.expired or task.removed or self._stopping.is_set())
            if wanted and families is not None:
                try:
                    self._publish(task.name, families)
                except Exception as error:  # noqa: BLE001 - border to the page: a block it cannot take is the collector's failure
                    families = None
                    problems.append(_unexpected(error))
            lines: Lines = []
            with self._lock:
                now = time.monotonic()
                task.running_since, task.deadline_at = None, math.inf
                task.duration_seconds = max(0.0, now - began)
                task.totals.duration_seconds += task.duration_seconds
                if wanted and families is not None:
                    task.note_published(now)
                    lines += task.note_unsupported(unsupported)
                if wanted and not task.expired:
                    lines += task.judge(problems, time.time())
        if task.removed:
            self._take_back(task)
        _write(lines)

    def _take_back(self, task: _Task) -> None:
        """Withdraw a task's block if there is one, unless a new one is just coming."""
        if task.delivery.acquire(blocking=False):
            try:
                with self._lock:
                    wanted = task.published_at is not None and not self._stopping.is_set()
                    if not (task.removed or task.stale_at <= time.monotonic()):
                        return
                    task.note_published(None)
                if wanted:
                    self._withdraw(task.name)
            finally:
                task.delivery.release()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._stopping.wait(WATCH_SECONDS):
            lines: Lines = []
            with self._lock:
                now, tasks = time.monotonic(), list(self._tasks.values())
                stood_still = now - before - WATCH_SECONDS
                before = now
                for task in tasks:
                    if stood_still > STANDSTILL_SECONDS:  # the collectors could not have gone on either
                        task.deadline_at += stood_still
                    if task.deadline_at <= now and not task.expired:
                        task.expired = True
                        task.totals.timeouts += 1
                        message = f"no result after {task.deadline_seconds:g} s"
                        lines += task.judge([("timeout", message)], time.time())
            for task in tasks:
                if task.stale_at <= now:
                    self._take_back(task)
            _write(lines)


def _write(lines: Lines) -> None:
    for level, text in lines:
        LOG.log(level, "%s", text)


def _checked(metric: Metric) -> Metric:
    if not isinstance(metric, Metric):
        raise TypeError(f"a collector gives metric families, not {type(metric).__name__}")
    return metric


def _message(problems: Problems, limit: int) -> str:
    parts = [f"{message} ({reason})" for reason, message in problems[:limit]]
    if len(problems) > limit:
        parts.append(f"and {len(problems) - limit} more")
    return "; ".join(parts)


def _unexpected(error: BaseException) -> tuple[str, str]:
    """Give class and message, also of an exception that cannot be printed."""
    LOG.debug("the failure in full", exc_info=error)
    return "unexpected", "".join(traceback.format_exception_only(error)).strip()
