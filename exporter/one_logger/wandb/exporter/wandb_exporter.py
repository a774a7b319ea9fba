"""Exporter to Weights & Biases: attributes of spans and events as metrics.

The metrics are logged to a separate W&B run, even if the job has its own run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from uuid import uuid4

from exporter.one_logger.exporters import BaseExporter
from exporter.one_logger.names import StandardEventName
from exporter.training.attributes import Attribute
from exporter.training.spans import ErrorEvent, Event, Span, TelemetryDataError

__all__ = [
    "Config",
    "FlatMetricNamingStrategy",
    "HierarchicalMetricNamingStrategy",
    "MetricNamingStrategy",
    "WandBExporter",
    "WandBExporterAsync",
    "WandBExporterBase",
    "WandBExporterSync",
    "get_current_time_msec",
]


@dataclass
class Config:
    """Settings of the W&B run, with the field names of one-logger. The repr omits the API key."""

    entity: str
    host: str = "https://api.wandb.ai"
    api_key: str = field(default="", repr=False)  # "" for W&B's own settings
    project: str = "one-logger-tracking"
    run_name: str | None = None  # None for a unique name
    save_dir: str = "./wandb"
    tags: Sequence[str] = ("e2e_metrics_enabled",)  # one-logger's default

    def __post_init__(self) -> None:
        self.run_name = self.run_name or f"{self.project}-run-{uuid4()}"
        self.tags = list(self.tags)


class HierarchicalMetricNamingStrategy:
    """Naming strategy: `SPAN.ATTRIBUTE` and `SPAN.EVENT.ATTRIBUTE`, with a configurable separator."""

    def __init__(self, separator: str = ".") -> None:
        self._separator = separator

    def from_span_attribute(self, span: Span, attribute: Attribute) -> str:
        """Return the metric name of a span's attribute."""
        return self._separator.join((span.name_str, attribute.name))

    def from_event_attribute(self, span: Span, event: Event, attribute: Attribute) -> str:
        """Return the metric name of an event's attribute."""
        return self._separator.join((span.name_str, event.name_str, attribute.name))


MetricNamingStrategy = HierarchicalMetricNamingStrategy
"""Name of the base class of naming strategies in one-logger. In this package, the hierarchical strategy is also the base class."""


class FlatMetricNamingStrategy(MetricNamingStrategy):
    """Naming strategy: the name of the attribute."""

    def from_span_attribute(self, span: Span, attribute: Attribute) -> str:  # noqa: ARG002  # overrides a method of the base class
        """Return the name of the attribute."""
        return attribute.name

    def from_event_attribute(self, span: Span, event: Event, attribute: Attribute) -> str:  # noqa: ARG002  # overrides a method of the base class
        """Return the name of the attribute."""
        return attribute.name


class WandBExporter(BaseExporter):
    """Exporter to Weights & Biases.

    Args:
        config: Settings of the W&B run, or a mapping of them.
        metric_naming_strategy: Naming strategy; None for HierarchicalMetricNamingStrategy.
        create_run: Function that creates the W&B run; None to log in and call `wandb.init` without metrics of the system.
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any],
        metric_naming_strategy: MetricNamingStrategy | None = None,
        create_run: Callable[[Config], Any] | None = None,
    ) -> None:
        super().__init__()
        self._config = config if isinstance(config, Config) else Config(**config)
        self._naming = metric_naming_strategy or HierarchicalMetricNamingStrategy()
        self._create_run = create_run or _create_run
        self._run: Any = None

    def initialize(self) -> None:
        """Create the W&B run."""
        self._run = self._create_run(self._config)
        super().initialize()

    def export_start(self, span: Span) -> None:
        """Log the attributes of a span and of its start event."""
        super().export_start(span)
        self._log_attributes(span, span.attributes.values(), span.start_event)

    def export_stop(self, span: Span) -> None:
        """Log the attributes that were set after the start of a span, including its duration, and the attributes of its stop event."""
        super().export_stop(span)
        self._log_attributes(span, span.updated_attributes.values(), span.stop_event)

    def export_event(self, event: Event, span: Span) -> None:
        """Log the attributes of an event."""
        super().export_event(event, span)
        self._log_attributes(span, (), event)

    def export_error(self, event: ErrorEvent, span: Span) -> None:
        """Log the attributes of an error. W&B shows its message and type as text."""
        super().export_error(event, span)
        self._log_attributes(span, (), event)

    def export_telemetry_data_error(self, error: TelemetryDataError) -> None:
        """Log the type of a telemetry error."""
        super().export_telemetry_data_error(error)
        self._log_metrics({StandardEventName.TELEMETRY_DATA_ERROR.value: error.error_type.name})

    def close(self) -> None:
        """Finish the W&B run."""
        run, self._run = self._run, None
        super().close()
        if run is not None:
            run.finish(quiet=True)

    def _log_attributes(self, span: Span, attributes: Iterable[Attribute], event: Event | None) -> None:
        """Log attributes of a span, and all attributes of an event of the span."""
        metrics = {
            self._naming.from_span_attribute(span, attribute): attribute.value for attribute in attributes
        }
        if event is not None:
            for attribute in event.attributes.values():
                metrics[self._naming.from_event_attribute(span, event, attribute)] = attribute.value
        self._log_metrics(metrics)

    def _log_metrics(self, metrics: dict[str, Any]) -> None:
        """Log metrics as a step of the W&B run, with the time of the call as in one-logger: `app_last_log_time`, in milliseconds."""
        if metrics:
            self._run.log(metrics | {"app_last_log_time": get_current_time_msec()}, commit=True)


WandBExporterBase = WandBExporterSync = WandBExporterAsync = WandBExporter
"""Other names of the class, from one-logger. Each exporter has a thread, so the synchronous and the asynchronous are the same."""


def get_current_time_msec() -> int:
    """Return the Unix time in milliseconds."""
    return round(time.time() * 1000)


def _create_run(config: Config) -> Any:
    """Create a W&B run that collects no metrics of the system. Log in first if the settings have an API key."""
    wandb: Any = import_module("wandb")
    if config.api_key:
        wandb.login(key=config.api_key, host=config.host, timeout=5)
    quiet = {"x_disable_stats": True, "x_disable_machine_info": True, "console": "off"}
    return wandb.init(
        project=config.project,
        name=config.run_name,
        entity=config.entity,
        tags=config.tags,
        dir=config.save_dir,
        reinit="create_new",
        settings=wandb.Settings(base_url=config.host, **quiet),
    )
