"""Recorders: spans, events and errors that the job records by explicit calls.

A call on a recorder raises only if the job uses PROPAGATE_EXCEPTIONS. `start` returns a span even if nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from exporter.one_logger.current_observer import current_observer, misuse
from exporter.one_logger.delivery import ALL, EXIT_SECONDS, Delivery, SpanFilter
from exporter.one_logger.exporters import Exporter
from exporter.one_logger.names import ExportCustomizationMode
from exporter.one_logger.span_export import RECORDER_VALUE, SpanExport
from exporter.recording.conversion import safe_repr, to_name
from exporter.training import kinds
from exporter.training.attributes import Attributes, SpanName, TracingTimestamp
from exporter.training.kinds import BlockKind
from exporter.training.observer import ObservedBlock
from exporter.training.rare_blocks import begin_block, end_block
from exporter.training.recorder import TRAINING
from exporter.training.spans import ErrorEvent, Event, NonRecordingSpan, Span

__all__ = ["DefaultRecorder", "Recorder"]


class RecorderObserver:
    """Observer that exports the spans of a DefaultRecorder."""

    def __init__(self, recorder: DefaultRecorder) -> None:
        self._recorder = recorder
        self.span_export = SpanExport(recorder.delivery)

    def observes(self, kind: BlockKind) -> bool:  # noqa: ARG002  # part of the protocol
        """Return False: the hot blocks, for steps and the phases inside a step, never belong to a recorder."""
        return False

    def allows(self, kind: BlockKind, call: str, values: Mapping[str, object]) -> bool:  # noqa: ARG002
        """Return True, because the recorder refuses no block."""
        return True

    def begin_while_open(self, kind: BlockKind, call: str) -> bool:  # noqa: ARG002
        """Return False: the recorder refuses no start. Its own spans can be nested in spans of the same name."""
        return False

    def block_began(self, block: ObservedBlock) -> None:
        """Export the start of a span of the recorder."""
        if block.values.get(RECORDER_VALUE) is self._recorder:
            self.span_export.start(block.span)

    def block_ending(self, block: ObservedBlock) -> None:
        """Do nothing, because the recorder has no blocks for applications and loops."""

    def block_ended(
        self,
        block: ObservedBlock,
        timestamp: TracingTimestamp,  # noqa: ARG002
        error: BaseException | None,  # noqa: ARG002
    ) -> None:
        """Export the stop of a span of the recorder."""
        self.span_export.stop(block.span)

    def block_discarded(self, block: ObservedBlock) -> None:
        """Forget a span without exporting its stop."""
        self.span_export.forget(block.span)

    def event_added(self, span: Span, event: Event) -> None:
        """Export an event of a span of the recorder."""
        self.span_export.event(span, event)

    def end_without_begin(self, kind: BlockKind, call: str) -> None:
        """Do nothing, because the call does not concern a span of the recorder."""

    def save_succeeded(self, global_step: object, timestamp: TracingTimestamp, call: str) -> None:
        """Do nothing, because a recorder exports only spans."""

    def step_reported(
        self, step: int | None, seconds: float | None, mode: str, timestamp: TracingTimestamp
    ) -> None:
        """Do nothing, because a recorder exports only spans."""

    def iteration_ended(self, kind: BlockKind, start_time: float, end_time: float, is_failed: bool) -> None:
        """Do nothing, because a recorder exports only spans."""


class DefaultRecorder:
    """Recorder of spans, which nest per thread and asyncio task. `Recorder` is another name of this class."""

    def __init__(
        self,
        exporters: Iterable[Exporter] = (),
        export_customization_mode: ExportCustomizationMode = ALL,
        span_name_filter: Iterable[SpanName] | None = None,
    ) -> None:
        self.delivery = Delivery(exporters, SpanFilter(export_customization_mode, span_name_filter))
        self._is_closed = False
        self._observer = self._observe()
        self.delivery.start_exporters()

    def _observe(self) -> RecorderObserver | None:
        """Add and return the observer that exports the spans of this recorder. Return None if there are no exporters."""
        if not self.delivery.queues:
            return None
        observer = RecorderObserver(self)
        TRAINING.observers.add(observer)
        return observer

    def start(
        self,
        span_name: SpanName,
        span_attributes: Attributes | None = None,
        start_event_attributes: Attributes | None = None,
        start_time: TracingTimestamp | None = None,
        parent_span: Span | None = None,
    ) -> Span:
        """Start a span.

        After `close`, and while one-logger is disabled, the returned span is not recorded. A call after `close` counts as misuse.
        """
        if not self._accepts("start"):
            return Span.create(span_name, parent_span, span_attributes, start_event_attributes, start_time)
        span, _ = begin_block(
            kinds.named_kind(to_name(span_name), is_phase=False),
            "start",
            timestamp=start_time or TracingTimestamp.now(),
            span_name=span_name,
            span_attributes=span_attributes,
            start_event_attributes=start_event_attributes,
            parent=parent_span,
            values={RECORDER_VALUE: self},
        )
        return span

    def stop(
        self,
        span: Span,
        stop_event_attributes: Attributes | None = None,
        stop_time: TracingTimestamp | None = None,
    ) -> None:
        """Stop a span. A call for a span that is not active is counted as misuse and ignored."""
        if self._accepts("stop") and self._is_active("stop", span):
            kind = kinds.named_kind(to_name(span.name), is_phase=False)
            end_block(
                kind,
                "stop",
                timestamp=stop_time or TracingTimestamp.now(),
                span=span,
                attributes=stop_event_attributes,
            )

    def event(self, span: Span, event: Event) -> Event:
        """Record and return an event of a span."""
        if self._accepts("event") and self._is_span("event", span):
            span.add_event(event)
        return event

    def error(self, span: Span, error_message: str, exception: BaseException | None = None) -> ErrorEvent:
        """Record an error of a span, and return the event of the error."""
        event = ErrorEvent.create(error_message, exception)
        if self._accepts("error") and self._is_span("error", span) and isinstance(span, Span):
            span.append_event(event)
            self._export_error(span, event)
        return event

    def _export_error(self, span: Span, event: ErrorEvent) -> None:
        """Export an error, unless the recorder has no exporters."""
        if self._observer is not None:
            self._observer.span_export.error(span, event)

    def telemetry_data_error(self, error_message: str, attributes: Attributes | None = None) -> None:
        """Export a notice that records are missing."""
        if self._accepts("telemetry_data_error"):
            self.delivery.telemetry_data_error(error_message, attributes)

    def close(self) -> None:
        """Stop the active spans of this recorder, the latest first, and close the exporters. A second call has no effect."""
        if self._is_closed:
            return
        for span in reversed(self._active_spans()):
            self.stop(span)
        self._is_closed = True
        if self._observer is not None:
            TRAINING.observers.remove(self._observer)
        self.delivery.close(EXIT_SECONDS)

    def get_active_spans_by_name(self, span_name: SpanName) -> list[Span]:
        """Return the active spans with this name, oldest first."""
        return [span for span in self._active_spans() if span.name_str == to_name(span_name)]

    def _active_spans(self) -> list[Span]:
        """Return the active spans that this recorder has started, oldest first."""
        blocks = TRAINING.open_blocks()
        return [block.span for block in blocks if block.values.get(RECORDER_VALUE) is self]

    def _accepts(self, call: str) -> bool:
        """Return True if this recorder records, and count a call after `close` as misuse."""
        if self._is_closed:
            misuse(f"recorder.{call}", "closed", "to be called before the recorder is closed")
            return False
        observer = current_observer()
        return observer is None or observer.recorder is not self or observer.is_enabled

    @staticmethod
    def _is_active(call: str, span: object) -> bool:
        """Return True if an object is an active span. Otherwise count the call as misuse."""
        if isinstance(span, Span) and span.active:
            return True
        misuse(f"recorder.{call}", "no_such_span", f"an active span, not {safe_repr(span)}")
        return False

    @staticmethod
    def _is_span(call: str, span: object) -> bool:
        """Return True if an object is a span. Otherwise count the call as misuse."""
        if isinstance(span, (Span, NonRecordingSpan)):
            return True
        misuse(f"recorder.{call}", "no_such_span", f"a span, not {safe_repr(span)}")
        return False


Recorder = DefaultRecorder
