"""The bridge to Weights & Biases: the attributes of a job's spans and events as metrics of a run of its own.

Used in the training process, on the exporter's own thread, so that nothing waits for the network. The run is another than
the job's: where the job uses W&B itself, both go on side by side.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from uuid import uuid4

from exporter.one_logger.exporters import BaseExporter
from exporter.one_logger.names import StandardEventName
from exporter.training.attributes import Attribute
from exporter.training.spans import Event, Span, TelemetryDataError


@dataclass
class Config:
    """Where to, as `wandb.init` has it."""

    entity: str
    host: str = "https://api.wandb.ai"
    api_key: str = ""  # empty for the one that W&B finds by itself
    project: str = "one-logger-tracking"
    run_name: str | None = None  # None for one that is unique
    save_dir: str = "./wandb"
    tags: Sequence[str] = ("e2e_metrics_enabled",)

    def __post_init__(self) -> None:
        self.run_name = self.run_name or f"{self.project}-run-{uuid4()}"
        self.tags = list(self.tags)


class HierarchicalMetricNamingStrategy:
    """`span.attribute` and `span.event.attribute`, joined by a separator."""

    def __init__(self, separator: str = ".") -> None:
        self._separator = separator

    def from_span_attribute(self, span: Span, attribute: Attribute) -> str:
        """Name an attribute of a span."""
        return self._separator.join((span.name_str, attribute.name))

    def from_event_attribute(self, span: Span, event: Event, attribute: Attribute) -> str:
        """Name an attribute of an event."""
        return self._separator.join((span.name_str, event.name_str, attribute.name))


MetricNamingStrategy = HierarchicalMetricNamingStrategy
"""How attributes become names of metrics; one-logger's name for what a strategy of one's own is derived from."""


class FlatMetricNamingStrategy(MetricNamingStrategy):
    """The attribute's name alone."""

    def from_span_attribute(self, *owners_and_attribute: Any) -> str:
        """Name an attribute of a span."""
        return str(owners_and_attribute[-1].name)

    from_event_attribute: Any = from_span_attribute


class WandBExporter(BaseExporter):
    """Logs metrics to a run of its own; `begin` makes it, `wandb.init` where None."""

    def __init__(
        self,
        config: Config | Mapping[str, Any],
        metric_naming_strategy: MetricNamingStrategy | None = None,
        begin: Callable[[Config], Any] | None = None,
    ) -> None:
        super().__init__()
        self._config = config if isinstance(config, Config) else Config(**config)
        self._naming = metric_naming_strategy or HierarchicalMetricNamingStrategy()
        self._begin = begin or _begin
        self._run: Any = None

    def initialize(self) -> None:
        """Begin the run."""
        self._run = self._begin(self._config)
        super().initialize()

    def export_start(self, span: Span) -> None:
        """Log what the span begins with."""
        super().export_start(span)
        self._log(span, span.attributes.values(), span.start_event)

    def export_stop(self, span: Span) -> None:
        """Log what the span was given since, its duration with it."""
        super().export_stop(span)
        self._log(span, span.updated_attributes.values(), span.stop_event)

    def export_event(self, event: Event, span: Span) -> None:
        """Log the event, or the error: W&B shows its text."""
        super().export_event(event, span)
        self._log(span, (), event)

    export_error = export_event

    def export_telemetry_data_error(self, error: TelemetryDataError) -> None:
        """Log of what kind it is."""
        super().export_telemetry_data_error(error)
        self._send({StandardEventName.TELEMETRY_DATA_ERROR.value: error.error_type.name})

    def close(self) -> None:
        """Finish the run."""
        run, self._run = self._run, None
        super().close()
        if run is not None:
            run.finish(quiet=True)

    def _log(self, span: Span, attributes: Iterable[Attribute], event: Event | None) -> None:
        metrics = {self._naming.from_span_attribute(span, each): each.value for each in attributes}
        if event is not None:
            for each in event.attributes.values():
                metrics[self._naming.from_event_attribute(span, event, each)] = each.value
        self._send(metrics)

    def _send(self, metrics: dict[str, Any]) -> None:
        if metrics:
            self._run.log(metrics | {"app_last_log_time": round(time.time() * 1000)}, commit=True)


WandBExporterSync = WandBExporterAsync = WandBExporter
"""One-logger's two: here every exporter has a thread of its own."""


def _begin(config: Config) -> Any:
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
