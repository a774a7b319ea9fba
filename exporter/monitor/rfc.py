"""Compatibility module of RFC-0018, the origin of torch.monitor: events, handlers and Stats."""

from __future__ import annotations

import inspect
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import asdict, dataclass, field
from os import getpid
from time import monotonic_ns, time
from typing import Any

from exporter.recording.conversion import MAX_CONVERTED_CHARACTERS, Datum
from exporter.recording.event_values import Event as RecordedEvent
from exporter.recording.event_values import (
    RawEvent,
    check_data,
    check_severity,
    check_timestamp,
    check_type,
)
from exporter.recording.events import EVENTS, enabled
from exporter.recording.handle import Adapter, Handle
from exporter.recording.recorder import RECORDER
from exporter.recording.stat import Stat as RecordedStat
from exporter.recording.stat_state import StatState
from exporter.recording.timing import AnyFunction, Timer, within
from exporter.recording.values import Aggregation
from exporter.recording.windows import DoubleDoubleSum, Window

__all__ = [
    "AggregatingStatCollector",
    "Event",
    "EventHandler",
    "Stat",
    "StatCollector",
    "StatType",
    "enabled",
    "log",
    "register",
    "register_stat_collector",
    "unregister",
]

StatType = Aggregation
"""VALUE, MEAN, COUNT, SUM, MAX and MIN; also HISTOGRAM, STDDEV and P50 to P99, from the later version of the RFC."""

MAX_QUEUED_BATCHES = 10_000
"""Maximum number of batches of samples that wait for a collector. Further batches are dropped and counted."""
REPORT_SECONDS = 2.0
"""Maximum time for which a report waits for the flush of the samples, and again for their delivery."""
_RESUMABLE_CHECKS = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
_QUANTILES = frozenset({Aggregation.P50, Aggregation.P90, Aggregation.P95, Aggregation.P99})


@dataclass
class Event:
    """Event, and base class of user-defined events. The keyword-only fields are set in the copies for handlers."""

    type: str  # globally unique name of the type, such as `torch.elastic.RdzvEvent`
    message: str | None = None
    timestamp: float | None = None  # Unix time in seconds; None for the time of logging
    metadata: dict[str, Datum] = field(default_factory=dict)
    severity: str = "info"  # value of an `exporter.Severity`
    monotonic_ns: int = field(default=0, compare=False, kw_only=True)  # monotonic time of logging
    id: str = field(default="", compare=False, kw_only=True)  # 16 hexadecimal digits
    # innermost open span of the logging thread
    span_id: str | None = field(default=None, compare=False, kw_only=True)

    def asdict(self) -> dict[str, Any]:
        """Return the fields as a new dict, including the fields of a subclass that is a dataclass."""
        return asdict(self)


class EventHandler(ABC):
    """Interface of event handlers."""

    @abstractmethod
    def handle(self, event: Event) -> None:
        """Handle an event."""


def log(
    event: Event | str, message: str | None = None, /, *, severity: str | None = None, **metadata: Datum
) -> None:
    """Count an event and deliver the event to all handlers. Accepts an `Event`, or the type, the message and the metadata of an event.

    Raises:
        TypeError: The event or a field is of the wrong type.
        ValueError: The type is empty, the severity is unknown, or an int has more than 64 bits.
    """
    if isinstance(event, str):
        event = Event(event, message, metadata=metadata, severity="info" if severity is None else severity)
    elif not isinstance(event, Event) or message is not None or severity is not None or metadata:
        raise TypeError(f"log takes an Event alone, or a type with a message and metadata, not {event!r}")
    if not isinstance(event.metadata, Mapping):
        raise TypeError(f"the metadata of an event must be a mapping, not {event.metadata!r}")
    if not isinstance(event.message, str | None):
        raise TypeError(f"the message of an event must be str or None, not {event.message!r}")
    type_, severity = check_type(event.type), check_severity(event.severity)
    text, data = event.message and event.message[:MAX_CONVERTED_CHARACTERS], check_data(dict(event.metadata))
    now = time()
    event_time = now if event.timestamp is None else check_timestamp(event.timestamp)
    kind = EVENTS.kind(type_, severity)
    if kind.enabled:
        raw = RawEvent(
            type=type_,
            message=text,
            severity=severity,
            data=data,
            timestamp=event_time,
            logged_at=now,
            monotonic_ns=monotonic_ns(),
            span_id=EVENTS.span_id(),
        )
        EVENTS.record(kind, raw, event_time, event)


def register(handler: EventHandler | Callable[[Event], object]) -> Handle:
    """Deliver copies of all later events to a handler in order, on a thread of the handler. The copies have times and ids.

    Exceptions of the handler are counted. Raises TypeError for an object that is not callable and has no `handle`.
    """
    return EVENTS.register_adapted(handler, Adapter(_rfc_event))


def unregister(handle: Handle) -> None:
    """Unregister a handler or a collector, after its queued events or samples. A second call has no effect."""
    if handle in RECORDER.stats.batch_handlers:
        RECORDER.flush(REPORT_SECONDS)
        RECORDER.stats.batch_handlers.remove(handle)
    EVENTS.unregister(handle)


class Stat(RecordedStat):
    """Named statistic with the options of `exporter.Stat`: `unit`, `help`, `window_seconds`, `labels` and others.

    The same key and definition return the same statistic. Raises DefinitionError for an invalid argument, and for a key with a
    different definition; the message then names the source line of the first definition.
    """

    __slots__ = ()

    def __new__(cls, key: str, aggregations: Iterable[StatType | str], **options: Any) -> Stat:  # noqa: PYI034  # typing has Self from 3.11 on
        """Return the statistic of the key, constructed on first use."""
        return super().__new__(cls, key, aggregations, **options)

    @property
    def key(self) -> str:
        """Name of the statistic."""
        return self.name

    @property
    def aggregations(self) -> frozenset[StatType]:
        """Aggregations of each window."""
        return self.definition.aggregations

    def add_time(self, *, profile: bool = False) -> Timer:
        """Return a context manager and decorator that records durations in seconds. *profile* adds a range of torch.profiler."""
        return _ProfiledTimer(self.key, self.add) if profile else Timer(self.add)


class _ProfiledTimer(Timer):
    """Timer that also records a range of torch.profiler, if the job has loaded torch."""

    __slots__ = ("_name", "_range")

    def __init__(self, name: str, add: Callable[[float], object]) -> None:
        super().__init__(add)
        self._name = name

    def __enter__(self) -> Any:
        profiler = getattr(sys.modules.get("torch"), "profiler", None)
        self._range: Any = nullcontext() if profiler is None else profiler.record_function(self._name)
        self._range.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._range.__exit__(*exception)

    def __call__(self, function: AnyFunction) -> AnyFunction:
        """Decorate a function. Coroutines and generators record no range, because profiler ranges must nest."""
        if any(is_resumable(function) for is_resumable in _RESUMABLE_CHECKS):
            return super().__call__(function)
        return within(lambda: _ProfiledTimer(self._name, self._add), function)


class StatCollector(ABC):
    """Receiver of the samples of the job's Stats, called on a separate thread."""

    @abstractmethod
    def handle(self, stat: Stat, v: float) -> None:
        """Handle a sample, which is a finite number."""


def register_stat_collector(collector: StatCollector) -> Handle:
    """Deliver later samples to a collector, until `unregister`. Batches above `MAX_QUEUED_BATCHES` are dropped and counted.

    Raises:
        TypeError: The collector has no method `handle`.
    """
    if isinstance(collector, type) or not callable(getattr(collector, "handle", None)):
        raise TypeError(f"a collector must be an object with handle(stat, v), not {collector!r}")

    def deliver(batch: tuple[StatState, list[float]]) -> None:
        stat, errors = Stat.from_state(batch[0]), []
        for value in batch[1]:
            try:
                collector.handle(stat, value)
            except Exception as error:  # noqa: BLE001, PERF203  # an error of the collector must not skip samples
                errors.append(error)
        if errors:
            raise errors[0]

    RECORDER.flush(REPORT_SECONDS)
    handle = EVENTS.register(deliver, types=(), queue=MAX_QUEUED_BATCHES, name=type(collector).__qualname__)
    RECORDER.stats.batch_handlers.append(handle)
    if isinstance(collector, AggregatingStatCollector):
        collector._handle = handle  # noqa: SLF001  # a class of this file
    return handle


class AggregatingStatCollector(StatCollector):
    """Collector that aggregates the delivered samples since the last `reset`.

    The collector has a separate window for each Stat, because a report covers the time since the last `reset`, and the quantiles
    of the Stat's own windows cannot be merged.
    """

    def __init__(self) -> None:
        self._handle: Handle | None = None
        self._restart()

    def _restart(self) -> None:
        """Start without samples, in a new collector or in a forked child."""
        self._process = getpid()
        self._lock = threading.RLock()  # reentrant, because a signal handler may report
        self._windows: dict[str, Window] = {}
        self._aggregations: dict[str, frozenset[StatType]] = {}

    def _own_lock(self) -> AbstractContextManager[object]:
        """Return the lock of this process. A forked child starts with a new lock, and without samples."""
        if self._process != getpid():
            self._restart()
        return self._lock

    def handle(self, stat: Stat, v: float) -> None:
        """Aggregate a sample."""
        with self._own_lock():
            if stat.key not in self._windows:
                aggregations = stat.aggregations
                aggregations |= _QUANTILES if StatType.HISTOGRAM in aggregations else frozenset[StatType]()
                self._aggregations[stat.key], self._windows[stat.key] = aggregations, Window(aggregations)
            self._windows[stat.key].add([v], [v], DoubleDoubleSum([v]))

    def report(self) -> dict[str, float]:
        """Return the aggregates of the samples since the last `reset`, by `key.aggregation`.

        HISTOGRAM stands for the quantiles p50, p90, p95 and p99. A Stat without samples is absent, except for a count of 0 after
        a reset.
        """
        self._process_queue()
        with self._own_lock():
            values: dict[str, float] = {}
            for key, window in self._windows.items():
                if StatType.COUNT in self._aggregations[key]:
                    values[f"{key}.count"] = float(window.samples)
                values.update(
                    {f"{key}.{aggregation.value}": value for aggregation, value in window.values().items()}
                )
            return values

    def reset(self) -> None:
        """Discard all samples."""
        self._process_queue()
        with self._own_lock():
            self._windows = {key: Window(aggregations) for key, aggregations in self._aggregations.items()}

    def _process_queue(self) -> None:
        """Wait for the delivery of the samples that were added so far, at most twice `REPORT_SECONDS`."""
        if self._handle is not None:
            RECORDER.flush(REPORT_SECONDS)
            self._handle.drain(REPORT_SECONDS)


def _rfc_event(event: RecordedEvent, origin: object) -> Event:
    """Return a copy of the logged event, or the event of another module, with times and ids."""
    if isinstance(origin, Event):
        rfc_event = copy(origin)
    else:
        rfc_event = Event(event.type, event.message, metadata=dict(event.data), severity=event.severity)
    for name in ("timestamp", "monotonic_ns", "id", "span_id"):
        setattr(rfc_event, name, getattr(event, name))
    return rfc_event
