"""Bridge to torch.monitor: events and windows of Stats; docs/torchelastic.md lists the families.

Used in the training process. torch calls handlers under torch's locks, where a handler in Python can deadlock two
threads. The handler is therefore `deque.append`, and a thread of the bridge drains the events.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from itertools import repeat, starmap
from time import monotonic_ns, time
from typing import Any

from exporter.bridges.periodic import Periodic
from exporter.elastic.families import metric_name
from exporter.errors import DefinitionError
from exporter.recording.event_values import RawEvent, check_data
from exporter.recording.events import EVENTS
from exporter.recording.notices import log_once
from exporter.recording.stat import Stat, metric

UNNAMED = "unnamed"
QUEUE_EVENTS = 1 << 22
"""Capacity of the queue, 8 bytes per event: as many events as torch can log in a second."""
SLICE_EVENTS = 1 << 15
"""Events drained per slice, in about a millisecond."""
MAX_DELIVERED_EVENTS = 1 << 12
"""Number of events of a slice that handlers and `recent` receive. All events are counted."""
MAX_SERIES = 1000
"""Maximum number of recorded series. Values of further series are dropped and counted."""

_WINDOW_AGGREGATIONS = {"mean", "min", "max", "value"}
_TOTALS = {"count": "samples", "sum": "added"}
"""Aggregations that become counters, and the suffixes of their names."""


class MonitorBridge:
    """Queue of torch.monitor's events; events named `stat_event` are windows of Stats."""

    def __init__(self, event_class: Any, stat_event: str) -> None:
        # The getter in C++: a subclass may override the attribute.
        self._name_of: Callable[[Any], str] = event_class.name.fget
        self._stat_event = stat_event
        self.queue: deque[Any] = deque(maxlen=QUEUE_EVENTS)  # filled by torch's handler
        self._series: dict[str, Callable[[float], None] | None] = {}
        self._count_overflow = metric("counter", "training.torch_monitor.overflows")
        self._count_refused = metric("counter", "training.torch_monitor.refused")

    def drain(self) -> None:
        """Drain the queue in slices, until less than a full slice waits."""
        while waiting := len(self.queue):
            if waiting == QUEUE_EVENTS:
                self._count_overflow(1)
            # Half of a flood in an uninterrupted call into C; the logging threads run in between.
            size = min(waiting, max(SLICE_EVENTS, waiting // 2))
            self._record(list(starmap(self.queue.popleft, repeat((), size))))
            if waiting < SLICE_EVENTS:
                break

    def _record(self, events: list[Any]) -> None:
        try:
            names = list(map(self._name_of, events))
        except Exception:  # noqa: BLE001  # C++ may log names that are not UTF-8
            self._count_refused(len(events))
            return
        for name, number in Counter(names[MAX_DELIVERED_EVENTS:]).items():
            kind = EVENTS.kind(name or UNNAMED, "info")
            if kind.enabled:
                kind.counter.add(number)
                kind.counting_kind.last = time()
                if kind.handlers:
                    kind.suppressed_events["rate_limit"].add(number)
        for name, event in zip(names[:MAX_DELIVERED_EVENTS], events, strict=False):
            raw = _raw(name, event)
            kind = EVENTS.kind(raw.type, "info")
            if kind.enabled:
                EVENTS.record(kind, raw, raw.timestamp, event)
        for name, event in zip(names, events, strict=True):
            if name == self._stat_event:
                self._record_window(event)

    def _record_window(self, event: Any) -> None:
        try:
            data = list(event.data.items())
        except Exception as error:  # noqa: BLE001  # an event may be of the job's own class
            log_once("torch.monitor", f"an event of torch.monitor is not recorded: {error!r}")
            data = [("", None)]
        for key, value in data:
            if key not in self._series and len(self._series) < MAX_SERIES:
                self._series[key] = _series(key)
            add = self._series.get(key)
            if add is None or not isinstance(value, int | float):
                self._count_refused(1)
            else:
                add(value)


def _raw(name: str, event: Any) -> RawEvent:
    try:
        data, unix_seconds = check_data(event.data), float(event.timestamp.timestamp())
    except Exception:  # noqa: BLE001  # a class of the job may have other attributes, or a year beyond Unix time
        data, unix_seconds = {}, time()
    return RawEvent(name or UNNAMED, None, "info", data, unix_seconds, time(), monotonic_ns())


def _series(key: str) -> Callable[[float], None] | None:
    """Return the function that records a value of a Stat, or None if the name is invalid."""
    name, _, aggregation = key.rpartition(".")
    family = metric_name(None, name)
    if family is None or aggregation not in _WINDOW_AGGREGATIONS | _TOTALS.keys():
        return None
    times = 1.0 if aggregation == "count" else family.factor
    unit = None if aggregation == "count" else family.unit
    try:
        if aggregation in _TOTALS:
            add = metric(
                "counter", f"{family.stat}.{_TOTALS[aggregation]}", unit=unit, is_exporter_family=False
            )
        else:
            text = f"The {aggregation} of each window of a torch.monitor Stat."
            add = Stat(f"{family.stat}.{aggregation}", ["value"], unit=unit, help=text).add
    except DefinitionError:
        return None
    return lambda value: add(value * times)


def install() -> None:
    """Listen to torch.monitor, which `import torch` loads."""
    from torch import monitor  # noqa: PLC0415  # called only in a job that has loaded torch

    bridge = MonitorBridge(monitor.Event, monitor.STAT_EVENT)
    handle = monitor.register_event_handler(bridge.queue.append)
    Periodic(
        "torch-monitor",
        bridge.drain,
        seconds=0.0,  # at every tick of the recording thread, four times a second
        after_fork=bridge.queue.clear,
        at_exit=lambda: monitor.unregister_event_handler(
            handle
        ),  # once, or torch crashes the exiting process
    )
