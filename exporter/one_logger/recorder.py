"""Recorders, core one-logger's way to make spans, events and errors by hand; and `timed_span`; on the job's threads.

No call raises, unless the job chose it, and none gives None: before configuration, on a rank that is disabled and where the
job's own recorder fails, spans go nowhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from uuid import UUID

from exporter.errors import OneLoggerError
from exporter.one_logger import callbacks, names
from exporter.one_logger.config import OneLoggerConfig
from exporter.one_logger.delivery import ALL, EXIT_SECONDS, Delivery, Filter
from exporter.one_logger.exporters import Exporter
from exporter.one_logger.records import current, misuse
from exporter.recording.timing import AnyFunction, within
from exporter.training import calls
from exporter.training import span_kinds as kinds
from exporter.training.attributes import Attributes, SpanName, TracingTimestamp, name_of, shown
from exporter.training.buffers import Handle, Hooks, handle_of
from exporter.training.metrics import report
from exporter.training.recording import TRAINING
from exporter.training.spans import ErrorEvent, Event, Span


class DefaultRecorder:
    """A recorder with exporters of its own, and a tree per thread and asyncio task; `Recorder` is the same class."""

    def __init__(
        self,
        exporters: Iterable[Exporter] = (),
        export_customization_mode: names.ExportCustomizationMode = ALL,
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
        if self._takes("event") and self._knows("event", span):
            span.add_event(event)  # its listener exports it
        return event

    def error(self, span: Span, error_message: str, exception: BaseException | None = None) -> ErrorEvent:
        """Record an error of the application."""
        event = ErrorEvent.create(error_message, exception)
        if self._takes("error") and self._knows("error", span):
            span.keep(event)
            self._tell_error(span, event)
        return event

    def _tell_error(self, span: Span, event: ErrorEvent) -> None:
        self.delivery.error(span, event)

    def telemetry_data_error(self, error_message: str, attributes: Attributes | None = None) -> None:
        """Tell the exporters that the telemetry is incomplete."""
        if self._takes("telemetry_data_error"):
            self.delivery.telemetry_data_error(error_message, attributes)

    def close(self) -> None:
        """End every active span, the innermost first, and close the exporters; again is harmless."""
        if self._closed:
            return
        for span in reversed(self._active()):
            self.stop(span)
        self._closed = True
        self.delivery.close(EXIT_SECONDS)

    def get_active_spans_by_name(self, span_name: SpanName) -> list[Span]:
        """Give the active spans of a name, in the order of their starts."""
        return [span for span in self._active() if span.name_str == name_of(span_name)]

    def _active(self) -> list[Span]:
        with self._lock:
            return list(self._spans.values())

    def _takes(self, call: str) -> bool:
        if self._closed:
            misuse(f"recorder.{call}", "closed", "to be called before the recorder is closed")
            return False
        records = current()
        return records is None or records.recorder is not self or records.enabled

    def _knows(self, call: str, span: object) -> bool:
        """Tell whether a span is one: one-logger gives None where it is off."""
        known = isinstance(span, (Span, Handle) if call == "event" else Span)
        if not known:
            misuse(f"recorder.{call}", "no_such_span", f"a span that is active, not {shown(span)}")
        return known


Recorder = DefaultRecorder


class TrainingRecorder(DefaultRecorder):
    """A recorder with a method for each callback; the times are `TracingTimestamp`s, None for now."""

    def __init__(self, config: OneLoggerConfig | None = None, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.settings = config

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]:
            """Give the method of a callback."""

    def start(
        self,
        span_name: SpanName,
        span_attributes: Attributes | None = None,
        start_event_attributes: Attributes | None = None,
        start_time: TracingTimestamp | None = None,
        parent_span: Span | None = None,
    ) -> Span:
        """Begin a span; a standard name makes that span."""
        kind = _kind_of(span_name)
        values: dict[str, Any] | None = None
        if kind is kinds.APPLICATION:
            values = Hooks.telemetry.ask_application()
        elif kind is kinds.TRAINING_LOOP:
            values = calls.loop_values("start", 0, None, None, None)
        elif kind is kinds.CHECKPOINT_SAVE:
            values = calls.save_values(0)
        attributes = {"span_attributes": span_attributes, "start_event_attributes": start_event_attributes}
        more: dict[str, Any] = {**attributes, "parent": parent_span, "values": values}
        return calls.begin(kind, "start", at=start_time, name=span_name, **more)

    def stop(
        self,
        span: Span,
        stop_event_attributes: Attributes | None = None,
        stop_time: TracingTimestamp | None = None,
    ) -> None:
        """End a span; one that is not active is a misuse."""
        if self._knows("stop", span):
            calls.end(_kind_of(span.name), "stop", at=stop_time, span=span, attributes=stop_event_attributes)

    def _tell_error(self, span: Span, event: ErrorEvent) -> None:
        calls.say("span_error", span=span, event=event)

    def _active(self) -> list[Span]:
        return TRAINING.open_spans()

    def close(self) -> None:
        """Give the exporters a moment for what waits; another application may begin in this process."""
        self.delivery.flush(EXIT_SECONDS)

    def create_sync_checkpoint_metrics_event(self, span_name: SpanName) -> Event:
        """Make the event that tells how long the saves of a strategy took, of the spans that are active."""
        now = TracingTimestamp.now().perf_counter_seconds
        active = self.get_active_spans_by_name(span_name)
        seconds = [now - span.start_event.timestamp.perf_counter_seconds for span in active] or [0.0]
        kind, name = names.SyncCheckpointMetricsUpdateAttributes, names.StandardTrainingJobEventName
        attributes = kind.create(sum(seconds), min(seconds), max(seconds))
        return Event.create(name.SYNC_CHECKPOINT_METRICS_UPDATE, attributes)

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


def _method(callback: Callable[..., Any], *, starts: bool) -> Callable[..., Any]:
    """Make the method of a callback that takes nothing but a time."""
    if starts:
        return lambda _self, start_time=None: callback(_milliseconds(start_time))
    return lambda _self, stop_time=None: callback(_milliseconds(stop_time))


for _name, _callback in list(vars(callbacks).items()):
    _name = _name.replace("on_train_", "on_training_loop_")  # the one that is called otherwise there
    if _name.startswith("on_") and _name not in vars(TrainingRecorder):
        setattr(TrainingRecorder, _name, _method(_callback, starts=_name.endswith("_start")))


BEFORE = TrainingRecorder()
"""The recorder before anything is configured: it exports to nobody."""


def get_recorder() -> DefaultRecorder:
    """Give the recorder of this process; before configuration one that exports to nobody."""
    records = current()
    return BEFORE if records is None else records.recorder


def _active_or_ancestor(span: Span | None) -> Span | None:
    while span is not None and not span.active:
        span = span.parent_span
    return span


def _kind_of(name: SpanName) -> kinds.Kind:
    return kinds.BY_NAME.get(name_of(name)) or kinds.kind_named(name, phase=False)


def _milliseconds(time: TracingTimestamp | None) -> float | None:
    return None if time is None else time.seconds_since_epoch * 1000


class timed_span:  # noqa: N801  # one-logger's name, and a class is what it must be
    """A span of any name around a block, or around every call of a function; it gives the `Span`.

    A standard name makes that span, and counts as its phase; a short one that nobody exports gives what
    `training_iteration()` gives: the same methods, at a tenth of the cost. An exception inside is recorded as an error of
    the application, with its traceback, and goes on.
    """

    def __init__(
        self,
        name: SpanName,
        span_attributes: Attributes | None = None,
        start_event_attributes: Attributes | None = None,
    ) -> None:
        self._arguments = (name, span_attributes, start_event_attributes)
        self._recorder: DefaultRecorder | None = None
        self._block: Any = None  # a handle, or a span of the recorder

    def __call__(self, function: AnyFunction) -> AnyFunction:
        """Decorate a function, a coroutine function or a generator function: each call is a span."""
        return within(lambda: timed_span(*self._arguments), function)

    def __enter__(self) -> Span:
        recorder = get_recorder()
        name, attributes, start = self._arguments
        records, kind = current(), kinds.BY_NAME.get(name_of(name))
        short = kind in kinds.STEPS or kind in kinds.SHORT
        unwanted = short and (records is None or not records.wants(name_of(name)))
        if unwanted and attributes is None and start is None and type(recorder) is TrainingRecorder:
            self._block = handle_of(kind)  # type: ignore[arg-type]  # it has what a span has, and stands for one
            return self._block.__enter__()  # type: ignore[no-any-return]  # see above
        given: dict[str, Any] = {"span_attributes": attributes, "start_event_attributes": start}
        self._block = _guarded(lambda: recorder.start(span_name=name, **given))
        if self._block is None:  # the job's own recorder failed, or gave nothing
            return Span.create(name, None, attributes, start)
        self._recorder = recorder
        return self._block  # type: ignore[no-any-return]  # a span

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> None:
        block, recorder = self._block, self._recorder
        self._block = self._recorder = None
        if recorder is not None:
            if isinstance(error, Exception):
                message = f"Error in {name_of(self._arguments[0])}: "  # the exception says the rest
                _guarded(lambda: recorder.error(block, message, error))
            _guarded(lambda: recorder.stop(block))
        elif block is not None:
            block.__exit__(kind, error, traceback)


def _guarded(step: Callable[[], Any]) -> Any:
    """Run a step of a recorder, which may be the job's own; what it raises is counted, not passed on."""
    try:
        return step()
    except Exception as error:  # the job's own recorder
        if isinstance(error, OneLoggerError) and Hooks.telemetry.propagates:
            raise
        report("timed_span", "recorder_raised", f"a recorder that does not raise: {shown(error)}")
        return None
