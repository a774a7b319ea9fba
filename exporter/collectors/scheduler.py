"""Scheduler: runs every collector on its own interval, with its own deadline, away from the scrape.

Used in the sidecar. Collectors come in; blocks go out to `publish`, names to `withdraw`, and what is known
about the collectors to `families` and `statuses`.

Threads: one dispatcher, a daemon, decides what is due, late or stale; workers make the calls (`workers`). A
collector is never called while its previous call has not returned, not even after it was removed and added
again.

What is past its deadline gets the verdict 0 at once, and whatever it returns later is dropped. A block stays
until the next one, and is withdrawn when nothing has been published for `max(3 intervals, interval +
deadline)`: a gap instead of a frozen value.

A collector that eases is called less often while the next scrape is known to be far: what it would read is replaced
before anybody sees it, and its source keeps by itself what happens meanwhile.

Scheduling follows the monotonic clock; the wall clock only stamps. All collectors of one interval are due in
the same moment, to wake the machine seldom. A stretch in which nothing ran (a stopped process, a paused
machine) is skipped, not made up for.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Sequence

from prometheus_client.core import Metric

from exporter.collectors.family import AnyCollector, Family
from exporter.collectors.intake import take
from exporter.collectors.standing import CollectorStatus, Notice, Standing, Totals, standing_families
from exporter.collectors.task import Call, Task, check_times
from exporter.collectors.workers import Workers
from exporter.errors import CollectError

LOG = logging.getLogger("exporter.collectors")

STANDSTILL_SECONDS = 1.0
"""Waking up later than meant by more than this is no delay but a standstill: a stopped or suspended process."""


class Scheduler:
    """Calls collectors in the background and keeps the page's blocks as fresh as they can be.

    Args:
        publish: Takes a collector's name and its new block.
        withdraw: Takes the name of a collector whose block must go.
        changed: Called when `families` has something new, but once for passes that follow each other; must
            not raise.
        log: One line per change of a collector's state.
        monotonic: Clock of the schedule, seconds.
        clock: Wall clock of timestamps, Unix seconds.
        unwatched: For how long nobody is expected to look at what is published; 0 where that is not known. Must not
            wait.
        max_workers: Calls that may hang before further collectors wait in vain (and time out).
    """

    def __init__(
        self,
        *,
        publish: Callable[[str, Sequence[Metric]], None],
        withdraw: Callable[[str], None],
        changed: Callable[[], None] = lambda: None,
        unwatched: Callable[[], float] = lambda: 0.0,
        log: logging.Logger = LOG,
        monotonic: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
        max_workers: int = 32,
    ) -> None:
        self._publish = publish
        self._withdraw = withdraw
        self._changed = changed
        self._unwatched = unwatched
        self._log = log
        self._monotonic = monotonic
        self._clock = clock
        self._lock = threading.Lock()  # everything below; never held while foreign code runs
        self._wake = threading.Condition(self._lock)  # for the dispatcher
        self._workers = Workers(self._lock, self._carry_out, max_workers=max_workers)
        # Held around publish and withdraw, and always taken before `_lock`: otherwise a block checked to be
        # wanted could be published after the withdrawal that was meant to end it.
        self._publication = threading.Lock()
        self._origin = monotonic()
        self._tasks: dict[str, Task] = {}
        self._totals: dict[str, Totals] = {}
        self._calls: dict[str, Call] = {}
        self._dispatcher: threading.Thread | None = None
        self._stopping = False
        self._families: tuple[Family, ...] | None = None
        self._families_before: tuple[Family, ...] = ()

    def add(
        self,
        collector: AnyCollector,
        *,
        interval_seconds: float,
        deadline_seconds: float,
        eases: bool = False,
    ) -> None:
        """Schedule a collector; its first pass begins at once, or when the scheduler starts.

        The counters of a name continue when it was there before.

        Args:
            collector: Called from one thread at a time.
            interval_seconds: Time between the beginnings of two passes.
            deadline_seconds: Time that a pass may take; may be longer than the interval.
            eases: Whether to leave passes out while nobody looks, up to `EASE_SECONDS` in a row: for a source that
                keeps by itself what happens meanwhile.

        Raises:
            ValueError: The name is taken, or a time is not positive and finite.
        """
        name = collector.name
        check_times(name, interval_seconds, deadline_seconds)
        with self._lock:
            if name in self._tasks:
                raise ValueError(f"a collector {name} is already scheduled")
            standing = Standing(
                name,
                interval_seconds=interval_seconds,
                deadline_seconds=deadline_seconds,
                totals=self._totals.setdefault(name, Totals()),
            )
            task = self._tasks[name] = Task(collector, standing, eases=eases)
            task.due = task.next_due(self._origin, self._monotonic())
            if name in self._calls and self._calls[name].expired:
                standing.wait_for_predecessor()
            self._families = None
            self._wake.notify()

    def remove(self, name: str) -> None:
        """End a collector's schedule and withdraw its block; a pass under way ends in nothing."""
        with self._lock:
            task = self._tasks.pop(name, None)
            if task is None:
                return
            task.removed = True
            self._families = None
            call = self._calls.get(name)
            if call is not None and self._workers.take_back(call):
                del self._calls[name]
        with self._publication:  # waits for a publication of this block that has already begun
            if task.published_at is not None:
                self._withdraw(name)

    def reschedule(self, name: str, *, interval_seconds: float, deadline_seconds: float) -> None:
        """Give a collector other times and collect at once; block, verdict and a pass under way stay.

        Raises:
            ValueError: There is no such collector, or a time is not positive and finite.
        """
        check_times(name, interval_seconds, deadline_seconds)
        with self._lock:
            task = self._tasks.get(name)
            if task is None:
                raise ValueError(f"no collector {name} is scheduled")
            task.standing.reschedule(interval_seconds, deadline_seconds)
            task.due = task.next_due(self._origin, self._monotonic())
            task.soon = True
            self._families = None
            self._wake.notify()

    def start(self) -> None:
        """Begin; to be called once."""
        with self._lock:
            if self._dispatcher is not None:
                raise RuntimeError("the scheduler has been started before")
            self._dispatcher = threading.Thread(target=self._dispatch, name="exporter-scheduler", daemon=True)
            self._workers.start(self._monotonic())
        self._dispatcher.start()

    def stop(self, timeout_seconds: float = 2.0) -> None:
        """End, waiting at most so long; a collector that hangs is left behind in its daemon thread.

        Nothing is published after this, and nothing is withdrawn: the last blocks stay for the last scrape.
        """
        with self._lock:
            self._stopping = True
            self._wake.notify_all()
            threads = self._workers.stop()
            if self._dispatcher is not None:
                threads.append(self._dispatcher)
        end = time.monotonic() + timeout_seconds  # joining takes real time, whatever clock schedules
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def run_soon(self, name: str) -> None:
        """Collect now, or as soon as the present pass has ended; nothing for a name that is not there."""
        with self._lock:
            task = self._tasks.get(name)
            if task is not None:
                task.soon = True
                self._wake.notify()

    def statuses(self) -> Sequence[CollectorStatus]:
        """Describe all collectors, in the order of their names."""
        with self._lock:
            now = self._monotonic()
            return [
                task.standing.status(
                    age_seconds=None if task.published_at is None else now - task.published_at,
                    running_seconds=self._running_seconds(name, now),
                )
                for name, task in sorted(self._tasks.items())
            ]

    def families(self) -> Sequence[Family]:
        """Make the families about the collectors; the same object while nothing has changed."""
        with self._lock:
            if self._families is not None:
                return self._families
            now = self._monotonic()
            families = self._families_before = standing_families(
                (
                    (task.standing, self._running_seconds(name, now))
                    for name, task in sorted(self._tasks.items())
                ),
                self._families_before,
            )
            # The time of a call that hangs changes from scrape to scrape.
            if not any(call.expired for call in self._calls.values()):
                self._families = families
            return families

    def _running_seconds(self, name: str, now: float) -> float | None:
        call = self._calls.get(name)
        return None if call is None else now - call.queued_at

    def _dispatch(self) -> None:
        wake_at = math.inf
        while True:
            unwatched_seconds = self._unwatched()
            with self._lock:
                if self._stopping:
                    return
                now = self._monotonic()
                if now - wake_at > STANDSTILL_SECONDS:
                    self._forgive(now - wake_at)
                notices = self._expire(now)
                stale = [task for task in self._tasks.values() if task.stale_at <= now]
                self._queue_due(now, unwatched_seconds)
                self._workers.grow(now)
                if not notices and not stale:
                    wake_at = self._first_moment()
                    # A wait longer than the system's limit ends early, and is begun again.
                    self._wake.wait(min(max(0.0, wake_at - now), threading.TIMEOUT_MAX))
                    continue
            wake_at = math.inf
            for task in stale:
                self._withdraw_stale(task)
            self._changed()
            self._write(notices)

    def _forgive(self, seconds: float) -> None:
        # This process, or the machine, stood still: the collectors could not have gone on either.
        for call in self._calls.values():
            call.deadline_at += seconds

    def _expire(self, now: float) -> list[Notice]:
        notices: list[Notice] = []
        for name, call in list(self._calls.items()):
            if call.expires_at > now:
                continue
            call.expired = True
            standing = call.task.standing
            message = f"no result after {standing.deadline_seconds:g} s"
            if self._workers.take_back(call):
                del self._calls[name]
                message += f": all {len(self._workers)} workers are taken by collectors that hang"
            if not call.task.removed:
                self._families = None
                notices += standing.time_out(message, wall=self._clock())
        return notices

    def _queue_due(self, now: float, unwatched_seconds: float) -> None:
        for name, task in self._tasks.items():
            if task.due > now and not task.soon:
                continue
            if name in self._calls:
                # Still in its previous pass: this one is left out. What was asked for by `soon` is not.
                if task.due <= now:
                    task.due = task.next_due(self._origin, now)
                continue
            task.soon = False
            task.due = task.next_due(self._origin, now, unwatched_seconds=unwatched_seconds)
            self._calls[name] = call = Call(task, now)
            self._workers.put(call)

    def _first_moment(self) -> float:
        moments = [self._workers.grows_at(), *(call.expires_at for call in self._calls.values())]
        for task in self._tasks.values():
            moments += (task.due, task.stale_at)
        return min(moments)

    def _withdraw_stale(self, task: Task) -> None:
        with self._publication:
            with self._lock:
                if self._stopping or task.removed or task.stale_at > self._monotonic():
                    return  # a new block has come in the meantime
                task.withdraw()
            try:
                self._withdraw(task.standing.name)
            except Exception:  # noqa: BLE001 - border to the page: without the dispatcher nothing would be collected again
                self._log.exception("block of collector %s could not be withdrawn", task.standing.name)

    def _carry_out(self, call: Call) -> None:
        families: Sequence[Metric] | None = None
        problems: tuple[tuple[str, str], ...]
        unsupported: tuple[str, ...] = ()
        failure: BaseException | None = None
        began = self._monotonic()
        try:
            collected = take(call.task.collector.collect())
            # What comes from a collector is taken apart here, where a fault in it is still its own.
            problems = tuple((str(reason), str(message)) for reason, message in collected.problems)
            unsupported = tuple(str(what) for what in collected.unsupported)
            families = tuple(collected) if collected or not problems else None
        except CollectError as error:
            problems = ((error.reason, str(error)),)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - border to the collectors: a fault in one costs only itself
            problems = (("unexpected", _in_words(error)),)
            failure = error
        seconds = max(0.0, self._monotonic() - began)
        with self._publication:
            with self._lock:
                wanted = not (call.expired or call.task.removed or self._stopping)
                call.delivering = wanted
            if wanted and families is not None:
                try:
                    self._publish(call.task.standing.name, families)
                except Exception as error:  # noqa: BLE001 - border to the page: a block it cannot take is the collector's failure
                    families = None
                    problems = (*problems, ("unexpected", _in_words(error)))
                    failure = error
            notices: list[Notice] = []
            with self._lock:
                self._conclude(call, seconds)
                if wanted:
                    standing = call.task.standing
                    notices = standing.judge(problems, wall=self._clock(), error=failure)
                    if families is not None:
                        call.task.publish(self._monotonic())
                        notices += standing.lack(unsupported)
        if notices or not self._workers.busy:  # else there is soon more to tell
            self._changed()
        self._write(notices)

    def _conclude(self, call: Call, seconds: float) -> None:
        name = call.task.standing.name
        del self._calls[name]
        self._families = None
        call.task.standing.spend(seconds)
        task = self._tasks.get(name)  # not always the call's own: it may have been removed and added again
        if task is not None and task.soon:
            self._wake.notify()

    def _write(self, notices: Sequence[Notice]) -> None:
        for notice in notices:
            self._log.log(notice.level, "%s", notice.text)
            if notice.error is not None:
                self._log.debug("the failure in full", exc_info=notice.error)


def _in_words(error: BaseException) -> str:
    """Give class and message, also of an exception that cannot be printed."""
    return "".join(traceback.format_exception_only(error)).strip()
