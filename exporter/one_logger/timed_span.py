"""`timed_span`: context manager and decorator that records a span of any name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from exporter.errors import OneLoggerError
from exporter.one_logger.current_observer import current_observer
from exporter.one_logger.recorders import DefaultRecorder
from exporter.one_logger.training_recorder import TrainingRecorder, get_recorder
from exporter.recording.conversion import safe_repr, to_name
from exporter.recording.signal_safety import is_from_signal_handler
from exporter.recording.timing import AnyFunction, within
from exporter.training import api, kinds
from exporter.training.attributes import Attributes, SpanName
from exporter.training.kinds import BlockKind
from exporter.training.misuse import report
from exporter.training.spans import Span

__all__ = ["timed_span"]

HOT_BLOCKS: dict[BlockKind, Callable[[], AbstractContextManager[Any]]] = {
    kinds.TRAINING_ITERATION: api.training_iteration,
    kinds.VALIDATION_ITERATION: api.validation_iteration,
    kinds.TESTING_ITERATION: api.testing_iteration,
    kinds.DATA_LOADING: api.data_loading,
    kinds.MODEL_FORWARD: api.model_forward,
    kinds.MODEL_BACKWARD: api.model_backward,
    kinds.ZERO_GRAD: api.zero_grad,
    kinds.OPTIMIZER_UPDATE: api.optimizer_update,
}
"""Functions that return a block, by hot kind. Spans of these kinds are short and frequent."""


class timed_span:  # noqa: N801  # one-logger's name
    """Context manager and decorator that records a span of any name and returns the `Span`.

    A standard name records the standard block with its phase. An exception in the block is recorded as an error of the application, and
    propagates. For a short and frequent block that is not exported, the entry returns an object with the methods of a span instead of a
    `Span`, because such an object takes less time to create.
    """

    def __init__(
        self,
        name: SpanName,
        span_attributes: Attributes | None = None,
        start_event_attributes: Attributes | None = None,
    ) -> None:
        self._name = name
        self._span_attributes = span_attributes
        self._start_event_attributes = start_event_attributes
        self._recorder: DefaultRecorder | None = None
        self._span: Span | None = None
        self._block: AbstractContextManager[Any] | None = None

    def __call__(self, function: AnyFunction) -> AnyFunction:
        """Decorate a function, coroutine function or generator function: each call is a span."""
        return within(
            lambda: timed_span(self._name, self._span_attributes, self._start_event_attributes), function
        )

    def __enter__(self) -> Span:
        recorder = get_recorder()
        block = self._hot_block(recorder)
        if block is not None:
            self._block = block
            block_span: Span = block.__enter__()
            return block_span
        span = _guarded(
            lambda: recorder.start(
                span_name=self._name,
                span_attributes=self._span_attributes,
                start_event_attributes=self._start_event_attributes,
            )
        )
        if span is None:  # a recorder class of the job raised or returned None
            return Span.create(self._name, None, self._span_attributes, self._start_event_attributes)
        self._recorder, self._span = recorder, span
        active_span: Span = span
        return active_span

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> None:
        recorder, span, block = self._recorder, self._span, self._block
        self._recorder = self._span = self._block = None
        if block is not None:
            block.__exit__(kind, error, traceback)  # type: ignore[arg-type]  # a traceback
        elif recorder is not None and span is not None:
            if isinstance(error, Exception):
                message = f"Error in {to_name(self._name)}: "  # one-logger appends the exception
                _guarded(lambda: recorder.error(span, message, error))
            _guarded(lambda: recorder.stop(span))

    def _hot_block(self, recorder: DefaultRecorder) -> AbstractContextManager[Any] | None:
        """Return the block of a short span that has no attributes and is not exported. Return None for any other span."""
        if self._span_attributes is not None or self._start_event_attributes is not None:
            return None
        if type(recorder) is not TrainingRecorder:
            return None
        kind = kinds.standard_kind(to_name(self._name))
        create_block = None if kind is None else HOT_BLOCKS.get(kind)
        if kind is None or create_block is None:
            return None
        observer = current_observer()
        return create_block() if observer is None or not observer.observes(kind) else None


def _guarded(call: Callable[[], Any]) -> Any:
    """Call a method of a recorder, and return its result.

    An exception is counted as misuse, and None is returned. OneLoggerError is raised if the job uses PROPAGATE_EXCEPTIONS.
    """
    try:
        return call()
    except Exception as error:  # the recorder may be a class of the job
        if is_from_signal_handler(error):
            raise
        observer = current_observer()
        if isinstance(error, OneLoggerError) and observer is not None and observer.settings.propagates:
            raise
        report("timed_span", "recorder_raised", f"no exception from the recorder: {safe_repr(error)}")
        return None
