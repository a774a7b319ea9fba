"""Scheduler: runs every collector on its own interval, with its own deadline, away from the scrape.

Used in the sidecar. Collectors come in; metric families go out to `publish`, names to `withdraw`, and what is known
about the collectors to `families` and `statuses`.

Threads: one daemon a collector, which calls it and publishes what it gave, so that a collector, or a publication, that
hangs costs itself only; and a watchdog, which gives the verdict 0 to what is past its deadline and withdraws blocks
that are stale. What returns after its deadline is dropped. A block stays until the next one, and is withdrawn when
nothing was published for `max(3 intervals, interval + deadline)`: a gap instead of a frozen value. A collector is
never called while its previous call has not returned, not even after it was removed and added again.

A collector that eases is called less often while the next scrape is known to be far: what it would publish is replaced
before anybody sees it, and its source keeps by itself what happens meanwhile.

Scheduling follows the monotonic clock; the wall clock only stamps. All collectors of one interval are due in the same
moment, to wake the machine seldom. A stretch in which nothing ran (a stopped process, a suspended machine) is neither
made up for nor a missed deadline.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Sequence

from prometheus_client.core import Metric

from exporter.collectors.status import CollectorStatus, Notice, Record, Totals, status_families
from exporter.errors import CollectError, StartError
from exporter.families import AnyCollector, Collected

LOG = logging.getLogger("exporter.collectors")

WATCH_SECONDS = 1.0
"""How long the watchdog sleeps at most."""

STANDSTILL_SECONDS = 1.0
"""Waking up later than meant by more than this is no delay but a standstill: a stopped or suspended process."""

EASE_SECONDS = 5.0
"""How far the passes of a collector that eases may be apart: as far as most others' are."""

STACK_BYTES = 512 * 1024
"""Of a collector's thread; the system's default of 8 MiB, thirty times, is a quarter of a small limit."""


class _Task:
    """One scheduled collector; guarded by the scheduler's lock."""

    def __init__(
        self,
        collector: AnyCollector,
        record: Record,
        lock: threading.Lock,
        predecessor: _Task | None,
        *,
        eases: bool = False,
    ) -> None:
        self.eases = eases
        self.collector = collector
        self.record = record
        self.predecessor = predecessor
        self.wake = threading.Condition(lock)
        self.delivery = threading.Lock()  # held around publish and withdraw of this block alone
        self.thread: threading.Thread | None = None
        self.interval_seconds = self.deadline_seconds = math.inf
        self.due = 0.0
        self.soon = True
        self.running_since: float | None = None
        self.deadline_at = math.inf
        self.expired = False
        self.published_at: float | None = None
        self.stale_at = math.inf
        self.removed = False

    def set_times(self, interval_seconds: float, deadline_seconds: float) -> None:
        for what, seconds in (("interval", interval_seconds), ("deadline", deadline_seconds)):
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(
                    f"{what} of collector {self.record.name} must be above 0 seconds, not {seconds!r}"
                )
        self.interval_seconds, self.deadline_seconds = interval_seconds, deadline_seconds

    def next_due(self, origin: float, now: float, unwatched_seconds: float = 0.0) -> float:
        """Find the next moment of the interval's grid; not so early that a rate over it is noise.

        One that eases leaves out what would be replaced before anybody looks.
        """
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

    def status(self, now: float) -> CollectorStatus:
        record, running = self.record, self.running_since
        problems = record.problems or ()
        hangs = running is not None and now - running >= self.deadline_seconds
        return CollectorStatus(
            name=record.name,
            success=None if record.problems is None else not problems,
            reason=",".join(sorted({reason for reason, _ in problems})),
            message=record.message(len(problems)),
            age_seconds=None if self.published_at is None else now - self.published_at,
            last_success=record.totals.last_success,
            duration_seconds=now - running if running is not None and hangs else record.duration_seconds,
            interval_seconds=self.interval_seconds,
            deadline_seconds=self.deadline_seconds,
            running=running is not None,
            unsupported=record.unsupported,
        )


class Scheduler:
    """Calls collectors in the background and keeps the page's blocks as fresh as they can be.

    Args:
        publish: Takes a collector's name and its families.
        withdraw: Takes the name of a collector whose families must go.
        unwatched: Says for how long nobody is expected to look; 0 where that is not known. Must not wait.
        log: One line per change of a collector's state.
        monotonic: Clock of the schedule, seconds.
        clock: Wall clock of timestamps, Unix seconds.
    """

    def __init__(
        self,
        *,
        publish: Callable[[str, Sequence[Metric]], None],
        withdraw: Callable[[str], None],
        unwatched: Callable[[], float] = lambda: 0.0,
        log: logging.Logger = LOG,
        monotonic: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._publish = publish
        self._withdraw = withdraw
        self._unwatched = unwatched
        self._log = log
        self._monotonic = monotonic
        self._clock = clock
        self._lock = threading.Lock()  # everything below; never held while foreign code runs
        self._watch = threading.Condition(self._lock)
        self._origin = monotonic()
        self._tasks: dict[str, _Task] = {}
        self._leaving: dict[str, _Task] = {}
        self._totals: dict[str, Totals] = {}
        self._watchdog: threading.Thread | None = None
        self._watch_until = -math.inf
        self._stopping = False
        self._families: tuple[Metric, ...] | None = None

    def add(
        self,
        collector: AnyCollector,
        *,
        interval_seconds: float,
        deadline_seconds: float,
        name: str = "",
        eases: bool = False,
    ) -> None:
        """Schedule a collector; its first pass begins at once, or when the scheduler starts.

        The counters of a name continue when it was there before.

        Args:
            collector: Called from one thread at a time.
            interval_seconds: Time between the beginnings of two passes.
            deadline_seconds: Time that a pass may take; may be longer than the interval.
            name: Of a collector that has none itself.
            eases: Whether to leave passes out while nobody looks, for up to `EASE_SECONDS`.

        Raises:
            ValueError: The name is taken, or a time is not positive and finite.
        """
        name = name or collector.name
        with self._lock:
            if name in self._tasks:
                raise ValueError(f"a collector {name} is already scheduled")
            record = Record(name, self._totals.setdefault(name, Totals()))
            before = self._leaving.pop(name, None)
            task = _Task(collector, record, self._lock, before, eases=eases)
            task.set_times(interval_seconds, deadline_seconds)
            if before is not None and before.expired and before.running_since is not None:
                record.problems = [("timeout", "a previous pass has not returned")]
            self._tasks[name] = task
            self._families = None
            if self._watchdog is not None:
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
            self._families = None
        if task.delivery.acquire(blocking=False):  # else its thread is publishing, and withdraws after it
            try:
                self._take_back(task)
            finally:
                task.delivery.release()

    def reschedule(self, name: str, *, interval_seconds: float, deadline_seconds: float) -> None:
        """Give a collector other times and collect at once; block, verdict and a pass under way stay.

        Raises:
            ValueError: There is no such collector, or a time is not positive and finite.
        """
        with self._lock:
            task = self._tasks.get(name)
            if task is None:
                raise ValueError(f"no collector {name} is scheduled")
            task.set_times(interval_seconds, deadline_seconds)
            task.note_published(task.published_at and self._monotonic())
            task.soon = True
            task.wake.notify()
            self._families = None

    def start(self) -> None:
        """Begin; to be called once.

        Raises:
            StartError: The system gives no threads.
        """
        with self._lock:
            if self._watchdog is not None:
                raise RuntimeError("the scheduler has been started before")
            self._watchdog = threading.Thread(target=self._run_watch, name="exporter-watchdog", daemon=True)
            try:
                self._watchdog.start()
            except RuntimeError as error:
                raise StartError(
                    "no thread can be started; raise the limit of processes or of memory"
                ) from error
            started = [self._start_task(task) for task in self._tasks.values()]
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
        with self._lock:
            self._stopping = True
            self._watch.notify()
            for task in self._tasks.values():
                task.wake.notify()
            threads = [self._watchdog, *(task.thread for task in self._tasks.values())]
        end = time.monotonic() + timeout_seconds  # joining takes real time, whatever clock schedules
        for thread in threads:
            if thread is not None and thread.ident is not None:
                thread.join(max(0.0, end - time.monotonic()))

    def run_soon(self, name: str) -> None:
        """Collect now, or as soon as the present pass has ended; nothing for a name that is not there."""
        with self._lock:
            task = self._tasks.get(name)
            if task is not None:
                task.soon = True
                task.wake.notify()

    def statuses(self) -> Sequence[CollectorStatus]:
        """Describe all collectors, in the order of their names."""
        with self._lock:
            now = self._monotonic()
            return [task.status(now) for _, task in sorted(self._tasks.items())]

    def families(self) -> tuple[Metric, ...]:
        """Make the families about the collectors; the same object while nothing has changed."""
        with self._lock:
            if self._families is not None:
                return self._families
            now = self._monotonic()
            families = status_families(
                (task.status(now), task.record.totals) for _, task in sorted(self._tasks.items())
            )
            # The time of a call that hangs changes from scrape to scrape.
            if not any(task.expired and task.running_since is not None for task in self._tasks.values()):
                self._families = families
            return families

    # A collector's thread -------------------------------------------------------------------------------------------

    def _start_task(self, task: _Task) -> bool:
        thread = threading.Thread(target=self._run, args=(task,), name="exporter-collect", daemon=True)
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        except RuntimeError:  # a limit on processes or memory; the watchdog tries again
            task.record.problems = [("unexpected", "the system gives no thread")]
            return False
        finally:
            threading.stack_size(before)
        task.thread = thread
        return True

    def _run(self, task: _Task) -> None:
        if task.predecessor is not None and task.predecessor.thread is not None:
            task.predecessor.thread.join()
            task.predecessor = None
        while True:
            with self._lock:
                while not (self._stopping or task.removed or task.soon):
                    seconds = task.due - self._monotonic()
                    if seconds <= 0:
                        break
                    task.wake.wait(min(seconds, threading.TIMEOUT_MAX))
                if self._stopping or task.removed:
                    return
                now = self._monotonic()
                task.soon, task.expired = False, False
                task.running_since, task.deadline_at = now, now + task.deadline_seconds
                if task.deadline_at < self._watch_until:
                    self._watch.notify()
            task.due = task.next_due(self._origin, now, self._unwatched() if task.eases else 0.0)
            self._pass(task, now)

    def _pass(self, task: _Task, began: float) -> None:
        families: tuple[Metric, ...] | None = None
        problems: list[tuple[str, str]] = []
        unsupported: list[str] = []
        failure: BaseException | None = None
        try:
            # What comes from a collector is taken apart here, where a fault in it is still its own.
            collected = task.collector.collect()
            made = tuple(map(_checked, collected))
            if isinstance(collected, Collected):
                problems = [(str(reason), str(message)) for reason, message in collected.problems]
                unsupported = [str(what) for what in collected.unsupported]
            families = made if made or not problems else None
        except CollectError as error:
            problems = [(error.reason, str(error))]
        except (Exception, SystemExit) as error:  # noqa: BLE001 - border to the collectors: a fault in one costs only itself
            problems, failure = [("unexpected", _in_words(error))], error
        with task.delivery:
            with self._lock:
                wanted = not (task.expired or task.removed or self._stopping)
            if wanted and families is not None:
                try:
                    self._publish(task.record.name, families)
                except Exception as error:  # noqa: BLE001 - border to the page: a block it cannot take is the collector's failure
                    families, failure = None, error
                    problems.append(("unexpected", _in_words(error)))
            notices: list[Notice] = []
            with self._lock:
                now, record = self._monotonic(), task.record
                task.running_since, task.deadline_at = None, math.inf
                record.duration_seconds = max(0.0, now - began)
                record.totals.duration_seconds += record.duration_seconds
                if wanted and families is not None:
                    task.note_published(now)
                    notices += record.note_unsupported(unsupported)
                if wanted and not task.expired:
                    notices += record.judge(problems, wall=self._clock())
                self._families = None
            if task.removed:
                self._take_back(task)
        self._write(notices)
        if notices and failure is not None:
            self._log.debug("the failure in full", exc_info=failure)

    def _take_back(self, task: _Task) -> None:
        """Withdraw a task's block if there is one; with its `delivery` held."""
        with self._lock:
            if task.published_at is None or self._stopping:
                return
            task.note_published(None)
        try:
            self._withdraw(task.record.name)
        except Exception:  # noqa: BLE001 - border to the page: the watchdog must go on
            self._log.exception("block of collector %s could not be withdrawn", task.record.name)

    # The watchdog ---------------------------------------------------------------------------------------------------

    def _run_watch(self) -> None:
        meant = math.inf
        while True:
            notices: list[Notice] = []
            with self._lock:
                if self._stopping:
                    return
                now, tasks = self._monotonic(), self._tasks.values()
                if now - meant > STANDSTILL_SECONDS:  # the collectors could not have gone on either
                    for task in tasks:
                        task.deadline_at += now - meant
                for task in tasks:
                    if task.thread is None:
                        self._start_task(task)
                    if task.deadline_at <= now and not task.expired:
                        task.expired, self._families = True, None
                        notices += task.record.time_out(task.deadline_seconds, wall=self._clock())
                stale = [task for task in tasks if task.stale_at <= now and not task.delivery.locked()]
                if not notices and not stale:
                    moments = [task.deadline_at for task in tasks if not task.expired]
                    moments += [task.stale_at for task in tasks if task.stale_at > now]
                    self._watch_until = meant = min([now + WATCH_SECONDS, *moments])
                    self._watch.wait(max(0.0, meant - now))
                    continue
            meant = math.inf
            for task in stale:
                if task.delivery.acquire(blocking=False):  # else a new block is coming
                    try:
                        if task.stale_at <= self._monotonic():
                            self._take_back(task)
                    finally:
                        task.delivery.release()
            self._write(notices)

    def _write(self, notices: Sequence[Notice]) -> None:
        for level, text in notices:
            self._log.log(level, "%s", text)


def _checked(metric: Metric) -> Metric:
    if not isinstance(metric, Metric):
        raise TypeError(f"a collector gives metric families, not {type(metric).__name__}")
    return metric


def _in_words(error: BaseException) -> str:
    """Give class and message, also of an exception that cannot be printed."""
    return "".join(traceback.format_exception_only(error)).strip()
