"""Logging both ways: log records that become events, and events that become log records.

Used in the training process. `EventsFromLogs` is a `logging.Handler` and runs where the job logs; `LogRecords` is
a handler of events and runs on its worker's thread. Both may be in use at once: what came from the one side is
not sent back to it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from exporter.recording.event_values import LEVELS, Datum, Event, find_severity
from exporter.recording.events import log
from exporter.recording.handlers.console import summary_of

FROM_LOGS = "log.logger"
"""The datum that an event has when it was made of a log record: the logger's name."""
_MARK = "exporter_event"
_THREADS_OF_HANDLERS = ("exporter-events-", "exporter-notice")


class EventsFromLogs(logging.Handler):
    """Logs an event for each log record that reaches it: `logging.getLogger().addHandler(EventsFromLogs())`.

    The event's type is the same for all, since a logger's name in a label would be one series for each; the
    name, the place and what was raised are data. What handlers of events log is passed over, and so are records that
    were made of events, also where another thread hands them on.
    """

    def __init__(
        self, level: int = logging.WARNING, *, type: str = "log", log: Callable[..., None] = log
    ) -> None:
        super().__init__(level)
        self._type = type
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Log the event; never raises but where `logging.raiseExceptions` says so."""
        # The thread that has logged: another one may hand its records on, as a QueueListener does.
        thread = record.threadName or threading.current_thread().name
        if hasattr(record, _MARK) or thread.startswith(_THREADS_OF_HANDLERS):
            return
        try:
            data: dict[str, Datum] = {
                FROM_LOGS: record.name,
                "log.file": record.pathname,
                "log.line": record.lineno,
                "log.function": str(record.funcName),
            }
            if record.exc_info and record.exc_info[0] is not None:
                data["log.exception"] = record.exc_info[0].__name__
                data["log.traceback"] = logging.Formatter().formatException(record.exc_info)
            severity = find_severity(record.levelno)
            self._log(self._type, record.getMessage(), severity=severity, timestamp=record.created, **data)
        except Exception:  # noqa: BLE001  # a message that cannot be formatted; logging's own rule for handlers
            self.handleError(record)


class LogRecords:
    """Logs a record for each event."""

    def __init__(self, logger: logging.Logger | str = "exporter.events") -> None:
        self._logger = logging.getLogger(logger) if isinstance(logger, str) else logger

    def handle(self, event: Event) -> None:
        """Log one record, unless the event was made of one; the record has the event as `exporter_event`."""
        if FROM_LOGS in event.data:
            return
        level = LEVELS[event.severity]
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", summary_of(event), extra={_MARK: event})
