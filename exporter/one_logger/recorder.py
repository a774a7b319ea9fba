"""Recorders: core one-logger's way to make spans, events and errors by hand.

Used in the training process, on the job's threads. No call here raises, whatever it is given and whatever state it is
in, unless the job chose `PROPAGATE_EXCEPTIONS`; none gives None. A recorder keeps a tree of its own, per thread and
asyncio task; that of a training job shares the tree of the standard spans.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from exporter.one_logger import callbacks
from exporter.one_logger.attributes import SyncCheckpointMetricsUpdateAttributes
from exporter.one_logger.config import OneLoggerConfig
from exporter.one_logger.delivery import EXIT_SECONDS, Delivery, Filter
from exporter.one_logger.exporters import Exporter
from exporter.one_logger.names import ExportCustomizationMode, StandardTrainingJobEventName
from exporter.one_logger.state import current, current_recorder, misuse
from exporter.training import calls
from exporter.training import span_kinds as kinds
from exporter.training.attributes import Attributes, SpanName, TracingTimestamp, name_of, shown
from exporter.training.buffers import Handle, Hooks
from exporter.training.events import ErrorEvent, Event, TelemetryDataError
from exporter.training.recording import TRAINING
from exporter.training.spans import Span

_INCOMPLETE = TelemetryDataError.ErrorType.INCOMPLETE_TELEMETRY_DATA
_ALL = ExportCustomizationMode.EXPORT_ALL_SPANS


class Recorder(ABC):
    """Makes spans, and takes what happens in them."""

    @abstractmethod
    def start(
        self,
        span_name: SpanName,
        span_attributes: Attributes | None = None,
        start_event_attributes: Attributes | None = None,
        start_time: TracingTimestamp | None = None,
        parent_span: Span | None = None,
    ) -> Span:
        """Begin a span, in the parent that is given or else in the latest that is active here."""

    @abstractmethod
    def stop(
        self,
        span: Span,
        stop_event_attributes: Attributes | None = None,
        stop_time: TracingTimestamp | None = None,
    ) -> None:
        """End a span."""

    @abstractmethod
    def event(self, span: Span, event: Event) -> Event:
        """Record an event of a span that is active."""

    @abstractmethod
    def error(self, span: Span, error_message: str, exception: BaseException | None = None) -> ErrorEvent:
        """Record an error of the application."""

    @abstractmethod
    def telemetry_data_error(self, error_message: str, attributes: Attributes | None = None) -> None:
        """Tell the exporters that the telemetry is incomplete."""

    @abstractmethod
    def close(self) -> None:
        """End every span that is active, and let the exporters finish."""


class DefaultRecorder(Recorder):
    """A recorder with exporters of its own.

    Args:
        exporters: To whom; each is started at once, on a thread of its own.
        export_customization_mode: Whether the names are all that go out, or all that do not.
        span_name_filter: Names of spans.
    """

    def __init__(
        self,
        exporters: Iterable[Exporter] = (),
        export_customization_mode: ExportCustomizationMode = _ALL,
        span_name_filter: Iterable[SpanName] | None = None,
    ) -> None:
        self.delivery = Delivery(exporters, Filter(export_customization_mode, span_name_filter))
        self.delivery.begin()
        self._lock = threading.Lock()
        self._spans: dict[UUID, Span] = {}
        self._latest: ContextVar[Span | None] = ContextVar("latest_active_span", default=None)
        self._closed = False

    def start(
        self,
        span_name: SpanName,
        span_attributes: Attributes | None = None,
        start_event_attributes: Attributes | None = None,
        start_time: TracingTimestamp | None = None,
        parent_span: Span | None = None,
    ) -> Span:
        """Begin a span; after `close` one that goes nowhere."""
        parent = parent_span or _active_or_ancestor(self._latest.get())
        span = Span.create(span_name, parent, span_attributes, start_event_attributes, start_time)
        if self._takes("start"):
            with self._lock:
                self._spans[span.id] = span
            self._latest.set(span)
            span.listener = self.delivery.event
            self.delivery.start(span)
        return span

    def stop(
        self,
        span: Span,
        stop_event_attributes: Attributes | None = None,
        stop_time: TracingTimestamp | None = None,
    ) -> None:
        """End a span; one that is not active is a misuse."""
        if not self._takes("stop"):
            return
        with self._lock:
            found = self._spans.pop(getattr(span, "id", None), None)  # type: ignore[arg-type]  # anything may come
        if found is None:
            misuse("recorder.stop", "no_such_span", "a span that is active")
            return
        found.stop(stop_event_attributes, stop_time)
        if self._latest.get() is found:
            self._latest.set(_active_or_ancestor(found.parent_span))
        self.delivery.stop(found)

    def event(self, span: Span, event: Event) -> Event:
        """Record an event of a span that is active."""
        if self._takes("event"):
            if _is(span, Span, Handle) and _is(event, Event):
                span.add_event(event)  # its listener exports it
            else:
                misuse("recorder.event", "no_such_span", f"a span and an event, not {shown(event)}")
        return event

    def error(self, span: Span, error_message: str, exception: BaseException | None = None) -> ErrorEvent:
        """Record an error of the application."""
        event = ErrorEvent.create(error_message, exception)
        if self._takes("error"):
            if _is(span, Span):
                span.keep(event)
                self._tell_error(span, event)
            else:
                misuse("recorder.error", "no_such_span", f"a span that is active, not {shown(span)}")
        return event

    def _tell_error(self, span: Span, event: ErrorEvent) -> None:
        self.delivery.error(span, event)

    def telemetry_data_error(self, error_message: str, attributes: Attributes | None = None) -> None:
        """Tell the exporters that the telemetry is incomplete."""
        if self._takes("telemetry_data_error"):
            error = TelemetryDataError.create(_INCOMPLETE, error_message, attributes)
            self.delivery.telemetry_data_error(error)

    def close(self) -> None:
        """End every active span, the innermost first, and close the exporters; again is harmless."""
        if self._closed:
            return
        with self._lock:
            active = list(self._spans.values())
        for span in reversed(active):
            self.stop(span)
        self._closed = True
        self.delivery.close(EXIT_SECONDS)

    def get_active_spans_by_name(self, span_name: SpanName) -> list[Span]:
        """Give the active spans of a name, in the order of their starts."""
        with self._lock:
            active = list(self._spans.values())
        return [span for span in active if span.name_str == name_of(span_name)]

    def _takes(self, call: str) -> bool:
        if self._closed:
            misuse(f"recorder.{call}", "closed", "to be called before the recorder is closed")
            return False
        records = current()
        return records is None or current_recorder() is not self or records.enabled


def _starts(callback: Callable[..., Any]) -> Callable[..., Any]:
    """Make the method of a callback that begins something."""

    def method(self: TrainingRecorder, start_time: TracingTimestamp | None = None) -> Span | Handle:
        del self
        begun: Span | Handle = callback(_milliseconds(start_time))
        return begun

    method.__doc__ = callback.__doc__
    return method


def _ends(callback: Callable[..., None]) -> Callable[..., None]:
    """Make the method of a callback that ends something."""

    def method(self: TrainingRecorder, stop_time: TracingTimestamp | None = None) -> None:
        del self
        callback(_milliseconds(stop_time))

    method.__doc__ = callback.__doc__
    return method


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
        export_customization_mode: ExportCustomizationMode = _ALL,
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
        kind = _kind_of(span_name)
        values: dict[str, Any] | None = None
        if kind is kinds.APPLICATION:
            values = Hooks.telemetry.ask_application()
        elif kind is kinds.TRAINING_LOOP:
            values = calls.loop_values("start", 0, None, None, None)
        elif kind is kinds.CHECKPOINT_SAVE:
            values = calls.save_values(0)
        return calls.begin(
            kind,
            "start",
            at=start_time,
            name=span_name,
            span_attributes=span_attributes,
            start_event_attributes=start_event_attributes,
            parent=parent_span,
            values=values,
        )

    def stop(
        self,
        span: Span,
        stop_event_attributes: Attributes | None = None,
        stop_time: TracingTimestamp | None = None,
    ) -> None:
        """End a span; one that is not active is a misuse."""
        if _is(span, Span):
            calls.end(_kind_of(span.name), "stop", at=stop_time, span=span, attributes=stop_event_attributes)
        else:
            misuse("recorder.stop", "no_such_span", f"a span that is active, not {shown(span)}")

    def _tell_error(self, span: Span, event: ErrorEvent) -> None:
        calls.say("span_error", span=span, event=event)

    def get_active_spans_by_name(self, span_name: SpanName) -> list[Span]:
        """Give the active spans of a name, in the order of their starts."""
        return [span for span in TRAINING.open_spans() if span.name_str == name_of(span_name)]

    def close(self) -> None:
        """Give the exporters a moment for what waits; another application may begin in this process."""
        self.delivery.flush(EXIT_SECONDS)

    def create_sync_checkpoint_metrics_event(self, span_name: SpanName) -> Event:
        """Make the event that tells how long the saves of a strategy took, of the spans that are active."""
        now = TracingTimestamp.now().perf_counter_seconds
        active = self.get_active_spans_by_name(span_name)
        seconds = [now - span.start_event.timestamp.perf_counter_seconds for span in active] or [0.0]
        attributes = SyncCheckpointMetricsUpdateAttributes.create(sum(seconds), min(seconds), max(seconds))
        return Event.create(StandardTrainingJobEventName.SYNC_CHECKPOINT_METRICS_UPDATE, attributes)

    on_app_start = _starts(callbacks.on_app_start)
    on_app_end = _ends(callbacks.on_app_end)
    on_distributed_init_start = _starts(callbacks.on_distributed_init_start)
    on_distributed_init_end = _ends(callbacks.on_distributed_init_end)
    on_model_init_start = _starts(callbacks.on_model_init_start)
    on_model_init_end = _ends(callbacks.on_model_init_end)
    on_dataloader_init_start = _starts(callbacks.on_dataloader_init_start)
    on_dataloader_init_end = _ends(callbacks.on_dataloader_init_end)
    on_load_checkpoint_start = _starts(callbacks.on_load_checkpoint_start)
    on_load_checkpoint_end = _ends(callbacks.on_load_checkpoint_end)
    on_optimizer_init_start = _starts(callbacks.on_optimizer_init_start)
    on_optimizer_init_end = _ends(callbacks.on_optimizer_init_end)
    on_training_loop_end = _ends(callbacks.on_train_end)
    on_training_single_iteration_start = _starts(callbacks.on_training_single_iteration_start)
    on_training_single_iteration_end = _ends(callbacks.on_training_single_iteration_end)
    on_validation_start = _starts(callbacks.on_validation_start)
    on_validation_end = _ends(callbacks.on_validation_end)
    on_validation_single_iteration_start = _starts(callbacks.on_validation_single_iteration_start)
    on_validation_single_iteration_end = _ends(callbacks.on_validation_single_iteration_end)
    on_testing_start = _starts(callbacks.on_testing_start)
    on_testing_end = _ends(callbacks.on_testing_end)
    on_save_checkpoint_end = _ends(callbacks.on_save_checkpoint_end)

    def on_training_loop_start(
        self,
        train_iterations_start: int,
        train_samples_start: int | None = None,
        train_iterations_target: int | None = None,
        train_samples_target: int | None = None,
        train_tokens_target: int | None = None,
        start_time: TracingTimestamp | None = None,
    ) -> Span:
        """Say that a training loop begins; the tokens to do follow from the samples and the sequence length."""
        del train_tokens_target
        given = (train_iterations_start, train_samples_start, train_iterations_target, train_samples_target)
        return callbacks.on_train_start(*given, _milliseconds(start_time))

    def on_save_checkpoint_start(
        self, current_iteration: int, start_time: TracingTimestamp | None = None
    ) -> Span:
        """Say that the saving of a checkpoint begins."""
        return callbacks.on_save_checkpoint_start(current_iteration, _milliseconds(start_time))

    def on_save_checkpoint_success(
        self, current_iteration: int, timestamp: TracingTimestamp | None = None
    ) -> None:
        """Say that a checkpoint is safe."""
        callbacks.on_save_checkpoint_success(current_iteration, _milliseconds(timestamp))


_BEFORE = TrainingRecorder()
"""The recorder before anything is configured: it exports to nobody."""


def training_recorder() -> TrainingRecorder:
    """Give the recorder of the training job; before configuration one that exports to nobody."""
    found = get_recorder()
    return found if isinstance(found, TrainingRecorder) else _BEFORE


def get_recorder() -> Recorder:
    """Give the recorder of this process; before configuration one that exports to nobody."""
    return current_recorder() or _BEFORE


def _active_or_ancestor(span: Span | None) -> Span | None:
    while span is not None and not span.active:
        span = span.parent_span
    return span


def _kind_of(name: SpanName) -> kinds.Kind:
    return kinds.BY_NAME.get(name_of(name)) or kinds.kind_named(name, phase=False)


def _is(value: object, *of: type) -> bool:
    """Tell whether a job passed what the signature says: one-logger gives None where it is off."""
    return isinstance(value, of)


def _milliseconds(time: TracingTimestamp | None) -> float | None:
    return None if time is None else time.seconds_since_epoch * 1000
