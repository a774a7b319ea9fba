"""MetricData and the handlers that take it; torchelastic's classes, name for name.

Used in the training process and in torchrun's agent. A handler is called on the thread that emits, one after the
other; what it raises never reaches the emitter (see `api`).
"""

from __future__ import annotations

import abc
from collections import namedtuple

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
