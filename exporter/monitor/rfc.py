"""Compatibility module of RFC-0018, the origin of torch.monitor, over the events, handlers and Stats of this package."""

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

from exporter.recording.conversion import MAX_TEXT_CHARACTERS, Datum
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
from exporter.recording.state import StatState
from exporter.recording.timing import AnyFunction, Timer, within
from exporter.recording.values import Aggregation
from exporter.recording.windows import Window

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
"""VALUE, MEAN, COUNT, SUM, MAX, MIN; HISTOGRAM, STDDEV and P50 to P99 of the RFC's later version."""

QUEUED_BATCHES = 10_000
"""Queued batches of samples per collector; further batches are dropped and counted."""
REPORT_SECONDS = 2.0
_RUN_IN_PIECES = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
_QUANTILES = frozenset({Aggregation.P50, Aggregation.P90, Aggregation.P95, Aggregation.P99})


@dataclass
class Event:
    """Event, and base of user-defined types of events; fields for handlers are keyword-only."""

    type: str  # a globally unique type name: `torch.elastic.RdzvEvent`
    message: str | None = None
    timestamp: float | None = None  # Unix time in seconds; None for the time of logging
    metadata: dict[str, Datum] = field(default_factory=dict)
    severity: str = "info"  # a name of `exporter.Severity`
    monotonic_ns: int = field(default=0, compare=False, kw_only=True)  # time of logging
    id: str = field(default="", compare=False, kw_only=True)  # 16 hexadecimal digits
    span_id: str | None = field(default=None, compare=False, kw_only=True)

    def asdict(self) -> dict[str, Any]:
        """Return the fields, also those of a dataclass subclass, as a new dict."""
        return asdict(self)


class EventHandler(ABC):
    """Interface of event handlers."""

    @abstractmethod
    def handle(self, event: Event) -> None:
        """Handle an event."""


def log(
    event: Event | str, message: str | None = None, /, *, severity: str | None = None, **metadata: Datum
) -> None:
    """Count an event and deliver the event to all handlers; a type with a message and metadata makes an Event.

    Raises:
        TypeError: The event or a field is of the wrong type.
        ValueError: The type is empty, the severity unknown, or an int has more than 64 bits.
    """
    if isinstance(event, str):
        event = Event(event, message, metadata=metadata, severity="info" if severity is None else severity)
    elif not isinstance(event, Event) or (message, severity) != (None, None) or metadata:
        raise TypeError(f"log takes an Event alone, or a type with a message and metadata, not {event!r}")
    if not isinstance(event.metadata, Mapping):
        raise TypeError(f"the metadata of an event must be a mapping, not {event.metadata!r}")
    if not isinstance(event.message, str | None):
        raise TypeError(f"the message of an event must be str or None, not {event.message!r}")
    type_, severity = check_type(event.type), check_severity(event.severity)
    text, data = event.message and event.message[:MAX_TEXT_CHARACTERS], check_data(dict(event.metadata))
    now = time()
    happened = now if event.timestamp is None else check_timestamp(event.timestamp)
    kind = EVENTS.kind(type_, severity)
    if kind.enabled:
        raw = RawEvent(type_, text, severity, data, happened, now, monotonic_ns(), EVENTS.span_id())
        EVENTS.record(kind, raw, happened, event)


def register(handler: EventHandler | Callable[[Event], object]) -> Handle:
    """Deliver copies of all events, with times and ids, to a handler, in order, on the handler's thread.

    Exceptions of the handler are counted. Raises TypeError for an object that is not callable and has no `handle`.
    """
    return EVENTS.register_adapted(handler, Adapter(_adapted))


def unregister(handle: Handle) -> None:
    """Unregister a handler or a collector; a second call is harmless."""
    if handle in RECORDER.stats.taps:
        RECORDER.flush(REPORT_SECONDS)
        RECORDER.stats.taps.remove(handle)
    EVENTS.unregister(handle)


class Stat(RecordedStat):
    """Named statistic with the options of `exporter.Stat`: `unit`, `help`, `window_seconds`, `labels` and others.

    The same key and aggregations return the same statistic. Raises DefinitionError for an invalid argument and for a key with
    another definition; the message names the place of the first definition.
    """

    __slots__ = ()

    def __new__(cls, key: str, aggregations: Iterable[StatType | str], **options: Any) -> Stat:  # noqa: PYI034  # typing has Self from 3.11 on
        """Return the statistic, constructed now or earlier."""
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
        """Time a `with` block or each call of a decorated function, in seconds; with *profile* also as a range of torch.profiler."""
        return _ProfiledTimer(self.key, self.add) if profile else Timer(self.add)


class _ProfiledTimer(Timer):
    """Timer that is also a range of torch's profiler, if the job has loaded torch."""

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
        """Decorate a function; coroutines and generators get no range, because ranges of the profiler must nest."""
        if any(each(function) for each in _RUN_IN_PIECES):
            return super().__call__(function)
        return within(lambda: _ProfiledTimer(self._name, self._add), function)


class StatCollector(ABC):
    """Receiver of every sample of every Stat of this package, on the collector's thread."""

    @abstractmethod
    def handle(self, stat: Stat, v: float) -> None:
        """Handle a sample, a finite number."""


def register_stat_collector(collector: StatCollector) -> Handle:
    """Deliver every later sample to a collector, until `unregister`; raises TypeError for an object without `handle`."""
    if isinstance(collector, type) or not callable(getattr(collector, "handle", None)):
        raise TypeError(f"a collector must be an object with handle(stat, v), not {collector!r}")

    def deliver(batch: tuple[StatState, list[float]]) -> None:
        stat, errors = Stat.of(batch[0]), []
        for value in batch[1]:
            try:
                collector.handle(stat, value)
            except Exception as error:  # noqa: BLE001, PERF203  # the user's code; the next samples follow
                errors.append(error)
        if errors:
            raise errors[0]

    RECORDER.flush(REPORT_SECONDS)
    handle = EVENTS.register(deliver, types=(), queue=QUEUED_BATCHES, name=type(collector).__qualname__)
    RECORDER.stats.taps.append(handle)
    if isinstance(collector, AggregatingStatCollector):
        collector._handle = handle  # noqa: SLF001  # of this file
    return handle


class AggregatingStatCollector(StatCollector):
    """Collector that aggregates all samples since the last `reset`.

    The windows of a Stat end by the clock, and their quantiles cannot be merged. A report covers any time between two calls
    of `reset`, so the collector has a window of its own for each Stat: the same class as a Stat's window.
    """

    def __init__(self) -> None:
        self._handle: Handle | None = None
        self._restart()

    def _restart(self) -> None:
        self._process = getpid()
        self._lock = threading.RLock()  # a signal handler may report, too
        self._windows: dict[str, Window] = {}
        self._wanted: dict[str, frozenset[StatType]] = {}

    def _locked(self) -> AbstractContextManager[object]:
        """Return the lock; a forked child starts without samples, and with a lock that no other thread holds."""
        if self._process != getpid():
            self._restart()
        return self._lock

    def handle(self, stat: Stat, v: float) -> None:
        """Aggregate a sample."""
        with self._locked():
            if stat.key not in self._windows:
                wanted = stat.aggregations
                wanted |= _QUANTILES if StatType.HISTOGRAM in wanted else frozenset[StatType]()
                self._wanted[stat.key], self._windows[stat.key] = wanted, Window(wanted)
            self._windows[stat.key].add([v], [v])

    def report(self) -> dict[str, float]:
        """Return `{"key.mean": …}` of all samples so far; a HISTOGRAM as quantiles p50, p90, p95 and p99.

        A Stat without samples is absent, except for the count 0 after a reset.
        """
        self._catch_up()
        with self._locked():
            found: dict[str, float] = {}
            for key, window in self._windows.items():
                if StatType.COUNT in self._wanted[key]:
                    found[f"{key}.count"] = float(window.samples)
                found.update({f"{key}.{each.value}": value for each, value in window.values().items()})
            return found

    def reset(self) -> None:
        """Discard all samples."""
        self._catch_up()
        with self._locked():
            self._windows = {key: Window(wanted) for key, wanted in self._wanted.items()}

    def _catch_up(self) -> None:
        if self._handle is not None:
            RECORDER.flush(REPORT_SECONDS)
            self._handle.drain(REPORT_SECONDS)


def _adapted(event: RecordedEvent, origin: object) -> Event:
    if isinstance(origin, Event):
        adapted = copy(origin)
    else:
        adapted = Event(event.type, event.message, metadata=dict(event.data), severity=event.severity)
    for name in ("timestamp", "monotonic_ns", "id", "span_id"):
        setattr(adapted, name, getattr(event, name))
    return adapted
