"""Compatibility module of torchelastic's `metrics.api`: `getStream`, `put_metric`, `prof` and others.

Runs on any thread, without a lock. A value is recorded for Prometheus, and then delivered to the handlers of its group.
"""

from __future__ import annotations

import abc
import inspect
import threading
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter, time
from typing import Any, overload

from exporter.elastic import bridge
from exporter.elastic.families import STATS, refusal_recorder
from exporter.recording.notices import log_once
from exporter.recording.signal_safety import is_from_signal_handler
from exporter.recording.timing import AnyFunction, within

__all__ = [
    "ConsoleMetricHandler",
    "MetricData",
    "MetricHandler",
    "MetricStream",
    "MetricsConfig",
    "NullMetricHandler",
    "PrometheusMetricHandler",
    "configure",
    "getStream",
    "get_elapsed_time_ms",
    "prof",
    "profile",
    "publish_metric",
    "put_metric",
    "unconfigure",
]

MetricData = namedtuple("MetricData", ["timestamp", "group_name", "name", "value"])  # noqa: PYI024  # the class of torch
"""Value of a metric: Unix time in seconds, group, name and value."""


class MetricsConfig:
    """Argument of `initialize_metrics`, with parameters by name."""

    __slots__ = ["params"]

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params = {} if params is None else params


class MetricHandler(abc.ABC):
    """Interface of metric handlers."""

    @abc.abstractmethod
    def emit(self, metric_data: MetricData) -> None:
        """Handle a value."""


class ConsoleMetricHandler(MetricHandler):
    """Handler that prints each value to standard output."""

    def emit(self, metric_data: MetricData) -> None:
        """Print a line."""
        print(  # noqa: T201  # the purpose of this handler
            f"[{metric_data.timestamp}][{metric_data.group_name}]: {metric_data.name}={metric_data.value}"
        )


class NullMetricHandler(MetricHandler):
    """Handler without effect, for a group whose values are only recorded for Prometheus."""

    def emit(self, metric_data: MetricData) -> None:
        """Do nothing."""


class PrometheusMetricHandler(MetricHandler):
    """Handler for torch's own `configure`, which records values for Prometheus. `put_metric` of this module needs no handler."""

    def emit(self, metric_data: MetricData) -> None:
        """Record a value, unless the bridge is installed and records it."""
        if not bridge.CompatibilityHandlers.is_installed:
            STATS.record(metric_data.group_name, metric_data.name, metric_data.value)


Handlers = MetricHandler | Sequence[MetricHandler] | None

_handlers: dict[str | None, tuple[MetricHandler, ...]] = {None: ()}
"""Handlers by group. The entry None applies to groups without an entry."""
_thread_state = threading.local()
"""Attribute `active_handlers`: ids of the handlers that are called on this thread."""


class MetricStream:
    """Stream of a group's values to a given handler, or else to the configured handlers."""

    def __init__(self, group_name: str, handler: MetricHandler | None = None) -> None:
        self.group_name = group_name
        self.handler = handler

    def add_value(self, metric_name: str, metric_value: float) -> None:
        """Publish a value. Never raises. The last word of the name may be a unit, as in `latency_ms` and `size_bytes`."""
        group = self.group_name
        STATS.record(group, metric_name, metric_value)
        try:
            handlers = _handlers.get(group, _handlers[None]) if self.handler is None else (self.handler,)
        except Exception as error:  # an unhashable group, whose value was refused
            if is_from_signal_handler(error):
                raise
            return
        if handlers:
            data = MetricData(time(), group, metric_name, metric_value)
            for handler in handlers:
                _deliver(handler, data)


def _deliver(handler: MetricHandler, data: MetricData) -> None:
    """Deliver a value to a handler. Exceptions are counted. A handler does not receive values that it publishes itself."""
    active_handlers: set[int] = _thread_state.__dict__.setdefault("active_handlers", set())
    if id(handler) in active_handlers:
        return
    active_handlers.add(id(handler))
    try:
        handler.emit(data)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # a handler must not end the job, but Ctrl-C must
        refusal_recorder("handler")(None)
        name = type(handler).__qualname__
        log_once(f"elastic handler {name}", f"the metric handler {name} has raised: {error!r}")
    finally:
        active_handlers.discard(id(handler))


bridge.CompatibilityHandlers.record_metric = staticmethod(
    lambda group, name, value: getStream(group).add_value(name, value)
)


def configure(handler: Handlers, group: str | None = None) -> None:
    """Replace the handlers of a group by one or several handlers. The group None means all groups without handlers of their own.

    Handlers also receive the values of torch's own modules in this process. All values are recorded for Prometheus. Raises TypeError
    for an object without `emit(metric_data)`.
    """
    if handler is None:
        unconfigure(group)
    else:
        _handlers[group] = bridge.checked_handlers(handler, "emit")


def unconfigure(group: str | None = None) -> None:
    """Remove the handlers of a group. The group None means all groups without handlers of their own."""
    if group is None:
        _handlers[None] = ()
    else:
        _handlers.pop(group, None)


def getStream(group: str) -> MetricStream:  # noqa: N802  # torch's name
    """Return the stream of a group."""
    return MetricStream(group)


def put_metric(metric_name: str, metric_value: float, metric_group: str = "torchelastic") -> None:
    """Publish a value. Never raises. The group `my_app` and the name `latency_ms` become the family `my_app_latency_seconds`."""
    getStream(metric_group).add_value(metric_name, metric_value)


def publish_metric(metric_group: str, metric_name: str, metric_value: float) -> None:
    """Publish a value. torch has deprecated this function in favor of `put_metric`."""
    warnings.warn("deprecated, use put_metric instead", category=FutureWarning, stacklevel=2)
    getStream(metric_group).add_value(metric_name, metric_value)


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """Return the whole milliseconds since a time from `time.time()`."""
    return int((time() - start_time_in_seconds) * 1000)


@overload
def prof(fn: AnyFunction, group: str = "torchelastic") -> AnyFunction: ...


@overload
def prof(fn: None = None, group: str = "torchelastic") -> Callable[[AnyFunction], AnyFunction]: ...


def prof(fn: Any = None, group: str = "torchelastic") -> Any:
    """Publish `<name>.success` or `<name>.failure`, and `<name>.duration.ms`, for each call of a function.

    The name is `<class>.<method>` for a method, and `<module>.<function>` (with the last part of the module's name) for a function of
    a module. Unlike in torch, durations are measured on the monotonic clock, with fractions of a millisecond; coroutines and
    generators are measured to their end; and KeyboardInterrupt, SystemExit and cancellation are failures.
    """
    if fn is None:
        return lambda function: prof(function, group)
    return _measure(fn, _get_metric_name(fn), group)


def profile(group: str | None = None) -> Callable[[AnyFunction], AnyFunction]:
    """Decorate like `prof`, with the bare name of the function. torch has deprecated this function in favor of `prof`."""
    warnings.warn("deprecated, use @prof instead", category=FutureWarning, stacklevel=2)
    return lambda function: _measure(function, function.__name__, group)  # type: ignore[arg-type]  # torch also accepts None


def _measure(function: AnyFunction, name: str, group: str) -> AnyFunction:
    """Return the function, with the outcome and the duration published at the end of each call."""
    is_generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    # Closing a generator before its last value is no failure.
    normal_end = GeneratorExit if is_generator else ()

    @contextmanager
    def call() -> Iterator[None]:
        start_seconds, outcome = perf_counter(), "failure"
        try:
            yield
            outcome = "success"
        except normal_end:
            outcome = "success"
            raise
        finally:
            elapsed_seconds = perf_counter() - start_seconds
            put_metric(f"{name}.{outcome}", 1, group)
            put_metric(f"{name}.duration.ms", round(elapsed_seconds * 1000, 3), group)

    return within(call, function)


def _get_metric_name(function: Callable[..., object]) -> str:
    """Return the name of a function's metrics without suffix, as torch forms it; see `prof`."""
    qualified_name: str = getattr(function, "__qualname__", type(function).__qualname__)
    module: str | None = getattr(function, "__module__", None)
    if "." in qualified_name or not module:
        return qualified_name
    return f"{module.rpartition('.')[2]}.{qualified_name}"
