"""Recorder of training telemetry, with a method for each callback."""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic, time

from exporter.one_logger.config import OneLoggerConfig
from exporter.one_logger.current_observer import current_observer
from exporter.one_logger.delivery import ALL, EXIT_SECONDS
from exporter.one_logger.exporters import Exporter
from exporter.one_logger.names import ExportCustomizationMode, StandardTrainingJobEventName
from exporter.one_logger.recorders import DefaultRecorder
from exporter.one_logger.standard_attributes import SyncCheckpointMetricsUpdateAttributes
from exporter.recording.conversion import to_name
from exporter.training import callbacks, kinds
from exporter.training.attributes import Attributes, SpanName, TracingTimestamp
from exporter.training.blocks import HotBlock
from exporter.training.kinds import BlockKind
from exporter.training.rare_blocks import begin_block, end_block
from exporter.training.recorder import TRAINING
from exporter.training.spans import ErrorEvent, Event, NonRecordingSpan, Span

__all__ = ["TrainingRecorder", "get_recorder"]


class TrainingRecorder(DefaultRecorder):
    """Recorder with a method for each callback. A time of None means the current time."""

    def __init__(
        self,
        config: OneLoggerConfig | None = None,
        exporters: Iterable[Exporter] = (),
        export_customization_mode: ExportCustomizationMode = ALL,
        span_name_filter: Iterable[SpanName] | None = None,
    ) -> None:
        super().__init__(exporters, export_customization_mode, span_name_filter)
        self.settings = config

    def _observe(self) -> None:
        """Do nothing, because the observer of the configured provider exports the spans."""

    def start(
        self,
        span_name: SpanName,
        span_attributes: Attributes | None = None,
        start_event_attributes: Attributes | None = None,
        start_time: TracingTimestamp | None = None,
        parent_span: Span | None = None,
    ) -> Span:
        """Start a span. A standard name starts the standard block with its phase.

        A training loop and a save start with step 0, because the call has no argument for the step.
        """
        kind = _kind_of(span_name)
        values: dict[str, object] = {}
        if kind is kinds.TRAINING_LOOP:
            values["train_iterations_start"] = 0
        elif kind is kinds.CHECKPOINT_SAVE:
            values["global_step"] = 0
        span, _ = begin_block(
            kind,
            "start",
            timestamp=start_time,
            span_name=span_name,
            span_attributes=span_attributes,
            start_event_attributes=start_event_attributes,
            parent=parent_span,
            values=values,
        )
        return span

    def stop(
        self,
        span: Span,
        stop_event_attributes: Attributes | None = None,
        stop_time: TracingTimestamp | None = None,
    ) -> None:
        """Stop a span. A call for a span that is not active is counted as misuse and ignored."""
        if self._is_active("stop", span):
            end_block(
                _kind_of(span.name), "stop", timestamp=stop_time, span=span, attributes=stop_event_attributes
            )

    def _export_error(self, span: Span, event: ErrorEvent) -> None:
        observer = current_observer()
        if observer is not None:
            observer.span_export.error(span, event)

    def _active_spans(self) -> list[Span]:
        return [block.span for block in TRAINING.open_blocks()] + _open_iterations()

    def close(self) -> None:
        """Flush the exporters for up to two seconds. The exporters stay open, because this process may start another application."""
        self.delivery.flush(EXIT_SECONDS)

    def create_sync_checkpoint_metrics_event(self, span_name: SpanName) -> Event:
        """Return an event with the durations so far of the active spans with a name."""
        now = TracingTimestamp.now().perf_counter_seconds
        spans = self.get_active_spans_by_name(span_name)
        seconds = [now - span.start_event.timestamp.perf_counter_seconds for span in spans] or [0.0]
        attributes = SyncCheckpointMetricsUpdateAttributes.create(sum(seconds), min(seconds), max(seconds))
        return Event.create(StandardTrainingJobEventName.SYNC_CHECKPOINT_METRICS_UPDATE, attributes)

    # Callbacks -------------------------------------------------------------------------------------------

    def on_app_start(self, start_time: TracingTimestamp | None = None) -> Span:
        """Report the start of the application."""
        return callbacks.on_app_start(_milliseconds(start_time))

    def on_app_end(self, stop_time: TracingTimestamp | None = None) -> None:
        """Report the end of the application."""
        callbacks.on_app_end(_milliseconds(stop_time))

    def on_distributed_init_start(self, start_time: TracingTimestamp | None = None) -> Span:
        """Report the start of the distributed initialization."""
        return callbacks.on_distributed_init_start(_milliseconds(start_time))

    def on_distributed_init_end(self, stop_time: TracingTimestamp | None = None) -> None:
        """Report the end of the distributed initialization."""
        callbacks.on_distributed_init_end(_milliseconds(stop_time))

    def on_model_init_start(self, start_time: TracingTimestamp | None = None) -> Span:
        """Report the start of the model initialization."""
        return callbacks.on_model_init_start(_milliseconds(start_time))

    def on_model_init_end(self, stop_time: TracingTimestamp | None = None) -> None:
        """Report the end of the model initialization."""
        callbacks.on_model_init_end(_milliseconds(stop_time))

    def on_dataloader_init_start(self, start_time: TracingTimestamp | None = None) -> Span:
        """Report the start of the data loader initialization."""
        return callbacks.on_dataloader_init_start(_milliseconds(start_time))

    def on_dataloader_init_end(self, stop_time: TracingTimestamp | None = None) -> None:
        """Report the end of the data loader initialization."""
        callbacks.on_dataloader_init_end(_milliseconds(stop_time))

    def on_load_checkpoint_start(self, start_time: TracingTimestamp | None = None) -> Span:
        """Report the start of loading a checkpoint."""
        return callbacks.on_load_checkpoint_start(_milliseconds(start_time))

    def on_load_checkpoint_end(self, stop_time: TracingTimestamp | None = None) -> None:
        """Report the end of loading a checkpoint."""
        callbacks.on_load_checkpoint_end(_milliseconds(stop_time))

    def on_optimizer_init_start(self, start_time: TracingTimestamp | None = None) -> Span:
        """Report the start of the optimizer initialization."""
        return callbacks.on_optimizer_init_start(_milliseconds(start_time))

    def on_optimizer_init_end(self, stop_time: TracingTimestamp | None = None) -> None:
        """Report the end of the optimizer initialization."""
        callbacks.on_optimizer_init_end(_milliseconds(stop_time))

    def on_training_loop_start(
        self,
        train_iterations_start: int,
        train_samples_start: int | None = None,
        train_iterations_target: int | None = None,
        train_samples_target: int | None = None,
        train_tokens_target: int | None = None,  # noqa: ARG002  # computed from the samples and the sequence length
        start_time: TracingTimestamp | None = None,
    ) -> Span:
        """Report the start of a training loop."""
        return callbacks.on_train_start(
            train_iterations_start,
            train_samples_start,
            train_iterations_target,
            train_samples_target,
            _milliseconds(start_time),
        )

    def on_training_loop_end(self, stop_time: TracingTimestamp | None = None) -> None:
        """Report the end of a training loop."""
        callbacks.on_train_end(_milliseconds(stop_time))

    def on_training_single_iteration_start(
        self, start_time: TracingTimestamp | None = None
    ) -> Span | NonRecordingSpan:
        """Report the start of a training iteration."""
        return callbacks.on_training_single_iteration_start(_milliseconds(start_time))

    def on_training_single_iteration_end(self, stop_time: TracingTimestamp | None = None) -> None:
        """Report the end of a training iteration."""
        callbacks.on_training_single_iteration_end(_milliseconds(stop_time))

    def on_validation_start(self, start_time: TracingTimestamp | None = None) -> Span:
        """Report the start of a validation."""
        return callbacks.on_validation_start(_milliseconds(start_time))

    def on_validation_end(self, stop_time: TracingTimestamp | None = None) -> None:
        """Report the end of a validation."""
        callbacks.on_validation_end(_milliseconds(stop_time))

    def on_validation_single_iteration_start(
        self, start_time: TracingTimestamp | None = None
    ) -> Span | NonRecordingSpan:
        """Report the start of a validation iteration."""
        return callbacks.on_validation_single_iteration_start(_milliseconds(start_time))

    def on_validation_single_iteration_end(self, stop_time: TracingTimestamp | None = None) -> None:
        """Report the end of a validation iteration."""
        callbacks.on_validation_single_iteration_end(_milliseconds(stop_time))

    def on_testing_start(self, start_time: TracingTimestamp | None = None) -> Span:
        """Report the start of a test."""
        return callbacks.on_testing_start(_milliseconds(start_time))

    def on_testing_end(self, stop_time: TracingTimestamp | None = None) -> None:
        """Report the end of a test."""
        callbacks.on_testing_end(_milliseconds(stop_time))

    def on_save_checkpoint_start(
        self, current_iteration: int, start_time: TracingTimestamp | None = None
    ) -> Span:
        """Report the start of saving a checkpoint."""
        return callbacks.on_save_checkpoint_start(current_iteration, _milliseconds(start_time))

    def on_save_checkpoint_success(
        self, current_iteration: int, timestamp: TracingTimestamp | None = None
    ) -> None:
        """Report that a checkpoint is complete."""
        callbacks.on_save_checkpoint_success(current_iteration, _milliseconds(timestamp))

    def on_save_checkpoint_end(self, stop_time: TracingTimestamp | None = None) -> None:
        """Report the end of saving a checkpoint."""
        callbacks.on_save_checkpoint_end(_milliseconds(stop_time))


UNCONFIGURED = TrainingRecorder()
"""Recorder without exporters, used before the configuration."""


def get_recorder() -> DefaultRecorder:
    """Return the recorder of this process; before the configuration, a recorder without exporters."""
    observer = current_observer()
    recorder: DefaultRecorder = UNCONFIGURED if observer is None else observer.recorder
    return recorder


def _open_iterations() -> list[Span]:
    """Return new spans for the open iterations that have no span, because iterations are not exported."""
    open_blocks = [*TRAINING.clock.stack, *TRAINING.callback_blocks]
    spans = []
    for block in dict.fromkeys(open_blocks):
        if isinstance(block, HotBlock) and block.is_open and block.span is None and block.kind in kinds.STEPS:
            start_time = TracingTimestamp(block.began + time() - monotonic(), block.began)
            parent = TRAINING.spans.get()
            spans.append(Span.create(block.kind.span_name, parent, None, None, start_time))
    return spans


def _kind_of(name: SpanName) -> BlockKind:
    """Return the standard kind with a span name, or a kind with a user-defined name."""
    text = to_name(name)
    return kinds.standard_kind(text) or kinds.named_kind(text, is_phase=False)


def _milliseconds(timestamp: TracingTimestamp | None) -> float | None:
    """Return the Unix time of a timestamp in milliseconds, as the callbacks expect; None for the current time."""
    return None if timestamp is None else timestamp.seconds_since_epoch * 1000
