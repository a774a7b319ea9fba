"""Logs of the sidecar: one line per record on stderr, as logfmt or JSON, never in anybody's way.

How a module logs (any stage; nothing of this file is imported for it):

    _log = logging.getLogger(__name__)
    _log.warning("collector failed", extra={"collector": name, "reason": error.reason})

The message is a constant in lower case, without numbers; what varies goes into `extra`, as key and value. (The
names of LogRecord's own attributes - `name`, `args`, `module`, `process`, … - cannot be used as keys: logging
raises KeyError.) `exc_info=True` adds the traceback as the value `stack`. Nothing per scrape or per event above
debug: a condition is logged when it begins and when it ends.

    time=2026-01-31T12:00:00.000Z level=warn source=collectors/scheduler.py:88 msg="collector failed" collector=cpu

Threads: any thread may log; a line is formatted by the caller and written by one daemon thread, through a
bounded queue. When stderr is a full pipe, a hung disk or closed, lines are dropped and counted, and no caller
waits or sees an exception. Lines are written whole, so that those of the job on the same terminal stay readable.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import re
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

Level = Literal["debug", "info", "warn", "error"]
Form = Literal["logfmt", "json"]

LEVELS: Mapping[Level, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}

LONGEST_VALUE = 4000
"""Characters of one value; the rest is cut off. A traceback fits, a hostile label does not fill a disk."""

QUEUED_LINES = 1000

# What every LogRecord has; all else came through `extra`.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_TAKEN = frozenset({"time", "level", "source", "msg", "stack"})
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # noqa: PTH100, PTH120  (strings compare cheaply)


def level_name(number: int) -> Level:
    """The name of the highest level that is not above a number of the logging module."""
    return max((name for name in LEVELS if LEVELS[name] <= number), key=LEVELS.__getitem__, default="debug")


class Formatter(logging.Formatter):
    """A record as one line; never raises."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form

    def format(self, record: logging.LogRecord) -> str:
        """Render a record; hostile values are escaped, shortened, or named by what they raised."""
        pairs = dict(_pairs(record))
        if self.form == "json":
            return json.dumps({key: _json_value(value) for key, value in pairs.items()})
        return " ".join(f"{key}={_logfmt_value(value)}" for key, value in pairs.items())


def _pairs(record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    yield "time", f"{moment}.{int(record.msecs):03d}Z"
    yield "level", level_name(record.levelno)
    yield "source", f"{_file_of(record)}:{record.lineno}"
    yield "msg", _text(record.getMessage)
    for name, value in vars(record).items():
        if name not in _OWN:
            key = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:100] or "_"
            yield (f"{key}_" if key in _TAKEN else key), value
    if record.exc_info:
        yield "stack", _text(lambda: "".join(traceback.format_exception(*record.exc_info)).rstrip())  # type: ignore[misc]  # logging has put the triple there


def _loss(lines: int) -> logging.LogRecord:
    """The record that tells of lost lines; it goes past the queue, which may be full again."""
    record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, "log lines were dropped", None, None)
    record.dropped = lines
    return record


def _file_of(record: logging.LogRecord) -> str:
    path = record.pathname
    return path[len(_PACKAGE) :] if path.startswith(_PACKAGE) else os.path.basename(path)  # noqa: PTH119  (as above)


def _text(make: Callable[[], str]) -> str:
    try:
        text = make()
    except Exception as error:  # noqa: BLE001  (foreign __str__, or a message whose arguments do not fit)
        return f"!({type(error).__name__})"
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


def _json_value(value: Any) -> Any:
    if value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value)):
        return value
    return _text(lambda: str(value))


def _logfmt_value(value: Any) -> str:
    text = (
        "null" if value is None else str(value).lower() if type(value) is bool else _text(lambda: str(value))
    )
    if text and text.isprintable() and not any(c in ' ="\\' for c in text):
        return text
    # JSON's escapes are what logfmt's parsers undo; beyond ASCII only what a terminal shows as itself is left.
    return '"' + "".join(c if c.isprintable() and c not in '"\\' else json.dumps(c)[1:-1] for c in text) + '"'


class Handler(logging.Handler):
    """Hands lines to its thread; full queue or dead stderr cost the line, nothing else.

    Args:
        form: How lines look.
        descriptor: Where they go; None drops them all.
    """

    def __init__(self, form: Form, descriptor: int | None) -> None:
        super().__init__()
        self.setFormatter(Formatter(form))
        self._descriptor = descriptor
        self._lines: queue.Queue[str | None] = queue.Queue(QUEUED_LINES)
        self._refused = 0  # by the queue; counted under the handler's lock
        self._failed = 0  # counted by the thread
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_lines, name="exporter-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record's line, or count it as dropped."""
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._refused += 1

    def finish(self, timeout_seconds: float) -> None:
        """Write what is queued, but wait no longer than this for a stderr that does not take it."""
        self._closing.set()
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(timeout_seconds)

    def _write_lines(self) -> None:
        told = 0
        while True:
            try:
                line = self._lines.get(timeout=0.1 if self._closing.is_set() else None)
            except queue.Empty:
                return
            if line is None:
                return
            if not self._write(line):
                self._failed += 1
            lost = self._refused + self._failed
            if lost > told and self._write(self.format(_loss(lost - told))):
                told = lost

    def _write(self, line: str) -> bool:
        if self._descriptor is None:
            return False
        data = f"{line}\n".encode("utf-8", "backslashreplace")
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # noqa: PERF203  (somebody who shares the terminal has made it non-blocking)
                if self._closing.is_set():
                    return False
                select.select([], [self._descriptor], [], 0.5)
            except OSError:
                return False
        return True


class Logs:
    """The process's logging, from `install` to `close`."""

    def __init__(
        self, *, level: Level = "info", form: Form = "logfmt", descriptor: int | None = None
    ) -> None:
        self._handler = Handler(form, descriptor)
        self._level: Level = level
        self._before: list[Callable[[], None]] = []

    def install(self) -> None:
        """Route every logger, Python's warnings and uncaught exceptions of threads through these logs."""
        root = logging.getLogger()
        old_level, old_hook, old_raise = root.level, threading.excepthook, logging.raiseExceptions
        root.addHandler(self._handler)
        root.setLevel(LEVELS[self._level])
        logging.captureWarnings(capture=True)
        logging.raiseExceptions = (
            False  # a broken log call is not worth a traceback in the middle of the lines
        )
        threading.excepthook = _log_thread_exception
        self._before = [
            lambda: root.removeHandler(self._handler),
            lambda: root.setLevel(old_level),
            lambda: logging.captureWarnings(capture=False),
            lambda: setattr(logging, "raiseExceptions", old_raise),
            lambda: setattr(threading, "excepthook", old_hook),
        ]

    def configure(self, *, level: Level, form: Form) -> None:
        """Change what is shown, and how, from the next record on."""
        logging.getLogger().setLevel(LEVELS[level])
        self._handler.setFormatter(Formatter(form))

    def close(self, timeout_seconds: float = 1.0) -> None:
        """Undo `install` and write what is left, within a time."""
        for undo in self._before:
            undo()
        self._before = []
        self._handler.finish(timeout_seconds)


def stderr_descriptor() -> int | None:
    """The descriptor of stderr, None where the process was started without one.

    Then its number may belong to any file opened since, and writing there would damage it.
    """
    try:
        return sys.stderr.fileno() if sys.stderr is not None else None
    except (OSError, ValueError):  # closed, or replaced by something that is no file
        return None


def _log_thread_exception(hook: threading.ExceptHookArgs) -> None:
    if hook.exc_value is None or issubclass(hook.exc_type, SystemExit):
        return
    logging.getLogger(__name__).error(
        "a thread ended with an exception",
        extra={"thread_name": hook.thread.name if hook.thread else None},
        exc_info=(hook.exc_type, hook.exc_value, hook.exc_traceback),
    )
