"""The bridge to torch.monitor: its events, and the windows of its Stats.

Used in the training process. torch calls handlers on the thread that logs, under locks of its own, and a handler in
Python can make two threads wait for each other for ever. So the handler is `deque.append`, which runs no Python; a thread
of the bridge takes the events out. The handler is unregistered once, before the interpreter ends: torch crashes the
process otherwise.

An event counts in `training_events_total` and goes to the handlers of `exporter.events`. The windows of a Stat `train.step`
become the Stats `train.step.mean`, `.min`, `.max` and `.value`, and the counters `train.step.samples` and `.added`; a name
that ends in a unit is treated as in `exporter.elastic.metrics`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, repeat, starmap
from time import monotonic_ns, time
from typing import Any

from exporter.bridges.periodic import Periodic
from exporter.elastic.metrics.naming import metric_name
from exporter.errors import DefinitionError
from exporter.recording.event_kinds import Kind
from exporter.recording.event_values import check_data
from exporter.recording.events import EVENTS
from exporter.recording.notices import tell_once
from exporter.recording.plain import plain
from exporter.recording.stat import Stat

QUEUE_EVENTS = 1 << 20
"""Events that may wait: a tenth of a second of the most that torch can log."""
LOOK_SECONDS = 0.1
BUSY_EVENTS = 1024
"""Events that have come meanwhile and are not left for the next look."""
MOST_SERIES = 1000
"""Numbers of Stats that are recorded; beyond them they are passed over, and counted."""
SLICE_EVENTS = 1 << 18
"""Events taken out at once, in a few milliseconds: in a flood, as much as others log while this thread waits."""

_WINDOWED = frozenset({"mean", "min", "max", "value"})
_COUNTED = {"count": "samples", "sum": "added"}


class MonitorBridge:
    """Takes the events of torch.monitor out of a queue.

    Args:
        stat_event: The name of the events that are windows of Stats.

    Attributes:
        queue: What torch's handler appends to.
    """

    def __init__(self, stat_event: str) -> None:
        self._stat_event = stat_event
        self.queue: deque[Any] = deque(maxlen=QUEUE_EVENTS)
        self._kinds: dict[str, Kind] = {}
        self._series: dict[str, Callable[[float], None] | None] = {}
        self._lost = plain("counter", "training.torch_monitor.overflows")
        self._refused = plain("counter", "training.torch_monitor.refused")

    def step(self) -> None:
        """Take out what is in the queue, and go on while it fills."""
        waiting = len(self.queue)
        while waiting:
            if waiting == QUEUE_EVENTS:
                self._lost(1)
            # Loops in C: in a flood, this thread must do more in its turn than the others do in theirs.
            batch = list(starmap(self.queue.popleft, repeat((), min(waiting, SLICE_EVENTS))))
            self._record(_counted(batch))
            waiting = len(self.queue)
            waiting *= waiting > BUSY_EVENTS

    def forget(self) -> None:
        """In a forked child: what is in the queue is the parent's."""
        self.queue.clear()

    def _record(self, batch: Iterable[tuple[Any, int]]) -> None:
        latest: dict[str, Any] = {}
        times_by_name: dict[str, int] = {}
        for event, times in batch:
            try:
                name = event.name
                if name == self._stat_event:
                    for key, value in event.data.items():
                        self._record_number(key, value, times)
                if self._kind(name).routes == ():
                    latest[name] = event
                    times_by_name[name] = times_by_name.get(name, 0) + times
                else:
                    self._tell(name, event, times)
            except Exception as error:  # noqa: BLE001, PERF203  # an event may be of the job's own class
                self._refused(times)
                tell_once("torch.monitor", f"an event of torch.monitor is not recorded: {error!r}")
        for name, times in times_by_name.items():
            kind = self._kind(name)
            if kind.enabled:
                deque(islice(iter(kind.count, None), times), maxlen=0)
                kind.occurrences.last = latest[name].timestamp.timestamp()

    def _tell(self, name: str, event: Any, times: int) -> None:
        """Hand on what handlers want."""
        kind = self._kind(name)
        happened = event.timestamp.timestamp()
        raw = (
            name or "unnamed",
            None,
            "info",
            check_data(event.data),
            happened,
            time(),
            monotonic_ns(),
            None,
            (),
        )
        for _ in range(times if kind.enabled else 0):
            if kind.admits(kind.count()):
                EVENTS.tell(kind, raw, event)
            kind.occurrences.last = happened

    def _kind(self, name: str) -> Kind:
        kind = self._kinds.get(name)
        if kind is None:
            kind = EVENTS.kind(name or "unnamed", "info")
            if len(self._kinds) < MOST_SERIES:
                self._kinds[name] = kind
        return kind

    def _record_number(self, key: str, value: object, times: int) -> None:
        if key not in self._series:
            if len(self._series) >= MOST_SERIES:
                self._refused(1)
                return
            self._series[key] = _series(key)
        add = self._series[key]
        if add is None or not isinstance(value, int | float):
            self._refused(1)
            return
        for _ in range(times):
            add(value)


def _counted(batch: Sequence[Any]) -> Iterable[tuple[Any, int]]:
    """Tell how often each object is in a batch."""
    try:
        return Counter(batch).items()
    except Exception:  # noqa: BLE001  # a class of the job's own, with a __hash__ or none
        return [(event, 1) for event in batch]


def _series(key: str) -> Callable[[float], None] | None:
    """What takes the values of one number of a Stat; None when its name cannot be used."""
    name, _, aggregation = key.rpartition(".")
    named = metric_name(None, name)
    if named is None or aggregation not in _WINDOWED | _COUNTED.keys():
        return None
    times, per = (1.0, 1.0) if aggregation == "count" else (named.times, named.per)
    try:
        if aggregation in _COUNTED:
            unit = None if aggregation == "count" else named.unit
            add = plain("counter", f"{named.stat}.{_COUNTED[aggregation]}", unit=unit, own=False)
        else:
            text = f"The {aggregation} of each window of a torch.monitor Stat."
            add = Stat(f"{named.stat}.{aggregation}", ["value"], unit=named.unit, help=text).add
    except DefinitionError:
        return None
    return lambda value: add(value * times / per)


def install() -> None:
    """Listen to torch.monitor, which `import torch` loads."""
    from torch import monitor  # noqa: PLC0415  # the job has it, or this is not called

    bridge = MonitorBridge(monitor.STAT_EVENT)
    handle = monitor.register_event_handler(bridge.queue.append)
    Periodic(
        "exporter-torch-monitor",
        bridge.step,
        seconds=LOOK_SECONDS,
        after_fork=bridge.forget,
        at_exit=lambda: monitor.unregister_event_handler(handle),
    )
