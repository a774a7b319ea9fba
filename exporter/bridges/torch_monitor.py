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
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, compress, islice, repeat, starmap
from time import monotonic_ns, time
from typing import Any

from exporter.bridges.periodic import Periodic
from exporter.elastic.families import metric_name
from exporter.errors import DefinitionError
from exporter.recording.event_kinds import Kind
from exporter.recording.event_values import check_data
from exporter.recording.events import EVENTS, RECENT_EVENTS
from exporter.recording.handle import RawEvent
from exporter.recording.notices import tell_once
from exporter.recording.stat import Stat, metric
from exporter.recording.values import NOTHING

UNNAMED = "unnamed"
"""The type under which an event of no name is counted."""
QUEUE_EVENTS = 1 << 24
"""Events that may wait, 8 bytes each: what torch can log in 4 seconds in which this thread does not get a turn. The
threads that log need the same interpreter lock, of which each turn lasts 5 ms; in a turn of this one, all is taken."""
LOOK_SECONDS = 0.1
EXIT_SECONDS = 15.0
"""The longest that an exiting process waits until what waits is counted: after a flood of many threads on a machine that has
other work, it may be some millions."""
BUSY_EVENTS = 1024
"""Events that have come meanwhile and are not left for the next look."""
MOST_SERIES = 1000
"""Numbers of Stats that are recorded; beyond them they are passed over, and counted."""
SLICE_EVENTS = 1 << 15
"""Events taken out at once, in a millisecond, while no more than twice as many wait."""
MOST_TOLD = 1 << 14
"""Events of one name and one slice that handlers are told of: more than their queues and the default limit take."""

_WINDOWED = frozenset({"mean", "min", "max", "value"})
_COUNTED = {"count": "samples", "sum": "added"}


class MonitorBridge:
    """Takes the events of torch.monitor out of a queue.

    Args:
        event_class: torch's Event.
        stat_event: The name of the events that are windows of Stats.

    Attributes:
        queue: What torch's handler appends to.
    """

    def __init__(self, event_class: Any, stat_event: str) -> None:
        # The getter of C++, whatever a subclass makes of the attribute.
        self._name_of: Callable[[Any], str] = event_class.name.fget
        self._stat_event = stat_event
        self.queue: deque[Any] = deque(maxlen=QUEUE_EVENTS)
        self._kinds: dict[str, Kind] = {}
        self._series: dict[str, Callable[[float], None] | None] = {}
        self._lost = metric("counter", "training.torch_monitor.overflows")
        self._refused = metric("counter", "training.torch_monitor.refused")

    def step(self) -> None:
        """Take out what is in the queue, and go on while it fills."""
        left = len(self.queue)
        while left > 0 and (waiting := len(self.queue)):
            if waiting == QUEUE_EVENTS:
                self._lost(1)
            # Half of what waits, however many threads log: in a flood, this one must do more in its turn than all others
            # together in theirs, and what it does in one call into C nobody interrupts.
            size = min(waiting, max(SLICE_EVENTS, waiting // 2))
            self._record(list(starmap(self.queue.popleft, repeat((), size))))
            left -= size
            if left <= 0 and len(self.queue) > BUSY_EVENTS:
                left = len(self.queue)

    def forget(self) -> None:
        """In a forked child: what is in the queue is the parent's."""
        self.queue.clear()

    def _record(self, part: Sequence[Any]) -> None:
        names = self._names(part)
        times, latest = Counter(names), dict(zip(names, part, strict=True))
        wanted: dict[str | None, Kind] = {}
        for name, number in times.items():
            if name is None:
                self._refused(number)
                continue
            kind = self._kind(name)
            if kind.enabled:
                kind.occurrences.counter.add(number)
                kind.occurrences.last = _happened(latest[name])
                if kind.routes:
                    wanted[name] = kind
        if self._stat_event in times:
            for event in compress(part, map(self._stat_event.__eq__, names)):
                self._record_window(event)
        for name, event in zip(names[-RECENT_EVENTS:], part[-RECENT_EVENTS:], strict=True):
            if name is not None and name not in wanted and self._kind(name).enabled:
                EVENTS.latest.append(_raw(name, event))
        if wanted:
            self._tell(wanted, times, names, part)

    def _names(self, events: Sequence[Any]) -> Sequence[str | None]:
        try:
            return list(map(self._name_of, events))
        except Exception:  # noqa: BLE001  # C++ may log what is no UTF-8
            return [self._guarded(self._name_of, event) for event in events]

    def _tell(
        self,
        wanted: Mapping[str | None, Kind],
        times: Mapping[str | None, int],
        names: Sequence[str | None],
        part: Sequence[Any],
    ) -> None:
        """Hand on what handlers want, in order; in a flood, the first of each name."""
        told: Iterable[tuple[str | None, Any]]
        if len(part) <= MOST_TOLD:
            told = compress(zip(names, part, strict=True), map(wanted.__contains__, names))
        else:
            of_each = (
                zip(repeat(name), compress(part, map(str(name).__eq__, names)), strict=False)
                for name in wanted
            )
            told = chain.from_iterable(islice(each, MOST_TOLD) for each in of_each)
            for name, kind in wanted.items():
                if times[name] > MOST_TOLD:
                    kind.suppressed["rate_limit"].add(times[name] - MOST_TOLD)
        for name, event in told:
            if wanted[name].admits():
                self._guarded(EVENTS.tell, wanted[name], _raw(str(name), event), event)

    def _kind(self, name: str) -> Kind:
        kind = self._kinds.get(name)
        if kind is None:
            kind = EVENTS.kind(name or UNNAMED, "info")
            if len(self._kinds) < MOST_SERIES:
                self._kinds[name] = kind
        return kind

    def _guarded(self, step: Callable[..., Any], *arguments: object) -> Any:
        try:
            return step(*arguments)
        except Exception as error:  # noqa: BLE001  # an event may be of the job's own class
            tell_once("torch.monitor", f"an event of torch.monitor is not recorded: {error!r}")
            return None

    def _record_window(self, event: Any) -> None:
        data = self._guarded(lambda: list(event.data.items()))
        if data is None:
            self._refused(1)
        for key, value in data or ():
            if key not in self._series and len(self._series) < MOST_SERIES:
                self._series[key] = _series(key)
            add = self._series.get(key)
            if add is None or not isinstance(value, int | float):
                self._refused(1)
            else:
                add(value)


def _raw(name: str, event: Any) -> RawEvent:
    try:
        data = check_data(event.data)
    except Exception:  # noqa: BLE001  # what a class of the job's own has instead
        data = NOTHING
    return name or UNNAMED, None, "info", data, _happened(event), time(), monotonic_ns(), None, ()


def _happened(event: Any) -> float:
    try:
        return float(event.timestamp.timestamp())
    except Exception:  # noqa: BLE001  # a year that Unix time does not reach here, or a class of the job's own
        return time()


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
            add = metric("counter", f"{named.stat}.{_COUNTED[aggregation]}", unit=unit, own=False)
        else:
            text = f"The {aggregation} of each window of a torch.monitor Stat."
            add = Stat(f"{named.stat}.{aggregation}", ["value"], unit=named.unit, help=text).add
    except DefinitionError:
        return None
    return lambda value: add(value * times / per)


def install() -> None:
    """Listen to torch.monitor, which `import torch` loads."""
    from torch import monitor  # noqa: PLC0415  # the job has it, or this is not called

    bridge = MonitorBridge(monitor.Event, monitor.STAT_EVENT)
    handle = monitor.register_event_handler(bridge.queue.append)
    Periodic(
        "exporter-torch-monitor",
        bridge.step,
        seconds=LOOK_SECONDS,
        after_fork=bridge.forget,
        at_exit=lambda: monitor.unregister_event_handler(handle),
        exit_seconds=EXIT_SECONDS,
    )
