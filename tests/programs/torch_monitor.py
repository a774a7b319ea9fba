"""Programs that use torch.monitor itself. The bridge records the events."""

from __future__ import annotations

import datetime as dt
import threading
import time

from torch import monitor

import exporter
from exporter import bridges


def log_from_three_threads() -> None:
    """Log events from three threads for two seconds, and print how many of the threads' events were built before and in the loop."""
    bridges.install("monitor")
    exporter.events.register(lambda _event: None, types="built", name="delivered")
    now = dt.datetime.now()  # noqa: DTZ005  # torch's events have naive datetimes
    prebuilt_event = monitor.Event("prebuilt", now, {"a": 1})
    stat = monitor.Stat("flood", [monitor.Aggregation.COUNT], 0.01)
    deadline, counts = time.monotonic() + 2, {True: 0, False: 0}
    counts_lock = threading.Lock()

    def log(is_built: bool) -> None:
        logged_events = 0
        while time.monotonic() < deadline:
            for _ in range(500):
                monitor.log_event(monitor.Event("built", now, {}) if is_built else prebuilt_event)
            stat.add(1.0)
            logged_events += 500
        with counts_lock:
            counts[is_built] += logged_events

    threads = [threading.Thread(target=log, args=(is_built,)) for is_built in (False, True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(counts[False], counts[True])
