"""Logging of the sidecar: a line per record on standard error, as logfmt or JSON, with the values of `extra` as keys.

A thread that logs does not wait for the output: a queue listener of the standard library writes the lines. If the queue is full,
records are dropped and counted.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

LogLevel = Literal["debug", "info", "warn", "error"]
LogFormat = Literal["logfmt", "json"]

LEVELS: Mapping[LogLevel, int] = {
    "error": logging.ERROR,
    "warn": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
}
MAX_VALUE_CHARACTERS = 4000
"""Maximum length of the text of a value in a line. A longer text, for example of a hostile label, is truncated."""
MAX_KEY_CHARACTERS = 100
"""Maximum length of a key of `extra`."""
MAX_QUEUED_LINES = 1000
"""Maximum number of lines that wait for the thread that writes them."""

# Attributes of every LogRecord; `extra` adds further attributes.
_RECORD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_FIXED_KEYS = frozenset({"time", "level", "source", "msg", "stack"})
"""Keys that a line has without `extra`."""
_PACKAGE = f"{Path(__file__).resolve().parents[1]}{os.sep}"
"""Start of the paths of this package, which is omitted in `source`."""


class Formatter(logging.Formatter):
    """Formatter with a line per record.

    Special characters are escaped and long values are truncated. A value whose formatting raises is replaced by the name of the
    exception.
    """

    def __init__(self, log_format: LogFormat) -> None:
        super().__init__()
        self._as_json = log_format == "json"

    def format(self, record: logging.LogRecord) -> str:
        """Render a record. Never raises."""
        pairs = dict(self._pairs(record))
        logfmt = (f"{key}={_logfmt_value(value)}" for key, value in pairs.items())
        return json.dumps(pairs) if self._as_json else " ".join(logfmt)

    def _pairs(self, record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
        """Yield the keys and values of a line. A key of `extra` that is one of `_FIXED_KEYS` receives the suffix `_`."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        yield "time", f"{moment}.{int(record.msecs):03d}Z"
        yield "level", next((name for name, number in LEVELS.items() if number <= record.levelno), "debug")
        is_own = record.pathname.startswith(_PACKAGE)
        path = record.pathname.removeprefix(_PACKAGE) if is_own else record.filename
        yield "source", f"{path}:{record.lineno}"
        yield "msg", _rendered_text(record.getMessage)
        for name, value in vars(record).items():
            if name not in _RECORD_ATTRIBUTES:
                key = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:MAX_KEY_CHARACTERS] or "_"
                yield (f"{key}_" if key in _FIXED_KEYS else key), _plain_value(value)
        if exception_info := record.exc_info:
            yield "stack", _rendered_text(lambda: self.formatException(exception_info))


def _rendered_text(render: Callable[[], str]) -> str:
    """Return the result of *render*, truncated if necessary, or the name of the exception that it raised."""
    try:
        text = render()
    except Exception as error:  # noqa: BLE001  (a __str__ of the job or wrong arguments of the message may raise any error)
        return f"!({type(error).__name__})"
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[: MAX_VALUE_CHARACTERS - 1] + "…"


def _plain_value(value: Any) -> Any:
    """Return None, a boolean or a finite number unchanged, and any other value as text."""
    if value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value)):
        return value
    return _rendered_text(lambda: str(value))


def _logfmt_value(value: Any) -> str:
    """Return a value in logfmt. Text is quoted if it is empty or contains spaces, `=`, quotes, backslashes or unprintable characters."""
    if not isinstance(value, str):
        return json.dumps(value)
    if value and value.isprintable() and not any(character in ' ="\\' for character in value):
        return value
    # logfmt's parsers undo JSON's escapes; printable characters outside ASCII are unchanged.
    escaped_characters = (
        character if character.isprintable() and character not in '"\\' else json.dumps(character)[1:-1]
        for character in value
    )
    return f'"{"".join(escaped_characters)}"'


class _Output(logging.Handler):
    """Handler on the thread of the listener that writes lines to a descriptor, and reports dropped records."""

    def __init__(self, descriptor: int, handler: BoundedQueueHandler) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._handler = handler
        self._reported_count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line of a record. If records were dropped since the last line, write their number on a further line."""
        self._write(record.getMessage())
        if self._handler.dropped_count > self._reported_count:
            dropped_count = self._handler.dropped_count
            attributes = {
                "name": __name__,
                "msg": "log lines were dropped",
                "dropped": dropped_count - self._reported_count,
            }
            self._write(
                self._handler.format(logging.makeLogRecord(attributes | {"levelno": logging.WARNING}))
            )
            self._reported_count = dropped_count

    def _write(self, line: str) -> None:
        """Write a line, and wait for room if the descriptor does not block. Other errors are ignored."""
        data = f"{line}\n".encode("utf-8", "backslashreplace")
        with suppress(OSError):
            while data:
                try:
                    data = data[os.write(self._descriptor, data) :]
                except BlockingIOError:  # noqa: PERF203  (another program made the shared terminal non-blocking)
                    time.sleep(0.05)


class BoundedQueueHandler(logging.handlers.QueueHandler):
    """Queue handler that formats records on the thread that logs. If the queue is full, a record is dropped and counted."""

    def __init__(self, lines: queue.Queue[Any]) -> None:
        super().__init__(lines)
        self.dropped_count = 0  # written under the handler's lock

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return a record that contains the formatted line, because arguments may change before the listener writes it."""
        return logging.makeLogRecord({"msg": self.format(record), "levelno": record.levelno})

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a record, or count the record as dropped."""
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped_count += 1


class Logs:
    """Logging of this process: the root logger, Python's warnings, and exceptions that end a thread. Ends with `finish`."""

    def __init__(
        self, *, level: LogLevel = "info", log_format: LogFormat = "logfmt", descriptor: int = 2
    ) -> None:
        lines: queue.Queue[Any] = queue.Queue(MAX_QUEUED_LINES)
        self._handler = BoundedQueueHandler(lines)
        self._listener = logging.handlers.QueueListener(lines, _Output(descriptor, self._handler))
        self._listener.start()
        self.configure(level=level, log_format=log_format)
        logging.getLogger().addHandler(self._handler)
        logging.captureWarnings(capture=True)
        logging.raiseExceptions = False  # a broken log call must not write a traceback between the lines
        threading.excepthook = _log_thread_exception

    def configure(self, *, level: LogLevel, log_format: LogFormat) -> None:
        """Set the level and the format of the next records."""
        logging.getLogger().setLevel(LEVELS[level])
        self._handler.setFormatter(Formatter(log_format))

    def finish(self, timeout_seconds: float = 1.0) -> None:
        """Stop logging and write the queued lines. If standard error is blocked, return after the timeout."""
        logging.getLogger().removeHandler(self._handler)
        logging.captureWarnings(capture=False)
        threading.excepthook = threading.__excepthook__
        # `QueueListener.stop` waits without a limit, and raises if the queue is full.
        stop_thread = threading.Thread(target=self._stop, name="exporter-log-stop", daemon=True)
        stop_thread.start()
        stop_thread.join(timeout_seconds)

    def _stop(self) -> None:
        """Stop the listener once its queue has room for the end marker."""
        while True:
            try:
                self._listener.stop()
            except queue.Full:  # noqa: PERF203  (the listener is still writing)
                time.sleep(0.01)
            else:
                return


def _log_thread_exception(hook: threading.ExceptHookArgs) -> None:
    """Log the exception that ended a thread, except SystemExit."""
    if hook.exc_value is not None and not issubclass(hook.exc_type, SystemExit):
        logging.getLogger(__name__).error(
            "a thread ended with an exception",
            extra={"thread_name": hook.thread.name if hook.thread else None},
            exc_info=(hook.exc_type, hook.exc_value, hook.exc_traceback),
        )
