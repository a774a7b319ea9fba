"""Delivery: the way of spans and events from the recording to the exporters, each with its own thread and queue.

An exporter that raises is asked again, after growing pauses; one that hangs or is slow costs its own records, which are
counted. A forked child delivers nothing: what waits is its parent's, and so are the exporters' connections.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

from exporter.errors import DefinitionError, OneLoggerError
from exporter.one_logger.exporters import Exporter
from exporter.one_logger.names import DEFAULT_SPANS_EXPORT_BLACKLIST, ExportCustomizationMode
from exporter.recording.identity import clean_text
from exporter.recording.notices import tell_once
from exporter.recording.stat import metric
from exporter.recording.worker import Counter, Worker
from exporter.training.attributes import Attributes, SpanName, TracingTimestamp, assert_that, name_of, shown
from exporter.training.spans import ErrorEvent, Event, Span, TelemetryDataError

EXIT_SECONDS = 2.0
"""The longest that an exiting process waits for the exporters."""
QUEUED_RECORDS = 10_000
"""Records that may wait for one exporter; a job with default settings makes a few per second."""
ATTEMPTS = 5
"""Times that one record is offered before it is dropped, while others may still arrive."""
FLUSHED_TOGETHER = 256
"""Records that an exporter is given before `write_out` although more are waiting; else it is when none is."""
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 30.0
ALL = ExportCustomizationMode.EXPORT_ALL_SPANS


class Filter:
    """Which spans go to the exporters; `OneLoggerError` where the mode, ours or one-logger's, is none or takes no names."""

    def __init__(self, mode: ExportCustomizationMode = ALL, names: Iterable[SpanName] | None = None) -> None:
        try:
            self.mode = ExportCustomizationMode[getattr(mode, "name", str(mode))]
        except KeyError:
            modes = ", ".join(each.name for each in ExportCustomizationMode)
            raise OneLoggerError(f"export_customization_mode must be one of {modes}, not {mode!r}") from None
        self.names = frozenset([name_of(name) for name in names or ()])
        usable = self.mode is not ALL or not self.names
        assert_that(usable, "EXPORT_ALL_SPANS takes no span_name_filter beside it")

    @classmethod
    def default(cls) -> Filter:
        """All but the short and frequent ones."""
        return cls(ExportCustomizationMode.BLACKLIST_SPANS, DEFAULT_SPANS_EXPORT_BLACKLIST)

    def wants(self, name: SpanName) -> bool:
        """Tell whether a span of this name is exported."""
        listed = self.mode is ExportCustomizationMode.WHITELIST_SPANS
        return self.mode is ALL or (name_of(name) in self.names) is listed


class Delivery:
    """Takes records to all exporters that are begun; whoever records calls it, from any thread."""

    def __init__(
        self,
        exporters: Iterable[Exporter],
        filter: Filter | None = None,
        *,
        bound: int = QUEUED_RECORDS,
        first_pause_seconds: float = FIRST_PAUSE_SECONDS,
    ) -> None:
        self._filter = filter or Filter()
        self._left_out: frozenset[str] = frozenset()
        self._process = os.getpid()
        names: dict[str, int] = {}
        self.outlets: list[Outlet] = []
        for each in exporters:
            name = clean_text(type(each).__qualname__.replace("<locals>.", ""))[:100]
            names[name] = number = names.get(name, 0) + 1
            label = name if number == 1 else f"{name}-{number}"
            self.outlets.append(Outlet(each, label, bound, first_pause_seconds))

    def begin(self) -> None:
        """Start the exporters' threads, which initialise them."""
        for outlet in self.outlets:
            outlet.worker.put(("initialize",))
            _OPEN.add(self)

    def leave_out(self, events: Iterable[str]) -> None:
        """Export no events of these names from now on."""
        self._left_out = frozenset(events)

    def wants(self, name: SpanName) -> bool:
        """Tell whether there is anybody to take a span of this name."""
        return bool(self.outlets) and self._filter.wants(name) and os.getpid() == self._process

    def start(self, span: Span) -> None:
        """Take the start of a span."""
        if self.wants(span.name):
            self._put("export_start", span.as_started(self._exported_parent(span)))

    def event(self, span: Span, event: Event) -> None:
        """Take an event of a span."""
        if event.name_str not in self._left_out:
            self._tell("export_event", span, event)

    def error(self, span: Span, event: ErrorEvent) -> None:
        """Take an error of the application."""
        self._tell("export_error", span, event)

    def stop(self, span: Span) -> None:
        """Take the stop of a span that has stopped."""
        self._tell("export_stop", span)

    def _tell(self, method: str, span: Span, *event: Event) -> None:
        if self.wants(span.name):
            self._put(method, *event, span.as_it_is(self._exported_parent(span)))

    def telemetry_data_error(self, message: str, attributes: Attributes | None = None) -> None:
        """Take an error of the telemetry itself; its type depends on whether an exporter has had anything."""
        if os.getpid() == self._process:
            self._put("export_telemetry_data_error", message, attributes, TracingTimestamp.now())

    def flush(self, timeout_seconds: float = 5.0) -> bool:
        """Wait until the exporters have taken what waits now; says whether they have, within the time."""
        deadline, here = monotonic() + timeout_seconds, os.getpid() == self._process
        for outlet in self.outlets if here else ():
            outlet.worker.put(("write_out",), bounded=False)
        arrived = [outlet.worker.drain(deadline - monotonic()) for outlet in self.outlets if here]
        return all(arrived)

    def close(self, timeout_seconds: float = EXIT_SECONDS) -> None:
        """Take nothing any more; what waits has so many seconds, then the exporters are closed."""
        _OPEN.discard(self)
        if os.getpid() == self._process:
            deadline = monotonic() + timeout_seconds
            for wait in [outlet.finish() for outlet in self.outlets]:
                wait(deadline - monotonic())

    def _exported_parent(self, span: Span) -> Span | None:
        """Give the nearest span around it that is exported too."""
        parent = span.parent_span
        while parent is not None and not self._filter.wants(parent.name):
            parent = parent.parent_span
        return parent

    def _put(self, *record: Any) -> None:
        for outlet in self.outlets:
            outlet.put(record)


_OPEN: set[Delivery] = set()
"""Those whose exporters run, also where the job has let go of them: what waits goes out at the end."""


def flush_all(timeout_seconds: float = 5.0) -> bool:
    """Wait until every exporter of this process has taken what waits now."""
    deadline = monotonic() + timeout_seconds
    arrived = [delivery.flush(deadline - monotonic()) for delivery in list(_OPEN)]
    return all(arrived)


def close_all(timeout_seconds: float = EXIT_SECONDS) -> None:
    """Close every delivery of this process; they share the time. Called when the recording has ended."""
    deadline = monotonic() + timeout_seconds
    for delivery in list(_OPEN):
        delivery.close(deadline - monotonic())


def _counter(what: str, **labels: str) -> Callable[[float], None]:
    try:
        return metric("counter", f"training.span.exporter.{what}", labels=labels)
    except DefinitionError as error:  # too many series: the records go out all the same
        tell_once("span exporter counts", f"an exporter of spans is not counted: {error}")
        return lambda _value: None


class Outlet:
    """One exporter, counted under a name, and its worker; the pause doubles with each failure in a row."""

    def __init__(self, exporter: Exporter, name: str, bound: int, first_pause_seconds: float) -> None:
        self.exporter = exporter
        self._name = name
        self._first_pause_seconds = first_pause_seconds
        self.worker = Worker(self._take, name=f"spans-{name}", bound=bound)
        self._hurry = threading.Event()  # the process ends: no pauses
        self._initialized = self._arrived = self._abandoned = False
        self._accepted, self._missed = Counter(), Counter()
        self._settled = self._told = self._failures = self._unwritten = 0
        self._delivered = _counter("records", exporter=name)
        self._errors = _counter("errors", exporter=name)
        reasons = ("queue_full", "failed", "exit")
        self._dropped = {reason: _counter("dropped", exporter=name, reason=reason) for reason in reasons}

    def put(self, record: tuple[Any, ...]) -> None:
        """Hand over one record, a method and its arguments; never raises, never waits."""
        if self._hurry.is_set():
            self._dropped["exit"](1)
        elif self.worker.put(record):
            self._accepted.bump()
        else:
            self._miss("queue_full")

    def _miss(self, reason: str) -> None:
        self._missed.bump()
        self._dropped[reason](1)

    def finish(self) -> Callable[[float], None]:
        """Ask the thread to end after what waits now; gives what waits for that and counts what was not taken by then."""
        if not self._hurry.is_set():
            self._hurry.set()
            self.worker.put(("close",), bounded=False)
        ended = self.worker.finish()

        def wait(timeout_seconds: float) -> None:
            ended(timeout_seconds, "exit")
            self._abandoned = True
            left = self._accepted.read() - self._settled
            if left > 0:
                self._settled += left
                self._dropped["exit"](left)

        return wait

    def _take(self, record: tuple[Any, ...]) -> None:
        method, *arguments = record
        while not self._initialized:
            ends = self._hurry.is_set()
            self._initialized = self._attempt("initialize")
            if ends:
                break
            if not self._initialized:
                self._hurry.wait(self._pause())
        if method not in {"initialize", "write_out", "close"}:
            self._send(method, arguments)
        if method in {"write_out", "close"} or self.worker.idle or self._unwritten >= FLUSHED_TOGETHER:
            self._write_out()
        if method == "close":
            self._attempt("close")

    def _send(self, method: str, arguments: list[Any]) -> None:
        if method == "export_telemetry_data_error":
            kinds = TelemetryDataError.ErrorType
            kind = kinds.INCOMPLETE_TELEMETRY_DATA if self._arrived else kinds.NO_TELEMETRY_DATA
            message, attributes, at = arguments
            arguments = [TelemetryDataError(at, kind, message, attributes)]
        taken = self._initialized and self._persist(method, *arguments)
        if self._abandoned:
            return  # it was counted as dropped when nobody could wait any longer
        self._settled += 1
        if not taken:
            self._miss("failed")
            return
        self._arrived = True
        self._unwritten += 1
        self._delivered(1)
        lost = self._missed.read() - self._told
        if lost:  # have a consumer know that what it reads is incomplete
            self._told += lost
            kind = TelemetryDataError.ErrorType.INCOMPLETE_TELEMETRY_DATA
            error = TelemetryDataError.create(kind, f"{lost} records before this one were dropped")
            self._attempt("export_telemetry_data_error", error)

    def _write_out(self) -> None:
        """Have an exporter that holds records back write them; it keeps those that it cannot."""
        if self._unwritten and hasattr(self.exporter, "write_out"):
            self._unwritten = 0
            self._persist("write_out")

    def _persist(self, method: str, *arguments: Any) -> bool:
        """Try several times, with pauses; once only where the process is ending."""
        for attempt in range(ATTEMPTS):
            if attempt:
                self._hurry.wait(self._pause())
            if self._attempt(method, *arguments):
                return True
            if self._hurry.is_set():
                break
        return False

    def _pause(self) -> float:
        return min(self._first_pause_seconds * 2.0 ** min(self._failures - 1, 20), LONGEST_PAUSE_SECONDS)

    def _attempt(self, method: str, *arguments: Any) -> bool:
        try:
            getattr(self.exporter, method)(*arguments)
        except BaseException as error:  # noqa: BLE001  # the user's code: SystemExit would end the thread, too
            self._failures += 1
            self._errors(1)
            message = f"the exporter {self._name} failed in {method}: {shown(error)}"
            tell_once(f"span exporter {self._name} {method}", message)
            return False
        self._failures = 0
        return True
