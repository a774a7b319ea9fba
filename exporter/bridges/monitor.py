"""Bridge to torch.monitor: events and windows of Stats; docs/torchelastic.md lists the families.

Used in the training process. torch calls its handlers while it holds locks, so a handler in Python can deadlock two threads. The
handler is therefore `deque.append`, a single call into C, and a thread of the bridge processes the events.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from itertools import repeat, starmap
from time import monotonic_ns, time
from typing import Any

from exporter.bridges.periodic import Periodic
from exporter.elastic.families import find_stat_name
from exporter.errors import DefinitionError
from exporter.recording.event_values import RawEvent, check_data
from exporter.recording.events import EVENTS
from exporter.recording.notices import log_once
from exporter.recording.stat import Stat, create_series

UNNAMED = "unnamed"
"""Type of an event with an empty name."""
QUEUE_EVENTS = 1 << 22
"""Capacity of the queue: about the events that torch can log in a second. An entry takes 8 bytes."""
SLICE_EVENTS = 1 << 15
"""Minimum number of events that are taken from the queue at once, if available. Taking them lasts about a millisecond."""
MAX_DELIVERED_EVENTS = 1 << 12
"""Number of events of a poll that handlers and `recent` receive.

Further events are only counted, so that the last poll can process a long queue within the time limit of the exit.
"""
MAX_SERIES = 1000
"""Maximum number of recorded series. Values of further series are dropped and counted."""

_WINDOW_AGGREGATIONS = {"mean", "min", "max", "value"}
_TOTALS = {"count": "samples", "sum": "added"}
"""Suffix of the counter's name, by the aggregation that becomes a counter."""


class MonitorBridge:
    """Queue of torch.monitor's events.

    Args:
        event_class: torch's class of events.
        stat_event: Name of the events that are windows of Stats.
    """

    def __init__(self, event_class: Any, stat_event: str) -> None:
        # The getter in C++, because a subclass of the job may override the attribute.
        self._name_of: Callable[[Any], str] = event_class.name.fget
        self._stat_event = stat_event
        self.queue: deque[Any] = deque(maxlen=QUEUE_EVENTS)  # filled by torch's handler
        # Function that records a value, by the key of the value in a window; None for an invalid key.
        self._series: dict[str, Callable[[float], None] | None] = {}
        self._count_overflow = create_series("counter", "training.torch_monitor.overflows")
        self._count_refused = create_series("counter", "training.torch_monitor.refused")

    def drain(self) -> None:
        """Process the queue in slices, until less than a full slice is queued."""
        remaining_deliveries = MAX_DELIVERED_EVENTS
        while queued_count := len(self.queue):
            if queued_count == QUEUE_EVENTS:
                self._count_overflow(1)
            # Half of a long queue is taken in a single call into C. The threads that log events run between two calls.
            slice_size = min(queued_count, max(SLICE_EVENTS, queued_count // 2))
            self._record(list(starmap(self.queue.popleft, repeat((), slice_size))), remaining_deliveries)
            remaining_deliveries = max(0, remaining_deliveries - slice_size)
            if queued_count < SLICE_EVENTS:
                break

    def _record(self, events: list[Any], max_delivered: int) -> None:
        """Record events. The first *max_delivered* events are delivered to handlers, further events are only counted."""
        try:
            names = list(map(self._name_of, events))
        except Exception:  # noqa: BLE001  # C++ may log names that are not UTF-8
            self._count_refused(len(events))
            return
        self._count_undelivered(names[max_delivered:])
        for name, event in zip(names[:max_delivered], events, strict=False):
            raw_event = _raw_event(name, event)
            kind = EVENTS.kind(raw_event.type, "info")
            if kind.enabled:
                EVENTS.record(kind, raw_event, raw_event.timestamp, event)
        for name, event in zip(names, events, strict=True):
            if name == self._stat_event:
                self._record_window(event)

    @staticmethod
    def _count_undelivered(names: list[str]) -> None:
        """Count events that no handler receives, by name. If there are handlers, also count the events as suppressed."""
        for name, count in Counter(names).items():
            kind = EVENTS.kind(name or UNNAMED, "info")
            if kind.enabled:
                kind.counter.add(count)
                kind.counting_kind.last_time = time()
                if kind.handlers:
                    kind.suppressed_counts["rate_limit"].add(count)

    def _record_window(self, event: Any) -> None:
        """Record the values of a window of Stats. Count the values that cannot be recorded."""
        try:
            data = list(event.data.items())
        except Exception as error:  # noqa: BLE001  # the event may be of a class of the job
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


def _raw_event(name: str, event: Any) -> RawEvent:
    """Return the event with the data and the time of torch's event; without data and at the current time if they are invalid."""
    try:
        data, unix_seconds = check_data(event.data), float(event.timestamp.timestamp())
    except Exception:  # noqa: BLE001  # a class of the job may have other attributes, or a year that is no Unix time
        data, unix_seconds = {}, time()
    return RawEvent(
        type=name or UNNAMED,
        message=None,
        severity="info",
        data=data,
        timestamp=unix_seconds,
        logged_at=time(),
        monotonic_ns=monotonic_ns(),
    )


def _series(key: str) -> Callable[[float], None] | None:
    """Return the function that records a value under the key `STAT.AGGREGATION` of a window, or None for an invalid key."""
    name, _, aggregation = key.rpartition(".")
    stat_name = find_stat_name(None, name)
    if stat_name is None or aggregation not in _WINDOW_AGGREGATIONS | _TOTALS.keys():
        return None
    factor = 1.0 if aggregation == "count" else stat_name.factor
    unit = None if aggregation == "count" else stat_name.unit
    try:
        if aggregation in _TOTALS:
            add = create_series(
                "counter", f"{stat_name.stat}.{_TOTALS[aggregation]}", unit=unit, is_exporter_family=False
            )
        else:
            text = f"The {aggregation} of each window of a torch.monitor Stat."
            add = Stat(f"{stat_name.stat}.{aggregation}", ["value"], unit=unit, help=text).add
    except DefinitionError:
        return None
    return lambda value: add(value * factor)


def install() -> None:
    """Register a handler with torch.monitor, which `import torch` loads."""
    from torch import monitor  # noqa: PLC0415  # called only in a job that has loaded torch

    bridge = MonitorBridge(monitor.Event, monitor.STAT_EVENT)
    handle = monitor.register_event_handler(bridge.queue.append)
    Periodic(
        "torch-monitor",
        bridge.drain,
        seconds=0.0,  # at every tick of the recording thread, twice a second
        after_fork=bridge.queue.clear,
        # Called once, because torch crashes the process at a second call for the same handler. Without the call, torch would
        # release the queued events after the end of the interpreter, which crashes the process too.
        at_exit=lambda: monitor.unregister_event_handler(handle),
    )
