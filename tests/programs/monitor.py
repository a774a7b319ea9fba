"""Programs that use the compatibility module of torch.monitor from threads and forked children."""

from __future__ import annotations

import datetime as dt
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from exporter import monitor
from exporter.monitor import Aggregation
from exporter.monitor.rfc import AggregatingStatCollector, Stat, StatType, register_stat_collector
from exporter.recording.events import EVENTS


def log_and_add_from_two_threads(path: str) -> None:
    """Log 6,000 events and add to a Stat from two threads while a handler writes each event to a file."""
    with Path(path).open("w", encoding="utf-8") as file:

        def write(event: monitor.Event) -> None:
            file.write(event.name + "\n")
            file.flush()

        handle = monitor.register_event_handler(write)

        def work() -> None:
            stat = monitor.Stat("shared", [Aggregation.SUM], 0.001)
            for number in range(3000):
                now = dt.datetime.now()  # noqa: DTZ005  # torch's events have naive datetimes
                monitor.log_event(monitor.Event("e", now, {"n": number}))
                stat.add(1.0)
                if number % 300 == 0:
                    time.sleep(0.01)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        monitor.unregister_event_handler(handle)
    reading = EVENTS.reading()
    ((handler, delivered_events),) = reading.delivered.items()
    dropped_events = sum(number for (name, _), number in reading.dropped.items() if name == handler)
    assert reading.counts["e", "info"] == 6000
    counted_events = sum(reading.counts.values()) - sum(reading.suppressed.values())
    assert delivered_events + dropped_events == counted_events


def fork_with_an_open_window() -> None:
    """Fork with two samples in the open window of a Stat. Parent and child check their own samples."""
    events: list[monitor.Event] = []
    monitor.register_event_handler(events.append)
    stat = monitor.Stat("d19", [Aggregation.SUM, Aggregation.COUNT], 3600.0)
    stat.add(1.0)
    stat.add(2.0)
    if os.fork() == 0:
        assert stat.count == 0
        stat.add(10.0)
        del stat
        os._exit(0 if events[-1].data == {"d19.sum": 10.0, "d19.count": 1.0} else 1)
    assert os.wait()[1] == 0
    del stat
    assert [event.data for event in events] == [{"d19.sum": 3.0, "d19.count": 2.0}]


def fork_while_a_collector_is_locked() -> None:
    """Fork while a second thread holds the lock of a collector, and print the report of the child."""
    stat, collector = Stat("forked", {StatType.SUM}), AggregatingStatCollector()
    register_stat_collector(collector)
    stat.add(1.0)
    assert collector.report() == {"forked.sum": 1.0}
    is_locked, release = threading.Event(), threading.Event()

    def hold() -> None:
        with collector._lock:
            is_locked.set()
            release.wait(60)

    threading.Thread(target=hold, daemon=True).start()
    is_locked.wait(60)
    child = os.fork()
    if child == 0:
        stat.add(5.0)
        print(collector.report(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    release.set()


def _event(name: str, **data: int) -> monitor.Event:
    now = dt.datetime.now()  # noqa: DTZ005  # torch's events have naive datetimes
    return monitor.Event(name, now, {**data})


def log_into_each_others_handlers() -> None:
    """Log from two threads whose handlers log too, and print the number of handled events."""

    def make_handler(name: str) -> Callable[[monitor.Event], None]:
        def handle(event: monitor.Event) -> None:
            depth = event.data["depth"]
            assert isinstance(depth, int)
            if depth < 3:
                monitor.log_event(_event(name, depth=depth + 1))

        return handle

    def work(name: str) -> None:
        for _ in range(100):
            monitor.log_event(_event(name, depth=2))

    names = ("one", "two")
    handles = [monitor.register_event_handler(make_handler(name)) for name in names]
    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for handle in handles:
        monitor.unregister_event_handler(handle)
    print(sum(handle.delivered for handle in handles))


def log_from_a_signal_handler() -> None:
    """Log from a signal handler while the main thread logs, and print whether each event was handled before the call returned."""
    received_names: list[str] = []
    checks: list[bool] = []

    def log_from_signal(*_: object) -> None:
        monitor.log_event(_event("signal"))
        checks.append(received_names.count("signal") == len(checks) + 1)
        signal.setitimer(signal.ITIMER_REAL, 0.002)  # the next signal comes after this handler

    handle = monitor.register_event_handler(lambda event: received_names.append(event.name))
    signal.signal(signal.SIGALRM, log_from_signal)
    signal.setitimer(signal.ITIMER_REAL, 0.002)
    while len(checks) < 50:
        monitor.log_event(_event("loop"))
    signal.setitimer(signal.ITIMER_REAL, 0)
    monitor.unregister_event_handler(handle)
    print(all(checks))


def add_from_a_signal_handler() -> None:
    """Add to a Stat in the main thread and in a signal handler. Check that the windows have all samples."""
    stat = monitor.Stat("signals", [Aggregation.COUNT], None, 200)
    window_counts: list[float] = []
    handler_adds = loop_adds = 0

    def add_count(event: monitor.Event) -> None:
        window_counts.append(float(event.data["signals.count"]))

    def add_from_signal(*_: object) -> None:
        nonlocal handler_adds
        stat.add(1.0)
        handler_adds += 1

    handle = monitor.register_event_handler(add_count)
    signal.signal(signal.SIGALRM, add_from_signal)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        stat.add(1.0)
        loop_adds += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    monitor.unregister_event_handler(handle)
    assert handler_adds > 0
    assert sum(window_counts) + stat.count == handler_adds + loop_adds
