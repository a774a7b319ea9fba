"""`timed_span`: a span around a block or a function.

Used in the training process, on the job's threads. It raises nothing of its own, unless the job chose
`PROPAGATE_EXCEPTIONS`, and always gives a span: before configuration, on a rank that is disabled and where the job's
own recorder fails, one that goes nowhere. A short standard span that nobody exports gives what `training_iteration()`
gives: the same methods, at a tenth of the cost.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from exporter.errors import OneLoggerError
from exporter.one_logger.recorder import Recorder, TrainingRecorder, get_recorder
from exporter.one_logger.state import current
from exporter.training.attributes import Attributes, SpanName, name_of, shown
from exporter.training.buffers import Handle, handle_of
from exporter.training.decorating import decorated
from exporter.training.metrics import report
from exporter.training.span_kinds import BY_NAME, SHORT, STEPS
from exporter.training.spans import Span

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


class timed_span:  # noqa: N801  # one-logger's name, and a class is what it must be
    """A span around a block, or around every call of a function; it gives the `Span`.

    An exception inside is recorded as an error of the application, with its traceback, and goes on.

    Args:
        name: Any; a standard name makes that span, and counts as its phase.
        span_attributes: Of the span.
        start_event_attributes: Of its start.
    """

    def __init__(
        self,
        name: SpanName,
        span_attributes: Attributes | None = None,
        start_event_attributes: Attributes | None = None,
    ) -> None:
        self._arguments = (name, span_attributes, start_event_attributes)
        self._block: Handle | None = None
        self._recorder: Recorder | None = None
        self._span: Span | None = None

    def __call__(self, function: AnyFunction) -> AnyFunction:
        """Decorate a function, a coroutine function or a generator function: each call is a span."""
        return decorated(function, lambda: timed_span(*self._arguments))

    def __enter__(self) -> Span:
        recorder = get_recorder()
        name, attributes, start = self._arguments
        if attributes is None and start is None:
            self._block = _short_block(name, recorder)
            if self._block is not None:
                handle: Any = self._block.__enter__()  # it has what a span has, and stands for one
                return handle  # type: ignore[no-any-return]  # see above
        span: Span | None = _guarded("timed_span", lambda: recorder.start(name, attributes, start))
        if span is None:  # the job's own recorder failed, or gave nothing
            return Span.create(name, None, attributes, start)
        self._recorder, self._span = recorder, span
        return span

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        block, recorder, span = self._block, self._recorder, self._span
        self._block = self._recorder = self._span = None
        if block is not None:
            block.__exit__(kind, error, traceback)
        elif recorder is not None and span is not None:
            if isinstance(error, Exception):
                message = f"Error in {name_of(self._arguments[0])}: {type(error).__name__}"
                _guarded("timed_span", lambda: recorder.error(span, message, error))
            _guarded("timed_span", lambda: recorder.stop(span))


def _short_block(name: SpanName, recorder: Recorder) -> Handle | None:
    """Give the block of a short standard span that nobody exports; None for every other."""
    kind = BY_NAME.get(name_of(name))
    if kind is None or not (kind in STEPS or kind in SHORT) or type(recorder) is not TrainingRecorder:
        return None
    records = current()
    return handle_of(kind) if records is None or not records.wants(name_of(name)) else None


def _guarded(call: str, step: Callable[[], Any]) -> Any:
    """Run a step of a recorder, which may be the job's own; what it raises is counted, not passed on."""
    try:
        found = step()
    except OneLoggerError:
        records = current()
        if records is not None and records.propagates:
            raise
        report(call, "recorder_raised", "a recorder that does not raise")
    except Exception as error:  # noqa: BLE001  # the job's own recorder
        report(call, "recorder_raised", f"a recorder that does not raise: {shown(error)}")
    else:
        return found
    return None
