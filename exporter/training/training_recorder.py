"""The recorder of a training job: spans made by hand, in one tree with the standard ones.

Used in the training process, on the job's threads. Every method hands on: the standard spans to the callbacks, the
others to the recording of training. No call raises, unless the job chose `PROPAGATE_EXCEPTIONS`, and each gives a
span, also before configuration and on a rank that is disabled: then it goes nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable

from exporter.training import callbacks
from exporter.training.attributes import SyncCheckpointMetricsUpdateAttributes
from exporter.training.configuration import OneLoggerConfig
from exporter.training.delivery import EXIT_SECONDS
from exporter.training.events import ErrorEvent, Event, TelemetryDataError
from exporter.training.hot import Hot
from exporter.training.names import (
    ExportCustomizationMode,
    SpanName,
    StandardTrainingJobEventName,
)
from exporter.training.provider import current, misuse, recording
from exporter.training.recorder import DefaultRecorder, Recorder
from exporter.training.spans import Span
from exporter.training.types import Attributes, TracingTimestamp, all_are, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from exporter.training.exporters.base import Exporter


class TrainingRecorder(DefaultRecorder):
    """A recorder with a method for each callback; the times are `TracingTimestamp`s, None for now.

    Args:
        config: The application's.
        exporters: To whom.
        export_customization_mode: Whether the names are all that go out, or all that do not.
        span_name_filter: Names of spans.
    """

    def __init__(
        self,
        config: OneLoggerConfig | None = None,
        exporters: Iterable[Exporter] = (),
        export_customization_mode: ExportCustomizationMode = ExportCustomizationMode.EXPORT_ALL_SPANS,
        span_name_filter: Iterable[SpanName] | None = None,
    ) -> None:
        super().__init__(exporters, export_customization_mode, span_name_filter)
        self.settings = config

    def start(
        self,
        span_name: SpanName,
        span_attributes: Attributes | None = None,
        start_event_attributes: Attributes | None = None,
        start_time: TracingTimestamp | None = None,
        parent_span: Span | None = None,
    ) -> Span:
        """Begin a span, in the parent that is given or else in what this thread or task is in."""
        by = recording()
        if by is None:
            return super().start(span_name, span_attributes, start_event_attributes, start_time, parent_span)
        return by.start_span(span_name, span_attributes, start_event_attributes, start_time, parent_span)

    def stop(
        self,
        span: Span,
        stop_event_attributes: Attributes | None = None,
        stop_time: TracingTimestamp | None = None,
    ) -> None:
        """End a span; one that is not active is a misuse."""
        by = recording()
        if by is None:
            super().stop(span, stop_event_attributes, stop_time)
        elif all_are(((span, Span),)):
            by.stop_span(span, stop_event_attributes, stop_time)
        else:
            misuse("recorder.stop", "no_such_span", f"a span that is active, not {shown(span)}")

    def event(self, span: Span, event: Event) -> Event:
        """Record an event of a span that is active."""
        by = recording()
        if by is None:
            return super().event(span, event)
        if all_are(((span, (Span, Hot)), (event, Event))):
            by.span_event(span, event)
        else:
            misuse(
                "recorder.event", "no_such_span", f"a span and an event, not {shown(span)}, {shown(event)}"
            )
        return event

    def error(self, span: Span, error_message: str, exception: BaseException | None = None) -> ErrorEvent:
        """Record an error of the application."""
        by = recording()
        if by is None:
            return super().error(span, error_message, exception)
        event = ErrorEvent.create(error_message, exception)
        if all_are(((span, Span),)):
            by.span_error(span, event)
        else:
            misuse("recorder.error", "no_such_span", f"a span that is active, not {shown(span)}")
        return event

    def telemetry_data_error(self, error_message: str, attributes: Attributes | None = None) -> None:
        """Tell the exporters that the telemetry is incomplete."""
        configured = current()
        if configured is not None and configured.enabled:
            kind = TelemetryDataError.ErrorType.INCOMPLETE_TELEMETRY_DATA
            configured.sink.telemetry_data_error(TelemetryDataError.create(kind, error_message, attributes))

    def get_active_spans_by_name(self, span_name: SpanName) -> list[Span]:
        """Give the active spans of a name, in the order of their starts."""
        by = recording()
        return super().get_active_spans_by_name(span_name) if by is None else by.active_spans(span_name)

    def close(self) -> None:
        """Give the exporters a moment for what waits; another application may begin in this process."""
        self.sink.flush(EXIT_SECONDS)

    def create_sync_checkpoint_metrics_event(self, span_name: SpanName) -> Event:
        """Make the event that tells how long the saves of a strategy took, of the spans that are active."""
        seconds = [
            TracingTimestamp.now().perf_counter_seconds - span.start_event.timestamp.perf_counter_seconds
            for span in self.get_active_spans_by_name(span_name)
        ] or [0.0]
        attributes = SyncCheckpointMetricsUpdateAttributes.create(sum(seconds), min(seconds), max(seconds))
        return Event.create(StandardTrainingJobEventName.SYNC_CHECKPOINT_METRICS_UPDATE, attributes)

    def on_app_start(self, start_time: TracingTimestamp | None = None) -> Span:
        """See the callback."""
        return callbacks.on_app_start(_milliseconds(start_time))

    def on_app_end(self, stop_time: TracingTimestamp | None = None) -> None:
        """See the callback."""
        callbacks.on_app_end(_milliseconds(stop_time))

    def on_distributed_init_start(self, start_time: TracingTimestamp | None = None) -> Span:
        """See the callback."""
        return callbacks.on_distributed_init_start(_milliseconds(start_time))

    def on_distributed_init_end(self, stop_time: TracingTimestamp | None = None) -> None:
        """See the callback."""
        callbacks.on_distributed_init_end(_milliseconds(stop_time))

    def on_model_init_start(self, start_time: TracingTimestamp | None = None) -> Span:
        """See the callback."""
        return callbacks.on_model_init_start(_milliseconds(start_time))

    def on_model_init_end(self, stop_time: TracingTimestamp | None = None) -> None:
        """See the callback."""
        callbacks.on_model_init_end(_milliseconds(stop_time))

    def on_dataloader_init_start(self, start_time: TracingTimestamp | None = None) -> Span:
        """See the callback."""
        return callbacks.on_dataloader_init_start(_milliseconds(start_time))

    def on_dataloader_init_end(self, stop_time: TracingTimestamp | None = None) -> None:
        """See the callback."""
        callbacks.on_dataloader_init_end(_milliseconds(stop_time))

    def on_load_checkpoint_start(self, start_time: TracingTimestamp | None = None) -> Span:
        """See the callback."""
        return callbacks.on_load_checkpoint_start(_milliseconds(start_time))

    def on_load_checkpoint_end(self, stop_time: TracingTimestamp | None = None) -> None:
        """See the callback."""
        callbacks.on_load_checkpoint_end(_milliseconds(stop_time))

    def on_optimizer_init_start(self, start_time: TracingTimestamp | None = None) -> Span:
        """See the callback."""
        return callbacks.on_optimizer_init_start(_milliseconds(start_time))

    def on_optimizer_init_end(self, stop_time: TracingTimestamp | None = None) -> None:
        """See the callback."""
        callbacks.on_optimizer_init_end(_milliseconds(stop_time))

    def on_training_loop_start(
        self,
        train_iterations_start: int,
        train_samples_start: int | None = None,
        train_iterations_target: int | None = None,
        train_samples_target: int | None = None,
        train_tokens_target: int | None = None,
        start_time: TracingTimestamp | None = None,
    ) -> Span:
        """See the callback `on_train_start`.

        Args:
            train_iterations_start: Steps done before.
            train_samples_start: Samples done before.
            train_iterations_target: Steps to do in all.
            train_samples_target: Samples to do in all.
            train_tokens_target: Not used: the tokens to do follow from the samples and the sequence length.
            start_time: None for now.
        """
        del train_tokens_target
        return callbacks.on_train_start(
            train_iterations_start,
            train_samples_start,
            train_iterations_target,
            train_samples_target,
            _milliseconds(start_time),
        )

    def on_training_loop_end(self, stop_time: TracingTimestamp | None = None) -> None:
        """See the callback `on_train_end`."""
        callbacks.on_train_end(_milliseconds(stop_time))

    def on_training_single_iteration_start(self, start_time: TracingTimestamp | None = None) -> Span | Hot:
        """See the callback."""
        return callbacks.on_training_single_iteration_start(_milliseconds(start_time))

    def on_training_single_iteration_end(self, stop_time: TracingTimestamp | None = None) -> None:
        """See the callback."""
        callbacks.on_training_single_iteration_end(_milliseconds(stop_time))

    def on_validation_start(self, start_time: TracingTimestamp | None = None) -> Span:
        """See the callback."""
        return callbacks.on_validation_start(_milliseconds(start_time))

    def on_validation_end(self, stop_time: TracingTimestamp | None = None) -> None:
        """See the callback."""
        callbacks.on_validation_end(_milliseconds(stop_time))

    def on_validation_single_iteration_start(self, start_time: TracingTimestamp | None = None) -> Span | Hot:
        """See the callback."""
        return callbacks.on_validation_single_iteration_start(_milliseconds(start_time))

    def on_validation_single_iteration_end(self, stop_time: TracingTimestamp | None = None) -> None:
        """See the callback."""
        callbacks.on_validation_single_iteration_end(_milliseconds(stop_time))

    def on_testing_start(self, start_time: TracingTimestamp | None = None) -> Span:
        """See the callback."""
        return callbacks.on_testing_start(_milliseconds(start_time))

    def on_testing_end(self, stop_time: TracingTimestamp | None = None) -> None:
        """See the callback."""
        callbacks.on_testing_end(_milliseconds(stop_time))

    def on_save_checkpoint_start(
        self, current_iteration: int, start_time: TracingTimestamp | None = None
    ) -> Span:
        """See the callback."""
        return callbacks.on_save_checkpoint_start(current_iteration, _milliseconds(start_time))

    def on_save_checkpoint_success(
        self, current_iteration: int, timestamp: TracingTimestamp | None = None
    ) -> None:
        """See the callback."""
        callbacks.on_save_checkpoint_success(current_iteration, _milliseconds(timestamp))

    def on_save_checkpoint_end(self, stop_time: TracingTimestamp | None = None) -> None:
        """See the callback."""
        callbacks.on_save_checkpoint_end(_milliseconds(stop_time))


_BEFORE = TrainingRecorder()
"""The recorder before anything is configured: it exports to nobody."""


def training_recorder() -> TrainingRecorder:
    """Give the recorder of the training job; before configuration one that exports to nobody."""
    found = get_recorder()
    return found if isinstance(found, TrainingRecorder) else _BEFORE


def get_recorder() -> Recorder:
    """Give the recorder of this process; before configuration one that exports to nobody."""
    configured = current()
    return _BEFORE if configured is None or configured.recorder is None else configured.recorder


def _milliseconds(time: TracingTimestamp | None) -> float | None:
    return None if time is None else time.seconds_since_epoch * 1000
