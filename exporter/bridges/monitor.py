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
MOST_DELIVERED = 1 << 12
"""First events of a slice, which handlers and `recent` receive; all events are counted."""
MOST_SERIES = 1000
"""Maximum number of recorded series; values of further series are dropped and counted."""

_WINDOWED = {"mean", "min", "max", "value"}
_COUNTED = {"count": "samples", "sum": "added"}


class MonitorBridge:
    """Queue of torch.monitor's events; events named `stat_event` are windows of Stats."""

    def __init__(self, event_class: Any, stat_event: str) -> None:
        # The getter in C++: a subclass may override the attribute.
        self._name_of: Callable[[Any], str] = event_class.name.fget
        self._stat_event = stat_event
        self.queue: deque[Any] = deque(maxlen=QUEUE_EVENTS)  # filled by torch's handler
        self._series: dict[str, Callable[[float], None] | None] = {}
        self._lost = metric("counter", "training.torch_monitor.overflows")
        self._refused = metric("counter", "training.torch_monitor.refused")

    def look(self) -> None:
        """Drain the queue in slices, until less than a full slice waits."""
        while waiting := len(self.queue):
            if waiting == QUEUE_EVENTS:
                self._lost(1)
            # Half of a flood in an uninterrupted call into C; the logging threads run in between.
            size = min(waiting, max(SLICE_EVENTS, waiting // 2))
            self._record(list(starmap(self.queue.popleft, repeat((), size))))
            if waiting < SLICE_EVENTS:
                break

    def _record(self, part: list[Any]) -> None:
        try:
            names = list(map(self._name_of, part))
        except Exception:  # noqa: BLE001  # C++ may log what is no UTF-8
            self._refused(len(part))
            return
        for name, number in Counter(names[MOST_DELIVERED:]).items():
            kind = EVENTS.kind(name or UNNAMED, "info")
            if kind.enabled:
                kind.counter.add(number)
                kind.counting_kind.last = time()
                if kind.handlers:
                    kind.suppressed_events["rate_limit"].add(number)
        for name, event in zip(names[:MOST_DELIVERED], part, strict=False):
            raw = _raw(name, event)
            kind = EVENTS.kind(raw.type, "info")
            if kind.enabled:
                EVENTS.record(kind, raw, raw.timestamp, event)
        for name, event in zip(names, part, strict=True):
            if name == self._stat_event:
                self._record_window(event)

    def _record_window(self, event: Any) -> None:
        try:
            data = list(event.data.items())
        except Exception as error:  # noqa: BLE001  # an event may be of the job's own class
            log_once("torch.monitor", f"an event of torch.monitor is not recorded: {error!r}")
            data = [("", None)]
        for key, value in data:
            if key not in self._series and len(self._series) < MOST_SERIES:
                self._series[key] = _series(key)
            add = self._series.get(key)
            if add is None or not isinstance(value, int | float):
                self._refused(1)
            else:
                add(value)


def _raw(name: str, event: Any) -> RawEvent:
    try:
        data, happened = check_data(event.data), float(event.timestamp.timestamp())
    except Exception:  # noqa: BLE001  # what a class of the job's own has instead, or a year beyond Unix time
        data, happened = {}, time()
    return RawEvent(name or UNNAMED, None, "info", data, happened, time(), monotonic_ns())


def _series(key: str) -> Callable[[float], None] | None:
    """Return the function that records a value of a Stat, or None if the name is invalid."""
    name, _, aggregation = key.rpartition(".")
    named = metric_name(None, name)
    if named is None or aggregation not in _WINDOWED | _COUNTED.keys():
        return None
    times = 1.0 if aggregation == "count" else named.factor
    unit = None if aggregation == "count" else named.unit
    try:
        if aggregation in _COUNTED:
            add = metric("counter", f"{named.stat}.{_COUNTED[aggregation]}", unit=unit, is_own=False)
        else:
            text = f"The {aggregation} of each window of a torch.monitor Stat."
            add = Stat(f"{named.stat}.{aggregation}", ["value"], unit=unit, help=text).add
    except DefinitionError:
        return None
    return lambda value: add(value * times)


def install() -> None:
    """Listen to torch.monitor, which `import torch` loads."""
    from torch import monitor  # noqa: PLC0415  # the job has it, or this is not called

    bridge = MonitorBridge(monitor.Event, monitor.STAT_EVENT)
    handle = monitor.register_event_handler(bridge.queue.append)
    Periodic(
        "torch-monitor",
        bridge.look,
        seconds=0.0,  # at every tick of the recording thread, four times a second
        after_fork=bridge.queue.clear,
        at_exit=lambda: monitor.unregister_event_handler(
            handle
        ),  # once, or torch crashes the exiting process
    )
