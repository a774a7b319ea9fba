"""Delivery of spans and events to the exporters, each with a separate thread and queue.

A failed export is repeated up to four times, after increasing pauses. Records that an exporter does not export, for example because
the exporter hangs, are counted as dropped, and the other exporters continue. A forked child delivers no records, because the queues
and connections belong to the parent.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from math import inf
from time import monotonic
from typing import Any

from exporter.errors import DefinitionError, OneLoggerError
from exporter.one_logger.exporters import Exporter
from exporter.one_logger.names import DEFAULT_SPANS_EXPORT_BLACKLIST, ExportCustomizationMode
from exporter.recording.conversion import safe_repr, to_name
from exporter.recording.identity import clean_text
from exporter.recording.notices import log_once
from exporter.recording.recorder import RECORDER
from exporter.recording.stat import create_series
from exporter.recording.value_class import Value, value_class
from exporter.recording.worker import Counter, Worker
from exporter.training.attributes import Attributes, SpanName, TracingTimestamp, assert_that
from exporter.training.recorder import TRAINING
from exporter.training.spans import ErrorEvent, Event, Span, TelemetryDataError

EXIT_SECONDS = 2.0
"""Shared timeout of all exporters at the exit of the process."""
QUEUED_RECORDS = 10_000
"""Capacity of an exporter's queue. A job with default settings produces a few records per second."""
ATTEMPTS = 5
"""Maximum number of attempts to export a record. While the queue is closing, a failed attempt is not repeated."""
WRITE_OUT_RECORDS = 256
"""Exported records after which `write_out` is called even if the queue is not empty."""
FIRST_PAUSE_SECONDS = 0.1
"""Pause after the first failure. Each further failure doubles the pause, up to `MAX_PAUSE_SECONDS`."""
MAX_PAUSE_SECONDS = 30.0
"""Maximum pause between two attempts."""
REWRITE_SECONDS = 30.0
"""Time after a failed `write_out` until the next, if no record arrives before."""
ALL = ExportCustomizationMode.EXPORT_ALL_SPANS
DROP_REASONS = ("queue_full", "failed", "rejected", "exit")
"""Values of the label `reason`: the queue was full, all attempts failed, the exporter discarded the record, the process ended."""


class SpanFilter:
    """Selection of the exported spans by name.

    Raises:
        OneLoggerError: The mode is unknown, or EXPORT_ALL_SPANS is combined with names.
    """

    def __init__(self, mode: ExportCustomizationMode = ALL, names: Iterable[SpanName] | None = None) -> None:
        try:  # by name, to accept members of one-logger's enumeration
            self.mode = ExportCustomizationMode[getattr(mode, "name", str(mode))]
        except KeyError:
            modes = ", ".join(member.name for member in ExportCustomizationMode)
            raise OneLoggerError(f"export_customization_mode must be one of {modes}, not {mode!r}") from None
        self.names = frozenset([to_name(name) for name in names or ()])
        is_valid = self.mode is not ALL or not self.names
        assert_that(is_valid, "EXPORT_ALL_SPANS must be used without span_name_filter")

    @classmethod
    def default(cls) -> SpanFilter:
        """Return a filter that excludes short and frequent spans."""
        return cls(ExportCustomizationMode.BLACKLIST_SPANS, DEFAULT_SPANS_EXPORT_BLACKLIST)

    def accepts(self, name: SpanName) -> bool:
        """Return True if spans of this name are exported."""
        if self.mode is ALL:
            return True
        is_listed = to_name(name) in self.names
        return is_listed if self.mode is ExportCustomizationMode.WHITELIST_SPANS else not is_listed


class Delivery:
    """Distribution of records to the exporters of a recorder. May be called on any thread.

    Args:
        exporters: The exporters. Each exporter has a queue and a thread.
        filter: Selection of the exported spans; None for all spans.
        bound: Capacity of each queue, in calls. The export of a record is a call.
        first_pause_seconds: Pause after the first failure of an export.
    """

    def __init__(
        self,
        exporters: Iterable[Exporter],
        filter: SpanFilter | None = None,
        *,
        bound: int = QUEUED_RECORDS,
        first_pause_seconds: float = FIRST_PAUSE_SECONDS,
    ) -> None:
        self._filter = filter or SpanFilter()
        self._excluded_events: frozenset[str] = frozenset()
        self._pid = os.getpid()
        exporter_counts: dict[str, int] = {}  # by name
        self.queues: list[ExportQueue] = []
        for exporter in exporters:
            name = clean_text(type(exporter).__qualname__.replace("<locals>.", ""))[:100]
            exporter_counts[name] = exporter_counts.get(name, 0) + 1
            label = name if exporter_counts[name] == 1 else f"{name}-{exporter_counts[name]}"
            self.queues.append(ExportQueue(exporter, label, bound, first_pause_seconds))

    def start_exporters(self) -> None:
        """Start a thread for each exporter, which initializes the exporter."""
        if self.queues:
            _OPEN_DELIVERIES.add(self)
        for queue in self.queues:
            queue.worker.put(ExportCall("initialize"))

    def set_application_name(self, name: str) -> None:
        """Set the application name of the exporters with the attribute `application_name`."""
        for queue in self.queues:
            if hasattr(queue.exporter, "application_name"):
                queue.exporter.application_name = name

    def exclude_events(self, names: Iterable[str]) -> None:
        """Stop exporting events of these names."""
        self._excluded_events = frozenset(names)

    def accepts(self, name: SpanName) -> bool:
        """Return True if spans of this name are delivered to an exporter of this process."""
        return bool(self.queues) and self._filter.accepts(name) and os.getpid() == self._pid

    def start(self, span: Span) -> None:
        """Export the start of a span."""
        if self.accepts(span.name):
            self._queue_call("export_start", span.copy_at_start(self._exported_parent(span)))

    def event(self, span: Span, event: Event) -> None:
        """Export an event of a span."""
        if event.name_str not in self._excluded_events and self.accepts(span.name):
            self._queue_call("export_event", event, span.snapshot_copy(self._exported_parent(span)))

    def error(self, span: Span, event: ErrorEvent) -> None:
        """Export an error of the application."""
        if self.accepts(span.name):
            self._queue_call("export_error", event, span.snapshot_copy(self._exported_parent(span)))

    def stop(self, span: Span) -> None:
        """Export the stop of a span that has stopped."""
        if self.accepts(span.name):
            self._queue_call("export_stop", span.snapshot_copy(self._exported_parent(span)))

    def telemetry_data_error(self, message: str, attributes: Attributes | None = None) -> None:
        """Export a notice that records are missing."""
        if os.getpid() == self._pid:
            error_type = TelemetryDataError.ErrorType.INCOMPLETE_TELEMETRY_DATA
            error = TelemetryDataError(TracingTimestamp.now(), error_type, message, attributes)
            self._queue_call("export_telemetry_data_error", error)

    def flush(self, timeout_seconds: float = 5.0) -> bool:
        """Wait until the exporters have processed all queued records. Return False after the timeout."""
        if os.getpid() != self._pid:
            return True
        deadline = monotonic() + timeout_seconds
        for queue in self.queues:
            queue.worker.put(ExportCall("write_out"), is_bounded=False)
        results = [queue.worker.drain(deadline - monotonic()) for queue in self.queues]
        return all(results)

    def close_exporters(self) -> None:
        """Request that each exporter closes after the queued records. A later record initializes the exporter again."""
        if os.getpid() == self._pid:
            for queue in self.queues:
                queue.worker.put(ExportCall("close"), is_bounded=False)

    def close(self, timeout_seconds: float = EXIT_SECONDS) -> None:
        """Close the exporters once the queued records are processed, or after the timeout. Later records are dropped."""
        _OPEN_DELIVERIES.discard(self)
        if os.getpid() == self._pid:
            deadline = monotonic() + timeout_seconds
            for wait in [queue.finish() for queue in self.queues]:
                wait(deadline - monotonic())

    def _exported_parent(self, span: Span) -> Span | None:
        """Return the nearest enclosing span that is exported."""
        parent = span.parent_span
        while parent is not None and not self._filter.accepts(parent.name):
            parent = parent.parent_span
        return parent

    def _queue_call(self, method: str, *arguments: Any) -> None:
        """Queue the call of a method for each exporter."""
        for queue in self.queues:
            queue.put(ExportCall(method, arguments))


_OPEN_DELIVERIES: set[Delivery] = set()
"""Deliveries whose exporters are not closed, even if the job has discarded the recorder."""


def flush_all(timeout_seconds: float = 5.0) -> bool:
    """Wait until every exporter of this process has processed all queued records. Return False after the timeout."""
    deadline = monotonic() + timeout_seconds
    results = [delivery.flush(deadline - monotonic()) for delivery in list(_OPEN_DELIVERIES)]
    return all(results)


def close_all(timeout_seconds: float = EXIT_SECONDS) -> None:
    """Close the deliveries of this process within a shared timeout. Called when the process exits."""
    deadline = monotonic() + timeout_seconds
    for delivery in list(_OPEN_DELIVERIES):
        delivery.close(deadline - monotonic())


def _counter(name: str, **labels: str) -> Callable[[float], None]:
    """Return the function that increases a counter of an exporter. Above the limit of series, the function counts nothing."""
    try:
        return create_series("counter", f"training.span.exporter.{name}", labels=labels)
    except DefinitionError as error:  # too many series; the exports are not counted
        log_once("span exporter counts", f"the exports of the span exporter are not counted: {error}")
        return lambda _value: None


@value_class
class ExportCall(Value):
    """Call of an exporter's method."""

    method: str
    arguments: tuple[Any, ...] = ()


class ExportQueue:
    """Queue and thread of an exporter, with counters.

    Args:
        exporter: The exporter.
        name: Label of the counters.
        bound: Capacity in calls.
        first_pause_seconds: Pause after the first failure; doubled after each further failure.
    """

    def __init__(self, exporter: Exporter, name: str, bound: int, first_pause_seconds: float) -> None:
        self.exporter = exporter
        self._name = name
        self._first_pause_seconds = first_pause_seconds
        self.worker = Worker(self._process, name=f"spans-{name}", bound=bound)
        self._closing = threading.Event()  # set to end all pauses
        self._is_initialized = False  # True after `initialize`, until `close`
        self._is_closed = False  # True after `close`, until the next record
        self._has_delivered = False  # True after the first exported record
        # True after the timeout at the exit, when all records are counted as exported or dropped.
        self._is_abandoned = False
        self._accepted_records = Counter()  # records that were put into the queue
        self._dropped_records = Counter()  # records that did not fit into the queue, or whose attempts failed
        self._processed_records = 0  # accepted records that were exported or dropped
        self._reported_drops = 0  # part of the dropped records that the exporter was notified of
        self._unwritten_records = 0  # records exported since the latest `write_out`
        self._rejected_records = 0  # `dropped_records` of the exporter that are already counted
        self._failures = 0  # failed calls since the latest successful call
        self._rewrite_at = inf  # monotonic time of the next `write_out` after a failure
        self._count_delivered = _counter("records", exporter=name)
        self._count_error = _counter("errors", exporter=name)
        self._drop_counters = {
            reason: _counter("dropped", exporter=name, reason=reason) for reason in DROP_REASONS
        }

    def put(self, call: ExportCall) -> None:
        """Queue a call without waiting. The call is dropped if the queue is full or closing."""
        if self._closing.is_set():
            self._drop_counters["exit"](1)
        elif self.worker.put(call):
            self._accepted_records.bump()
        else:
            self._count_drop("queue_full")

    def repeat_write_out(self) -> None:
        """Queue a `write_out` if the latest call failed and the next attempt is due."""
        if monotonic() >= self._rewrite_at:
            self._rewrite_at = monotonic() + REWRITE_SECONDS
            self.worker.put(ExportCall("write_out"))

    def _count_drop(self, reason: str) -> None:
        """Count a dropped record. The next delivered record is followed by a notice about the dropped records."""
        self._dropped_records.bump()
        self._drop_counters[reason](1)

    def finish(self) -> Callable[[float], None]:
        """Close the queue, and request the end of the thread after the queued calls.

        Returns a function that waits for the end, and counts the records that are not processed within its timeout as dropped.
        """
        if not self._closing.is_set():
            self._closing.set()
            self.worker.put(ExportCall("close"), is_bounded=False)
            self.worker.put(ExportCall("shut_down"), is_bounded=False)
        wait_for_worker = self.worker.finish()

        def wait(timeout_seconds: float) -> None:
            wait_for_worker(timeout_seconds, "exit")
            self._is_abandoned = True
            unprocessed_count = self._accepted_records.read() - self._processed_records
            if unprocessed_count > 0:
                self._processed_records += unprocessed_count
                self._drop_counters["exit"](unprocessed_count)

        return wait

    def _process(self, call: ExportCall) -> None:
        """Make a queued call, on the thread of this queue.

        If the exporter needs to be initialized, first repeat the initialization until it succeeds; while the queue is closing, make only one
        attempt. After the last queued record, and after every `WRITE_OUT_RECORDS` records, also call `write_out`.
        """
        if call.method == "shut_down":
            if hasattr(type(self.exporter), "shut_down"):
                self._attempt(call)
            return
        if self._is_closed and call.method in {"write_out", "close"}:
            return
        self._is_closed = False
        while not self._is_initialized:
            is_closing = self._closing.is_set()
            self._is_initialized = self._attempt(ExportCall("initialize"))
            if is_closing:
                break
            if not self._is_initialized:
                self._closing.wait(self._pause_seconds())
        if call.method not in {"initialize", "write_out", "close"}:
            self._send(call)
        if (
            call.method in {"write_out", "close"}
            or self.worker.is_queue_empty
            or self._unwritten_records >= WRITE_OUT_RECORDS
        ):
            self._write_out()
        if call.method == "close":
            self._attempt(call)
            self._is_initialized, self._is_closed = False, True
        self._count_rejected()

    def _count_rejected(self) -> None:
        """Count the records that a buffering exporter has discarded since the last call."""
        dropped_records = getattr(self.exporter, "dropped_records", 0)  # absent from exporters of one-logger
        if isinstance(dropped_records, int) and dropped_records > self._rejected_records:
            self._drop_counters["rejected"](dropped_records - self._rejected_records)
            self._rejected_records = dropped_records

    def _send(self, call: ExportCall) -> None:
        """Export a record with up to `ATTEMPTS` attempts, and count the result.

        A notice about missing records, before any record was exported, becomes a notice that all records are missing. After a successful
        export, the exporter is notified of the records that were dropped before.
        """
        if call.method == "export_telemetry_data_error" and not self._has_delivered:
            (error,) = call.arguments
            error_type = TelemetryDataError.ErrorType.NO_TELEMETRY_DATA
            error = TelemetryDataError(error.timestamp, error_type, error.error_message, error.attributes)
            call = ExportCall(call.method, (error,))
        is_delivered = self._is_initialized and self._retry(call)
        if self._is_abandoned:
            return  # already counted as dropped
        self._processed_records += 1
        if not is_delivered:
            self._count_drop("failed")
            return
        self._has_delivered = True
        self._unwritten_records += 1
        self._count_delivered(1)
        dropped_count = self._dropped_records.read() - self._reported_drops
        if dropped_count:
            self._reported_drops += dropped_count
            error_type = TelemetryDataError.ErrorType.INCOMPLETE_TELEMETRY_DATA
            error = TelemetryDataError.create(error_type, f"{dropped_count} earlier records were dropped")
            self._attempt(ExportCall("export_telemetry_data_error", (error,)))

    def _write_out(self) -> None:
        """Call `write_out` if records were exported since the latest call, or if the latest call failed."""
        has_failed = self._rewrite_at < inf
        if (self._unwritten_records or has_failed) and hasattr(self.exporter, "write_out"):
            self._unwritten_records = 0
            is_written = self._retry(ExportCall("write_out"))
            self._rewrite_at = inf if is_written else monotonic() + REWRITE_SECONDS

    def _retry(self, call: ExportCall) -> bool:
        """Call a method up to `ATTEMPTS` times, with pauses, until it succeeds. Stop repeating once the queue is closing."""
        for attempt in range(ATTEMPTS):
            if attempt:
                self._closing.wait(self._pause_seconds())
            if self._attempt(call):
                return True
            if self._closing.is_set():
                break
        return False

    def _pause_seconds(self) -> float:
        """Return the pause before the next attempt, after `_failures` failed calls."""
        doublings = min(self._failures - 1, 20)  # limited, because a large power of 2.0 raises OverflowError
        return min(self._first_pause_seconds * 2.0**doublings, MAX_PAUSE_SECONDS)

    def _attempt(self, call: ExportCall) -> bool:
        """Call a method of the exporter. Return False if the method raised, which is counted, and logged once per method."""
        try:
            getattr(self.exporter, call.method)(*call.arguments)
        except BaseException as error:  # noqa: BLE001  # SystemExit must not end the thread
            self._failures += 1
            self._count_error(1)
            message = f"the exporter {self._name} failed in {call.method}: {safe_repr(error)}"
            log_once(f"span exporter {self._name} {call.method}", message)
            return False
        self._failures = 0
        return True


class FailedWrites:
    """Periodic task that repeats the failed `write_out` calls of all exporters."""

    def tick(self) -> None:
        """Queue the calls that are due."""
        for delivery in list(_OPEN_DELIVERIES):
            for queue in delivery.queues:
                queue.repeat_write_out()

    def finish(self) -> None:
        """Do nothing: at exit the exporters are closed, which writes all records."""

    def after_fork(self) -> None:
        """Discard the deliveries, whose threads belong to the parent."""
        _OPEN_DELIVERIES.clear()


RECORDER.attach(FailedWrites())
# The exporters are flushed and closed with the recording of the process.
TRAINING.add_exporter_lifecycle(flush_all, close_all)
