"""Logs of the sidecar: one line per record on stderr, as logfmt or JSON; what varies is in `extra`.

Any thread may log and none waits: one daemon thread writes from a bounded queue, and counts what it drops.
"""

from __future__ import annotations

import json
import logging
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

Level = Literal["debug", "info", "warn", "error"]
Form = Literal["logfmt", "json"]

LEVELS: Mapping[Level, int] = {
    "error": logging.ERROR,
    "warn": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
}
LONGEST_VALUE = 4000
"""Characters of one value; the rest is cut off. A traceback fits, a hostile label does not fill a disk."""
QUEUED_LINES = 1000

# What every LogRecord has; all else came through `extra`.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_TAKEN = frozenset({"time", "level", "source", "msg", "stack"})
_PACKAGE = f"{Path(__file__).resolve().parents[1]}{os.sep}"


class Formatter(logging.Formatter):
    """A record as one line; hostile values are escaped, shortened, or named by what they raised."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self._as_json = form == "json"

    def format(self, record: logging.LogRecord) -> str:
        """Render a record; never raises."""
        pairs = dict(self._pairs(record))
        logfmt = (f"{key}={_logfmt(value)}" for key, value in pairs.items())
        return json.dumps(pairs) if self._as_json else " ".join(logfmt)

    def _pairs(self, record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        yield "time", f"{moment}.{int(record.msecs):03d}Z"
        yield "level", next((name for name, number in LEVELS.items() if number <= record.levelno), "debug")
        inside = record.pathname.startswith(_PACKAGE)
        path = record.pathname.removeprefix(_PACKAGE) if inside else record.filename
        yield "source", f"{path}:{record.lineno}"
        yield "msg", _text(record.getMessage)
        for name, value in vars(record).items():
            if name not in _OWN:
                key = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:100] or "_"
                yield (f"{key}_" if key in _TAKEN else key), _simple(value)
        if info := record.exc_info:
            yield "stack", _text(lambda: self.formatException(info))


def _text(make: Callable[[], str]) -> str:
    """Text of foreign making, shortened; the error's name where it cannot be made."""
    try:
        text = make()
    except Exception as error:  # noqa: BLE001  (a foreign __str__, arguments that do not fit the message)
        return f"!({type(error).__name__})"
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


def _simple(value: Any) -> Any:
    """A value as JSON has it, or as text."""
    if value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value)):
        return value
    return _text(lambda: str(value))


def _logfmt(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    if value and value.isprintable() and not any(c in ' ="\\' for c in value):
        return value
    # JSON's escapes are what logfmt's parsers undo; beyond ASCII only what a terminal shows as itself is left.
    escaped = (c if c.isprintable() and c not in '"\\' else json.dumps(c)[1:-1] for c in value)
    return f'"{"".join(escaped)}"'


class Logs(logging.Handler):
    """The process's logging until `finish`: every logger, Python's warnings, and exceptions that end threads."""

    def __init__(self, *, level: Level = "info", form: Form = "logfmt", descriptor: int = 2) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: queue.Queue[str | None] = queue.Queue(QUEUED_LINES)
        self._lost = 0  # by the queue; counted under the handler's lock
        self._thread = threading.Thread(target=self._write_lines, name="exporter-log", daemon=True)
        self._thread.start()
        self.configure(level=level, form=form)
        logging.getLogger().addHandler(self)
        logging.captureWarnings(capture=True)
        logging.raiseExceptions = False  # a broken log call is not worth a traceback amid the lines
        threading.excepthook = _log_thread_exception

    def configure(self, *, level: Level, form: Form) -> None:
        """Change what is shown, and how, from the next record on."""
        logging.getLogger().setLevel(LEVELS[level])
        self.setFormatter(Formatter(form))

    def finish(self, timeout_seconds: float = 1.0) -> None:
        """Take no more, and write what is queued, but wait no longer than this for a stderr that does not take it."""
        logging.getLogger().removeHandler(self)
        logging.captureWarnings(capture=False)
        threading.excepthook = threading.__excepthook__
        with suppress(queue.Full):
            self._lines.put(None, timeout=timeout_seconds)
        self._thread.join(timeout_seconds)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record's line, or count it as dropped."""
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._lost += 1

    def _write_lines(self) -> None:
        told = 0
        while (line := self._lines.get()) is not None:
            self._write(line)
            if self._lost > told:  # past the queue, which may be full again
                lost = self._lost
                about = {"name": __name__, "msg": "log lines were dropped", "dropped": lost - told}
                self._write(self.format(logging.makeLogRecord(about | {"levelno": logging.WARNING})))
                told = lost

    def _write(self, line: str) -> None:
        data = f"{line}\n".encode("utf-8", "backslashreplace")
        with suppress(OSError):
            while data:
                try:
                    data = data[os.write(self._descriptor, data) :]
                except BlockingIOError:  # noqa: PERF203  (somebody who shares the terminal has made it non-blocking)
                    time.sleep(0.05)


def _log_thread_exception(hook: threading.ExceptHookArgs) -> None:
    if hook.exc_value is not None and not issubclass(hook.exc_type, SystemExit):
        logging.getLogger(__name__).error(
            "a thread ended with an exception",
            extra={"thread_name": hook.thread.name if hook.thread else None},
            exc_info=(hook.exc_type, hook.exc_value, hook.exc_traceback),
        )
