"""Scheduler of the collectors, with intervals, deadlines and daemon threads.

A pass is one call of a collector. A block is the set of families that a pass returns. A lane is a thread that runs
collectors in sequence; `catalogue` assigns the lanes.

A watchdog records a pass that exceeds the deadline as a timeout, and starts a new thread for the other collectors of the
lane. It withdraws blocks older than `max(3 * interval, interval + deadline)`, and blocks of removed collectors, so that the page
has a gap instead of a stale value. A collector is not called before the previous call under its name has returned, even if the
collector was removed and added again.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.core import Metric

from exporter.collectors.status import CollectorStatus, StatusFamilies
from exporter.collectors.task import CollectorTask
from exporter.errors import CollectError, StartError
from exporter.families import AnyCollector, Collected

_log = logging.getLogger("exporter.collectors")

MAX_WATCH_SECONDS = 1.0
"""Longest interval of the watchdog. The interval is at most half of the shortest deadline."""


@dataclass(slots=True, eq=False)
class Lane:
    """Thread and the tasks of its collectors; guarded by the scheduler's lock."""

    name: str
    wake: threading.Condition
    tasks: list[CollectorTask] = field(default_factory=list)
    thread: threading.Thread | None = None

    def scheduled_tasks(self) -> list[CollectorTask]:
        """Return the tasks that have a collector."""
        return [task for task in self.tasks if task.collector is not None]


@dataclass(slots=True)
class PassResult:
    """Families, problems and unsupported sources of a pass, as in `Collected`."""

    families: Sequence[Metric] = ()
    problems: list[tuple[str, str]] = field(default_factory=list)  # pairs (reason, message)
    unsupported: Sequence[str] = ()


class Scheduler:
    """Scheduler that runs collectors periodically in the background, with a verdict per collector."""

    def __init__(
        self,
        *,
        publish: Callable[[str, Sequence[Metric]], None],
        withdraw: Callable[[str], None],
    ) -> None:
        self._publish = publish
        self._withdraw = withdraw
        self._lock = threading.Lock()  # guards the fields below; never held while a collector runs
        self._grid_origin = time.monotonic()
        self._tasks: dict[str, CollectorTask] = {}  # by name, including removed collectors
        self._lanes: dict[str, Lane] = {}
        self._status_families = StatusFamilies()
        self._watchdog = threading.Thread(target=self._watch, name="exporter-watchdog", daemon=True)
        self._is_started = False
        self._stopping = threading.Event()

    def add(
        self,
        collector: AnyCollector,
        *,
        interval_seconds: float,
        deadline_seconds: float,
        lane: str | None = None,
    ) -> None:
        """Schedule a collector, by default in a separate lane. The counters of the collector's name continue.

        If the previous call under this name has not returned, the collector stays in the lane of that call.

        Raises ValueError if a collector with this name is already scheduled.
        """
        with self._lock:
            task = self._tasks.setdefault(collector.name, CollectorTask(collector.name))
            if task.collector is not None:
                raise ValueError(f"a collector {task.name} is already scheduled")
            target_lane = self._lane(lane or collector.name)
            if task.lane and task.lane != target_lane.name and task.running_since is None:
                self._lanes[task.lane].tasks.remove(task)
            elif task.lane:
                target_lane = self._lanes[task.lane]  # a call that has not returned stays in its lane
            if task not in target_lane.tasks:
                target_lane.tasks.append(task)
            task.schedule(
                collector, lane=target_lane.name, interval=interval_seconds, deadline=deadline_seconds
            )
            if self._is_started and target_lane.thread is None:
                self._start_lane(target_lane)
            target_lane.wake.notify_all()

    def remove(self, name: str) -> None:
        """Remove a collector and its families. The result of a running pass is discarded."""
        with self._lock:
            task = self._tasks.get(name)
            if task is None:
                return
            task.collector = None
            self._lanes[task.lane].wake.notify_all()
        self._withdraw_stale(task)

    def start(self) -> None:
        """Start the threads. Raises StartError if the system refuses a thread."""
        with self._lock:
            successes = [self._start_lane(lane) for lane in self._lanes.values() if lane.scheduled_tasks()]
            self._is_started = True
        try:
            self._watchdog.start()
            successes.append(True)
        except RuntimeError:
            successes.append(False)
        if not all(successes):
            self.stop()
            raise StartError(
                f"{len(successes)} threads are needed for the collectors and {sum(successes)} could be started; raise "
                "the limit of processes (ulimit -u, pids.max) or of memory (ulimit -v), or disable collectors"
            )

    def stop(self, timeout_seconds: float = 2.0) -> None:
        """Stop the threads. A collector that has not returned after the timeout remains in a daemon thread.

        Later results are neither published nor withdrawn: the last blocks remain for the last scrape.
        """
        self._stopping.set()
        with self._lock:
            for lane in self._lanes.values():
                lane.wake.notify_all()
            threads = [self._watchdog, *(lane.thread for lane in self._lanes.values())]
        deadline_time = time.monotonic() + timeout_seconds
        for thread in threads:
            if thread is not None and thread.ident is not None:
                thread.join(max(0.0, deadline_time - time.monotonic()))

    def run_soon(self, name: str) -> None:
        """Run a collector now, or after the running pass. An unknown name is ignored."""
        with self._lock:
            task = self._tasks.get(name)
            if task is not None and task.collector is not None:
                task.due = -math.inf
                self._lanes[task.lane].wake.notify_all()

    def statuses(self) -> Sequence[CollectorStatus]:
        """Return the status of each scheduled collector, sorted by name."""
        with self._lock:
            now = time.monotonic()
            return [task.status(now) for task in self._all_scheduled_tasks()]

    def families(self) -> Sequence[Metric]:
        """Return the families `exporter_collector_*` of the scheduled collectors."""
        with self._lock:
            now = time.monotonic()
            return self._status_families.families(
                (task.status(now), task.totals) for task in self._all_scheduled_tasks()
            )

    def _all_scheduled_tasks(self) -> list[CollectorTask]:
        """Return the tasks that have a collector, sorted by name."""
        return [task for _, task in sorted(self._tasks.items()) if task.collector is not None]

    # Lanes -----------------------------------------------------------------------------------------------

    def _lane(self, name: str) -> Lane:
        """Return the lane of a name, which is created if necessary."""
        return self._lanes.setdefault(name, Lane(name, threading.Condition(self._lock)))

    def _start_lane(self, lane: Lane) -> bool:
        """Start a new thread for a lane, and return True, or False if the system refuses the thread.

        An earlier thread of the lane exits after its collector returns. If the thread is refused, the earlier thread stays.
        """
        thread = threading.Thread(
            target=self._serve, args=(lane,), name=f"exporter-{lane.name}"[:15], daemon=True
        )
        previous, lane.thread = lane.thread, thread
        try:
            thread.start()
        except RuntimeError:  # a limit on processes or memory
            lane.thread = previous
            for task in lane.tasks:
                # The problem of a late pass is more useful than the lack of a thread.
                task.problems = task.problems or [("internal", "the system refused a new thread")]
            return False
        return True

    def _serve(self, lane: Lane) -> None:
        """Run the collectors of a lane until the scheduler stops or a new thread serves the lane."""
        thread = threading.current_thread()
        while True:
            with self._lock:
                task = self._wait_for_task(lane, thread)
                if task is None or task.collector is None:
                    return
                collector = task.collector
                started_at = task.running_since = time.monotonic()
                task.runner, task.is_expired = thread, False
                task.due = math.inf  # until the pass ends or run_soon is called
            self._run_pass(task, collector, started_at)
            with self._lock:
                task.due = min(task.due, task.next_due(self._grid_origin, started_at))
                lane.wake.notify_all()

    def _wait_for_task(self, lane: Lane, thread: threading.Thread) -> CollectorTask | None:
        """Wait for the next task that is due, and return the task, or None if this thread must exit. The caller holds the lock."""
        while not self._stopping.is_set() and lane.thread is thread:
            scheduled_tasks = lane.scheduled_tasks()
            if not scheduled_tasks:
                lane.thread = None
                return None
            idle_tasks = [task for task in scheduled_tasks if task.running_since is None]
            task = min(idle_tasks, key=lambda candidate: candidate.due, default=None)
            seconds = math.inf if task is None else task.due - time.monotonic()
            if seconds <= 0:
                return task
            lane.wake.wait(min(seconds, threading.TIMEOUT_MAX))
        return None

    def _run_pass(self, task: CollectorTask, collector: AnyCollector, started_at: float) -> None:
        """Call a collector and publish the block, unless the pass is late or the collector was removed."""
        result = _collect(collector)
        with task.delivery:
            with self._lock:
                is_discarded = task.is_expired or task.collector is not collector or self._stopping.is_set()
            is_published = not is_discarded and bool(result.families or not result.problems)
            if is_published:
                try:
                    self._publish(task.name, result.families)
                except Exception as error:  # noqa: BLE001 - a block that the page refuses is a failure of its collector
                    is_published = False
                    result.problems.append(_internal_problem(error))
            with self._lock:
                now = time.monotonic()
                task.running_since = None
                task.duration_seconds = now - started_at
                task.totals.duration_seconds += task.duration_seconds
                if is_published:
                    task.published_at, task.published_by = now, collector
                    task.record_unsupported(result.unsupported)
                if not is_discarded and not task.is_expired:  # the deadline may pass during the publication
                    task.record_problems(result.problems)
        if task.collector is not collector:
            self._withdraw_stale(task)

    # Watchdog --------------------------------------------------------------------------------------------

    def _withdraw_stale(self, task: CollectorTask) -> None:
        """Withdraw a stale block, unless another thread is publishing or withdrawing the block now."""
        if task.delivery.acquire(blocking=False):
            try:
                with self._lock:
                    if not task.is_stale(time.monotonic()):
                        return
                    task.published_at = None
                if not self._stopping.is_set():
                    self._withdraw(task.name)
            finally:
                task.delivery.release()

    def _watch(self) -> None:
        """Record timeouts, replace the threads of late collectors, and withdraw stale blocks until the scheduler stops."""
        while not self._stopping.wait(self._watch_seconds()):
            with self._lock:
                now, tasks = time.monotonic(), self._all_scheduled_tasks()
                for task in tasks:
                    if task.is_late(now) and not task.is_expired:
                        task.is_expired = True
                        task.totals.timeouts += 1
                        task.record_problems([("timeout", f"no result after {task.deadline_seconds:g} s")])
                    if task.is_expired and task.running_since is not None:
                        self._replace_thread(self._lanes[task.lane], task)
            for task in tasks:
                if task.is_stale(now):
                    self._withdraw_stale(task)

    def _replace_thread(self, lane: Lane, late: CollectorTask) -> None:
        """Start a new thread for the lane of a late collector, if the lane has other collectors and no new thread yet."""
        if late.runner is lane.thread and any(task is not late for task in lane.scheduled_tasks()):
            self._start_lane(lane)

    def _watch_seconds(self) -> float:
        """Return the interval of the watchdog."""
        with self._lock:
            return min(
                [MAX_WATCH_SECONDS, *(task.deadline_seconds / 2 for task in self._all_scheduled_tasks())]
            )


def _collect(collector: AnyCollector) -> PassResult:
    """Call a collector and return the result. An exception is returned as a problem."""
    try:
        collected = collector.collect()
        families = tuple(map(_checked_family, collected))  # the iteration may be lazy and fail
        if isinstance(collected, Collected):
            return PassResult(families, [*collected.problems], collected.unsupported)
        return PassResult(families)
    except CollectError as error:
        return PassResult(problems=[(error.reason, str(error))])
    except (Exception, SystemExit) as error:  # noqa: BLE001 - border to the collectors, third-party ones included
        return PassResult(problems=[_internal_problem(error)])


def _checked_family(metric: Metric) -> Metric:
    """Return the argument. Raises TypeError if it is no family, as in a third-party collector."""
    if not isinstance(metric, Metric):
        raise TypeError(f"a collector returns metric families, not {type(metric).__name__}")
    return metric


def _internal_problem(error: BaseException) -> tuple[str, str]:
    """Return the problem for an unexpected exception of a collector, and log the traceback at the level debug."""
    _log.debug("internal error of a collector", exc_info=error)
    frames = traceback.extract_tb(error.__traceback__)
    location = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    # Unlike str(error), this function also formats an exception whose __str__ fails.
    text = "".join(traceback.format_exception_only(error)).strip()
    return "internal", f"internal error{location}: {text}"
