"""torchelastic's `metrics.api`, name for name: `getStream`, `put_metric`, `prof` and their like.

Used in the training process and in torchrun's agent, on the thread that emits; see `streams` for what becomes of a
value. A function under `prof` returns and raises what it would without.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from time import time
from typing import Any, overload

from exporter.elastic.metrics.handler import (
    ConsoleMetricHandler,
    MetricData,
    MetricHandler,
    MetricsConfig,
    NullMetricHandler,
)
from exporter.elastic.metrics.measuring import AnyFunction, measured
from exporter.elastic.metrics.prometheus import PrometheusMetricHandler
from exporter.elastic.metrics.streams import (
    MetricStream,
    add_handler,
    configure,
    record_to_prometheus,
    stream_of,
    unconfigure,
)

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
        return measured(function, _get_metric_name(function), partial(put_metric, metric_group=group))

    return wrap if fn is None else wrap(fn)


def profile(group: str | None = None) -> Callable[[AnyFunction], AnyFunction]:
    """Do as `prof`, under the function's bare name; deprecated by torch in favour of `prof`."""
    warnings.warn("deprecated, use @prof instead", category=FutureWarning, stacklevel=2)

    def wrap(function: AnyFunction) -> AnyFunction:
        return measured(function, function.__name__, partial(put_metric, metric_group=group))  # type: ignore[arg-type]  # torch takes None too

    return wrap


def _get_metric_name(function: Callable[..., object]) -> str:
    qualified: str = getattr(function, "__qualname__", type(function).__qualname__)
    module: str | None = getattr(function, "__module__", None)
    if "." in qualified or not module:
        return qualified
    return f"{module.rpartition('.')[2]}.{qualified}"
