"""Event handlers of the package: console, JSON lines, logging, TensorBoard.

A handler runs on a worker thread, which counts events that are lost because of a closed stream or a full disk.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import sys
from math import isfinite
from pathlib import Path
from time import gmtime, strftime
from typing import Any, TextIO

try:
    import fcntl
except ImportError:  # Windows, where each append to a file fails and is counted as an error
    fcntl = None  # type: ignore[assignment]

from exporter.recording.event_values import LEVEL_BY_SEVERITY, Event

# Console -----------------------------------------------------------------------------------------------------


class ConsoleHandler:
    """Handler that writes a line per event to a stream, by default to the current `sys.stderr`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def handle(self, event: Event) -> None:
        """Write one line and flush it."""
        stream = sys.stderr if self._stream is None else self._stream
        encoding = getattr(stream, "encoding", None) or "utf-8"
        # A character that the stream cannot encode is written as an escape sequence.
        stream.write((text_line(event) + "\n").encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()


def text_line(event: Event) -> str:
    """Return an event as `2026-01-31T12:00:00.123Z WARNING rank=0 checkpoint.failed 'no space' step=100`."""
    rank = "" if event.rank is None else f" rank={event.rank}"
    try:
        milliseconds = round(event.timestamp * 1000)
        timestamp = (
            f"{strftime('%Y-%m-%dT%H:%M:%S', gmtime(milliseconds // 1000))}.{milliseconds % 1000:03d}Z"
        )
    except (OverflowError, ValueError, OSError):
        timestamp = repr(event.timestamp)  # outside the range of `gmtime`
    return f"{timestamp} {event.severity.upper()}{rank} {_summary(event)}"


def _summary(event: Event) -> str:
    message = "" if event.message is None else f" {event.message!r}"
    data = "".join(f" {_quoted(name)}={value!r}" for name, value in event.data.items())
    return f"{_quoted(event.type)}{message}{data}"


def _quoted(text: str) -> str:
    return text if text.isprintable() and " " not in text else repr(text)


# JSON lines --------------------------------------------------------------------------------------------------


class JsonLinesHandler:
    """Handler that appends each event as a line of JSON to a rotating file. Written lines survive SIGKILL.

    `{run}` and `{rank}` in the path are replaced by the values of the event, and `{pid}` by the id of the process. Characters of the run
    other than letters, digits and `-_.` become `_`, and a missing rank becomes `none`.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int = 64 << 20, backups: int = 5) -> None:
        self._pattern = os.path.abspath(os.fspath(path))  # noqa: PTH100  # before the job changes its directory
        self._file = LinesFile(max_bytes=max_bytes, backups=backups)

    def handle(self, event: Event) -> None:
        """Write one event."""
        self._file.append(expand_path(self._pattern, event.run, event.rank), json_line(event))


def json_line(event: Event) -> bytes:
    """Return an event as a line of JSON. A number that is not finite becomes text."""
    fields = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    fields["data"] = {
        name: value if not isinstance(value, float) or isfinite(value) else str(value)
        for name, value in event.data.items()
    }
    return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def expand_path(pattern: str, run: str, rank: int | None) -> Path:
    """Return the path of a pattern with `{run}`, `{rank}` and `{pid}`, see `JsonLinesHandler`."""
    run = "".join(character if character.isalnum() or character in "-_." else "_" for character in run)
    rank_text = "none" if rank is None else str(rank)
    return Path(pattern.replace("{run}", run).replace("{rank}", rank_text).replace("{pid}", str(os.getpid())))


class LinesFile:
    """Writer of lines to rotating files. The file is opened for each line, so that it may be renamed, deleted, or shared after a fork.

    A file with lines that would exceed `max_bytes` is rotated: `events.jsonl` becomes `events.jsonl.1`, and so on, up to `backups`
    old files. Several processes may write to the same file.

    Raises:
        ValueError: `max_bytes` is below 1024, or `backups` is not 0 to 1000.
    """

    def __init__(self, *, max_bytes: int, backups: int) -> None:
        if max_bytes < 1024 or not 0 <= backups <= 1000:
            raise ValueError(
                f"max_bytes must be at least 1024, backups 0 to 1000, not {max_bytes} and {backups}"
            )
        self._max_bytes = max_bytes
        self._backups = backups

    def append(self, path: Path, line: bytes) -> None:
        """Append a line that ends with a newline. Missing directories are created. Raises OSError if the line is not written."""
        while not self._append(path, line):
            pass

    def _append(self, path: Path, line: bytes) -> bool:
        """Append the line, or rotate a full file and return False."""
        descriptor = _open(path)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line  # the last line was truncated, by a full disk or SIGKILL
            if size and size + len(line) > self._max_bytes:
                self._rotate(path, descriptor)
                return False
            if os.write(descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            return True
        finally:
            os.close(descriptor)

    def _rotate(self, path: Path, descriptor: int) -> None:
        """Rename the file and its backups, or delete the file if no backups are kept. Do nothing if another process has rotated it."""
        # The first process to lock the full file rotates it. The other processes then find a different file under the path.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not (path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor))):
            return
        if not self._backups:
            path.unlink()
        for number in range(self._backups, 0, -1):
            newer = path if number == 1 else path.with_name(f"{path.name}.{number - 1}")
            if newer.exists():
                newer.replace(path.with_name(f"{path.name}.{number}"))


def _open(path: Path) -> int:
    """Open a file for appending, and create missing directories. A write to a full FIFO raises instead of waiting."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(path, flags, 0o644)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o644)


# Logging -----------------------------------------------------------------------------------------------------


class LoggingHandler:
    """Handler that passes each event to a logger as a log record, with the event as attribute `exporter_event`."""

    def __init__(self, logger: logging.Logger | str = "exporter.events") -> None:
        self._logger = logging.getLogger(logger) if isinstance(logger, str) else logger

    def handle(self, event: Event) -> None:
        """Log one record."""
        self._logger.log(
            LEVEL_BY_SEVERITY[event.severity], "%s", _summary(event), extra={"exporter_event": event}
        )


# TensorBoard -------------------------------------------------------------------------------------------------


class TensorBoardHandler:
    """Handler that adds each number as `<type>/<name>`, and the message as `<type>/message`, at the time of the event.

    The writer is a `SummaryWriter` or an object with `add_scalar` and `add_text`. `step` is the name of the datum that contains
    the number of the step.
    """

    def __init__(self, writer: Any, *, step: str = "step") -> None:
        self._writer = writer
        self._step = step

    def handle(self, event: Event) -> None:
        """Add the values and the message of an event."""
        step = event.data.get(self._step)
        position = {"global_step": step if type(step) is int else None, "walltime": event.timestamp}
        for name, value in event.data.items():
            if not isinstance(value, str) and name != self._step:
                self._writer.add_scalar(f"{event.type}/{name}", float(value), **position)
        if event.message is not None:
            self._writer.add_text(f"{event.type}/message", event.message, **position)
