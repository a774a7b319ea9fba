"""Delivery: the way of spans and events from the recording to the exporters, each with its own thread and queue.

Used in the training process. The recording thread (or whoever records) puts copies into bounded queues and goes on; what
becomes of them there is in `outlets`. At exit what waits has a bounded time to go out. A forked child delivers nothing:
what waits is its parent's, and so are the exporters' connections.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from time import monotonic

from exporter.errors import OneLoggerError
from exporter.recording.identity import clean_text
from exporter.training.events import ErrorEvent, Event, TelemetryDataError
from exporter.training.names import (
    DEFAULT_SPANS_EXPORT_BLACKLIST,
    ExportCustomizationMode,
    SpanName,
    name_of,
)
from exporter.training.outlets import FIRST_PAUSE_SECONDS, QUEUED_RECORDS, Outlet
from exporter.training.reports import report
from exporter.training.spans import Span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from exporter.training.exporters.base import Exporter

EXIT_SECONDS = 2.0
"""The longest that an exiting process waits for the exporters."""
METHODS = (
    "initialize",
    "export_start",
    "export_stop",
    "export_event",
    "export_error",
    "export_telemetry_data_error",
    "close",
)
"""What an exporter has."""


class Filter:
    """Which spans go to the exporters; their events go with them.

    Args:
        mode: Whether the names are all that go, or all that do not; one-logger's own member counts too.
        names: Of spans, compared as texts.

    Raises:
        OneLoggerError: The mode is none.
    """

    def __init__(self, mode: ExportCustomizationMode, names: Iterable[SpanName] | None = None) -> None:
        try:
            self.mode = ExportCustomizationMode[getattr(mode, "name", str(mode))]
        except KeyError:
            modes = ", ".join(each.name for each in ExportCustomizationMode)
            raise OneLoggerError(f"export_customization_mode must be one of {modes}, not {mode!r}") from None
        self.names = frozenset([name_of(name) for name in names or ()])
        if self.names and self.mode is ExportCustomizationMode.EXPORT_ALL_SPANS:
            report(
                "with_export_customization", "filter_of_all", "no span_name_filter beside EXPORT_ALL_SPANS"
            )

    @classmethod
    def default(cls) -> Filter:
        """All but the short and frequent ones."""
        return cls(ExportCustomizationMode.BLACKLIST_SPANS, DEFAULT_SPANS_EXPORT_BLACKLIST)

    @classmethod
    def everything(cls) -> Filter:
        """All."""
        return cls(ExportCustomizationMode.EXPORT_ALL_SPANS)

    def wants(self, name: SpanName) -> bool:
        """Whether a span of this name is exported."""
        if self.mode is ExportCustomizationMode.EXPORT_ALL_SPANS:
            return True
        return (name_of(name) in self.names) is (self.mode is ExportCustomizationMode.WHITELIST_SPANS)


class Sink:
    """Takes records to all exporters; whoever records calls it, from any thread.

    Args:
        exporters: To whom.
        filter: Which spans; None for all.
        bound: Records that may wait for each.
        first_pause_seconds: See `Outlet`.
    """

    def __init__(
        self,
        exporters: Iterable[Exporter],
        filter: Filter | None = None,
        *,
        bound: int = QUEUED_RECORDS,
        first_pause_seconds: float = FIRST_PAUSE_SECONDS,
    ) -> None:
        self._filter = filter or Filter.everything()
        self._left_out: frozenset[str] = frozenset()
        self._process = os.getpid()
        names: dict[str, int] = {}
        outlets = []
        for each in exporters:
            name = clean_text(type(each).__qualname__.replace("<locals>.", ""))[:100]
            names[name] = number = names.get(name, 0) + 1
            shown = name if number == 1 else f"{name}-{number}"
            outlets.append(Outlet(each, shown, bound=bound, first_pause_seconds=first_pause_seconds))
        self._outlets = tuple(outlets)

    @staticmethod
    def missing_methods(exporter: object) -> list[str]:
        """Tell what an object lacks to be an exporter."""
        return [name for name in METHODS if not callable(getattr(exporter, name, None))]

    def begin(self) -> None:
        """Start the exporters' threads."""
        for outlet in self._outlets:
            outlet.begin()
        if self._outlets:
            _OPEN.add(self)

    def leave_out(self, events: Iterable[str]) -> None:
        """Export no events of these names from now on."""
        self._left_out = frozenset(events)

    def wants(self, name: SpanName) -> bool:
        """Whether there is anybody to take a span of this name."""
        return bool(self._outlets) and self._filter.wants(name) and os.getpid() == self._process

    def start(self, span: Span) -> None:
        """Take the start of a span."""
        if self.wants(span.name):
            self._put("export_start", span.as_started(self._told_parent(span)))

    def event(self, span: Span, event: Event) -> None:
        """Take an event of a span."""
        if self.wants(span.name) and event.name_str not in self._left_out:
            self._put("export_event", event, span.as_it_is(self._told_parent(span)))

    def error(self, span: Span, event: ErrorEvent) -> None:
        """Take an error of the application."""
        if self.wants(span.name):
            self._put("export_error", event, span.as_it_is(self._told_parent(span)))

    def stop(self, span: Span) -> None:
        """Take the stop of a span that has stopped."""
        if self.wants(span.name):
            self._put("export_stop", span.as_it_is(self._told_parent(span)))

    def telemetry_data_error(self, error: TelemetryDataError) -> None:
        """Take an error of the telemetry itself."""
        if os.getpid() == self._process:
            self._put("export_telemetry_data_error", error)

    def flush(self, timeout_seconds: float = 5.0) -> bool:
        """Wait until the exporters have taken what waits now; says whether they have, within the time."""
        deadline = monotonic() + timeout_seconds
        if os.getpid() != self._process:
            return True
        arrived = [outlet.drain(deadline - monotonic()) for outlet in self._outlets]
        return all(arrived)

    def close(self, timeout_seconds: float = EXIT_SECONDS) -> None:
        """Take nothing any more; what waits has so many seconds, then the exporters are closed."""
        _OPEN.discard(self)
        if os.getpid() != self._process:
            return
        waits = [outlet.finish() for outlet in self._outlets]
        deadline = monotonic() + timeout_seconds
        for wait in waits:
            wait(deadline - monotonic())

    def _told_parent(self, span: Span) -> Span | None:
        """Give the nearest span around it that is exported too."""
        parent = span.parent_span
        while parent is not None and not self._filter.wants(parent.name):
            parent = parent.parent_span
        return parent

    def _put(self, method: str, *arguments: Any) -> None:
        for outlet in self._outlets:
            outlet.put(method, *arguments)


_OPEN: set[Sink] = set()
"""Those whose exporters run, also where the job has let go of them: what waits goes out at the end."""


def flush_all(timeout_seconds: float = 5.0) -> bool:
    """Wait until every exporter of this process has taken what waits now."""
    deadline = monotonic() + timeout_seconds
    arrived = [sink.flush(max(deadline - monotonic(), 0.0)) for sink in list(_OPEN)]
    return all(arrived)


def close_all(timeout_seconds: float = EXIT_SECONDS) -> None:
    """Close every sink of this process; they share the time. Called when the recording has ended."""
    deadline = monotonic() + timeout_seconds
    for sink in list(_OPEN):
        sink.close(max(deadline - monotonic(), 0.0))
