"""torchelastic's `metrics.api`, name for name: `getStream`, `put_metric`, `prof` and their like.

Used in the training process and in torchrun's agent, by any thread. A value goes to Prometheus and then to the handlers
of its group, on the thread that emits. No lock is taken, no handler's exception reaches the emitter, and a function under
`prof` returns and raises what it would without. What differs from torch is said where it does: a group may have several
handlers, a stream uses those configured now, a handler that raises costs itself that value.
"""

from __future__ import annotations

import abc
import inspect
import threading
import warnings
from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter, time
from typing import Any, overload

from exporter.elastic.families import STATS, refuse
from exporter.recording.notices import tell_once
from exporter.recording.timing import AnyFunction, within

__all__ = [
    "ConsoleMetricHandler",
    "MetricData",
    "MetricHandler",
    "MetricStream",
    "MetricsConfig",
    "NullMetricHandler",
    "PrometheusMetricHandler",
    "add_handler",
    "configure",
    "getStream",
    "get_elapsed_time_ms",
    "prof",
    "profile",
    "publish_metric",
    "put_metric",
    "record_to_prometheus",
    "unconfigure",
]

MOST_GROUPS = 1000
"""Groups whose stream is kept; the streams of others are made for each value."""

MetricData = namedtuple("MetricData", ["timestamp", "group_name", "name", "value"])  # noqa: PYI024  # torch's own
"""One value: Unix time in seconds, the group's name, the metric's name, the value as it was given."""


class MetricsConfig:
    """What `initialize_metrics` is given.

    Attributes:
        params: Names to values; empty when none were given.
    """

    __slots__ = ["params"]

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params = {} if params is None else params


class MetricHandler(abc.ABC):
    """Takes every metric of the groups that it is configured for."""

    @abc.abstractmethod
    def emit(self, metric_data: MetricData) -> None:
        """Take one value."""


class ConsoleMetricHandler(MetricHandler):
    """Prints every metric to standard output."""

    def emit(self, metric_data: MetricData) -> None:
        """Print one line."""
        print(  # noqa: T201  # this is what it is for
            f"[{metric_data.timestamp}][{metric_data.group_name}]: {metric_data.name}={metric_data.value}"
        )


class NullMetricHandler(MetricHandler):
    """Does nothing: for a group that is to go to Prometheus alone."""

    def emit(self, metric_data: MetricData) -> None:
        """Do nothing."""


class PrometheusMetricHandler(MetricHandler):
    """Records every metric under `<group>_<name>`, seconds instead of milliseconds.

    It belongs to every group of `exporter.elastic.metrics` unless it is switched off there. In torch's own module it
    can be configured like any other handler.
    """

    def emit(self, metric_data: MetricData) -> None:
        """Record one value; never raises."""
        try:
            _, group, name, value = metric_data
        except (TypeError, ValueError):
            refuse("name")(None)
            return
        STATS.record(group, name, value)


Handlers = MetricHandler | Sequence[MetricHandler] | None


class _Routing:
    """Which handlers each group has.

    Attributes:
        default: Those of groups without their own.
        groups: Those of the others.
        recorded: Which groups go to Prometheus; None stands for those without an entry.
    """

    def __init__(self) -> None:
        self.default: tuple[MetricHandler, ...] = ()
        self.groups: dict[str, tuple[MetricHandler, ...]] = {}
        self.recorded: dict[str | None, bool] = {None: True}

    def handlers(self, group: str) -> tuple[MetricHandler, ...]:
        return self.groups.get(group, self.default)

    def records(self, group: str) -> bool:
        return self.recorded.get(group, self.recorded[None])


_routing = _Routing()
_streams: dict[str, MetricStream] = {}
_calling = threading.local()


class MetricStream:
    """Takes the values of one group.

    Unlike torch's it uses the handlers that are configured when a value comes, not those of when it was made.

    Attributes:
        group_name: The group.
        handler: The one handler that it was made with, None for those that are configured.
    """

    def __init__(self, group_name: str, handler: MetricHandler | None = None) -> None:
        self.group_name = group_name
        self.handler = handler
        self._direct: dict[str, Callable[[object], None]] = {}

    def add_value(self, metric_name: str, metric_value: float) -> None:
        """Take one value; never raises.

        Args:
            metric_name: With its unit as the last word: `latency_ms`, `duration.ms`, `size_bytes`.
            metric_value: A number; handlers are given whatever it is.
        """
        try:
            take = self._direct[metric_name]
        except Exception:  # noqa: BLE001  # there is none yet, or it is nothing that could be a key
            take = self._find(metric_name)
        take(metric_value)

    def _find(self, name: str) -> Callable[[object], None]:
        """What takes the values of a metric; remembered while nothing but Prometheus does."""
        # First: what `configure` throws away meanwhile is this dictionary.
        direct = self._direct
        group = self.group_name
        try:
            if self._handlers() or _streams.get(group) is not self or not _routing.records(group):
                return partial(self._emit, name)
            record = STATS.accepted(group, name)
            if record is not None:
                direct[name] = record
                return record
        except Exception:  # noqa: BLE001  # a group or a name that is nothing that could be a key
            return refuse("name")
        return partial(STATS.record, group, name)

    def _handlers(self) -> tuple[MetricHandler, ...]:
        return (self.handler,) if self.handler is not None else _routing.handlers(self.group_name)

    def _emit(self, name: str, value: object) -> None:
        group = self.group_name
        if _routing.records(group):
            STATS.record(group, name, value)
        handlers = self._handlers()
        if handlers:
            data = MetricData(time(), group, name, value)
            for handler in handlers:
                _call(handler, data)


def _call(handler: MetricHandler, data: MetricData) -> None:
    """Give a handler one value; what it raises is counted, and a metric that it emits does not come back to it."""
    busy: set[int] = _calling.__dict__.setdefault("handlers", set())
    if id(handler) in busy or isinstance(handler, PrometheusMetricHandler):
        return
    busy.add(id(handler))
    try:
        handler.emit(data)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # the job must not end for a handler; Ctrl-C in it is the job's
        refuse("handler")(None)
        name = type(handler).__qualname__
        tell_once(f"elastic handler {name}", f"the metric handler {name} has raised: {error!r}")
    finally:
        busy.discard(id(handler))


def configure(handler: Handlers, group: str | None = None) -> None:
    """Give a group, or all that have none of their own, its handlers; those of before are replaced, as in torch.

    Prometheus is beside them, whatever they are: see `record_to_prometheus`.

    Args:
        handler: One, or a list of several, in the order in which they are called; None is `unconfigure(group)`.
        group: None for all groups without handlers of their own.

    Raises:
        TypeError: That is no handler: an object with `emit(metric_data)`.
    """
    handlers = _checked(handler)
    if handler is None:
        unconfigure(group)
        return
    if group is None:
        _routing.default = handlers
    else:
        _routing.groups[group] = handlers
    _forget_routes()


def add_handler(handler: MetricHandler, group: str | None = None) -> None:
    """Add a handler to those of a group, or of all that have none of their own.

    A group that had none gets those it was served by before, and the new one.

    Raises:
        TypeError: That is no handler.
    """
    present = _routing.default if group is None else _routing.handlers(group)
    configure([*present, *_checked(handler)], group)


def unconfigure(group: str | None = None, handler: MetricHandler | None = None) -> None:
    """Take handlers away; when there are none it is harmless.

    Args:
        group: Whose; it is then served like all that have none of their own. None for those of the latter.
        handler: This one only; None for all.
    """
    present = _routing.default if group is None else _routing.groups.get(group, ())
    kept = () if handler is None else tuple(each for each in present if each is not handler)
    if group is None:
        _routing.default = kept
    elif kept or (handler is not None and group in _routing.groups):
        _routing.groups[group] = kept
    else:
        _routing.groups.pop(group, None)
    _forget_routes()


def record_to_prometheus(enabled: bool, group: str | None = None) -> None:
    """Switch the Prometheus handler off and on again.

    Args:
        enabled: Whether values are recorded.
        group: Of this group; None for all of which nothing else was said.
    """
    _routing.recorded[group] = bool(enabled)
    _forget_routes()


def _checked(handler: Handlers) -> tuple[MetricHandler, ...]:
    if handler is None:
        return ()
    handlers = tuple(handler) if isinstance(handler, list | tuple) else (handler,)
    for each in handlers:
        if isinstance(each, type) or not callable(getattr(each, "emit", None)):
            raise TypeError(f"a metric handler must be an object with emit(metric_data), not {each!r}")
    return handlers


def _forget_routes() -> None:
    # New dictionaries: a thread that is just looking something up puts it into the old one.
    for stream in list(_streams.values()):
        stream._direct = {}  # noqa: SLF001  # the two are one thing


def stream_of(group: str) -> MetricStream:
    """Give the stream of a group, mostly the same one again."""
    try:
        return _streams[group]
    except Exception:  # noqa: BLE001  # there is none yet, or it is nothing that could be a key
        stream = MetricStream(group)
        if len(_streams) < MOST_GROUPS and isinstance(group, str):
            return _streams.setdefault(group, stream)
        return stream


def getStream(group: str) -> MetricStream:  # noqa: N802  # torch's name
    """Give the stream of a group."""
    return stream_of(group)


def put_metric(metric_name: str, metric_value: float, metric_group: str = "torchelastic") -> None:
    """Publish one value; never raises.

    Args:
        metric_name: With its unit as the last word: `latency_ms`, `duration.ms`, `size_bytes`.
        metric_value: A number; handlers are given whatever it is.
        metric_group: `my_app` and `latency_ms` become the family `my_app_latency_seconds`.
    """
    getStream(metric_group).add_value(metric_name, metric_value)


def publish_metric(metric_group: str, metric_name: str, metric_value: float) -> None:
    """Publish one value; deprecated by torch in favour of `put_metric`."""
    warnings.warn("deprecated, use put_metric instead", category=FutureWarning, stacklevel=2)
    getStream(metric_group).add_value(metric_name, metric_value)


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """Give the milliseconds since a time that `time.time()` gave; whole ones."""
    return int((time() - start_time_in_seconds) * 1000)


@overload
def prof(fn: AnyFunction, group: str = "torchelastic") -> AnyFunction: ...


@overload
def prof(fn: None = None, group: str = "torchelastic") -> Callable[[AnyFunction], AnyFunction]: ...


def prof(fn: Any = None, group: str = "torchelastic") -> Any:
    """Publish `<name>.success` or `<name>.failure`, and `<name>.duration.ms`, of every call of a function.

    The name is `<class>.<method>` for a method, `<module>.<function>` (the last part of the module) for a function of a
    module. With an abstract base class, decorate the concrete method. Used as `@prof`, `@prof()` or `@prof(group=...)`.

    Unlike torch's, durations are of a clock that is never set, with fractions of a millisecond. A coroutine is measured
    from its first step to its end, a generator from its first `next()`; leaving a generator early is no failure. What
    ends a call by KeyboardInterrupt, SystemExit or cancellation is a failure. A handler that raises changes nothing.
    """

    def wrap(function: AnyFunction) -> AnyFunction:
        return _measured(function, _get_metric_name(function), group)

    return wrap if fn is None else wrap(fn)


def profile(group: str | None = None) -> Callable[[AnyFunction], AnyFunction]:
    """Do as `prof`, under the function's bare name; deprecated by torch in favour of `prof`."""
    warnings.warn("deprecated, use @prof instead", category=FutureWarning, stacklevel=2)

    def wrap(function: AnyFunction) -> AnyFunction:
        return _measured(function, function.__name__, group)  # type: ignore[arg-type]  # torch takes None too

    return wrap


class _MeasuredCall:
    """One call, whose outcome and duration are published when it ends."""

    __slots__ = ("_began", "_endings", "_group", "_name")

    def __init__(self, name: str, group: str, endings: tuple[object, ...]) -> None:
        self._name, self._group, self._endings = name, group, endings

    def __enter__(self) -> None:
        self._began = perf_counter()

    def __exit__(self, ending: type[BaseException] | None, *_: object) -> None:
        elapsed = perf_counter() - self._began
        outcome = "success" if ending in self._endings else "failure"
        put_metric(f"{self._name}.{outcome}", 1, self._group)
        put_metric(f"{self._name}.duration.ms", round(elapsed * 1000, 3), self._group)


def _measured(function: AnyFunction, name: str, group: str) -> AnyFunction:
    is_generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    endings = (None, GeneratorExit) if is_generator else (None,)
    return within(lambda: _MeasuredCall(name, group, endings), function)


def _get_metric_name(function: Callable[..., object]) -> str:
    qualified: str = getattr(function, "__qualname__", type(function).__qualname__)
    module: str | None = getattr(function, "__module__", None)
    if "." in qualified or not module:
        return qualified
    return f"{module.rpartition('.')[2]}.{qualified}"
