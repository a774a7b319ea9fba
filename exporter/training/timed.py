"""`timed_span`: a span around a block or a function (the module has another name: both stand in `exporter.training`).

Used in the training process, on the job's threads. It raises nothing of its own, unless the job chose
`PROPAGATE_EXCEPTIONS`, and always gives a span: before configuration, on a rank that is disabled and where the job's
own recorder fails, one that goes nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator

from exporter.errors import OneLoggerError
from exporter.training.names import SpanName, name_of
from exporter.training.provider import current
from exporter.training.recorder import Recorder
from exporter.training.reports import report
from exporter.training.spans import Span
from exporter.training.training_recorder import get_recorder
from exporter.training.types import Attributes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

    from typing_extensions import Self

__all__ = ["get_recorder", "timed_span"]


class timed_span(ContextDecorator):  # noqa: N801  # one-logger's name, and a class is what it must be
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
        self._recorder: Recorder | None = None
        self._span: Span | None = None

    def _recreate_cm(self) -> Self:
        return type(self)(*self._arguments)

    def __enter__(self) -> Span:
        recorder = get_recorder()
        name, attributes, start = self._arguments
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
        recorder, span = self._recorder, self._span
        self._recorder = self._span = None
        if recorder is None or span is None:
            return
        if isinstance(error, Exception):
            message = f"Error in {name_of(self._arguments[0])}: {type(error).__name__}"
            _guarded("timed_span", lambda: recorder.error(span, message, error))
        _guarded("timed_span", lambda: recorder.stop(span))


def _guarded(call: str, step: Callable[[], Any]) -> Any:
    """Run a step of a recorder, which may be the job's own; what it raises is counted, not passed on."""
    try:
        found = step()
    except OneLoggerError:
        configured = current()
        if configured is not None and configured.settings.propagates:
            raise
        report(call, "recorder_raised", "a recorder that does not raise")
    except Exception as error:  # noqa: BLE001  # the job's own recorder
        report(call, "recorder_raised", f"a recorder that does not raise: {error!r}")
    else:
        return found
    return None
