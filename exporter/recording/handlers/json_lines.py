"""JSON lines: each event as one line of JSON in a file that rotates, and how such a file is read back.

Used in the training process, on the thread of whoever writes. Lines that wait together are written with one call. What
was written survives SIGKILL. The file is opened for each batch, so that logrotate, a deleted file and a fork need no care;
several processes may write to one file. A line that was cut short is closed by the next one.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from time import sleep

from exporter.errors import EventsLostError
from exporter.recording.event_values import Datum, Event

SETTLE_SECONDS = 0.01
"""A write that is under way has gone on after so long."""


class JsonLinesHandler:
    """Appends events to a file; `{run}`, `{rank}` and `{pid}` in its path stand for those of the process."""

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int = 64 << 20, backups: int = 5) -> None:
        self._pattern = os.path.abspath(os.fspath(path))  # noqa: PTH100  # before the job changes its directory
        self._file = LinesFile(max_bytes=max_bytes, backups=backups)
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lines: list[bytes] = []
        self._path: Path | None = None

    def handle(self, event: Event) -> None:
        """Take one event; it is written by `flush`."""
        if self._pid != os.getpid():
            self._begin()  # a forked child: what was not written yet is the parent's
        if self._path is None:
            self._path = filled(self._pattern, event.run, event.rank)
        self._lines.append(line_of(event))

    def flush(self) -> None:
        """Write what was taken since the last time; raises EventsLostError where some of it could not be."""
        lines, self._lines = self._lines, []
        if self._path is not None:
            self._file.append(self._path, lines)


def line_of(event: Event) -> bytes:
    """Render an event as JSON, whatever is in it; a number that is not finite becomes text."""
    fields = event.as_dict()
    fields["data"] = {name: _finite(value) for name, value in event.data.items()}
    return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def read_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, object]]:
    """Read the lines of one file back, each a JSON object; those that were cut short are passed over."""
    with open(path, "rb") as file:  # noqa: PTH123  # os.PathLike
        for line in file:
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield found


def filled(pattern: str, run: str, rank: int | None) -> Path:
    """Put the process's own into a path, where `{run}`, `{rank}` and `{pid}` stand for it."""
    run = "".join(each if each.isalnum() or each in "-_." else "_" for each in run)
    shown = "none" if rank is None else str(rank)
    return Path(pattern.replace("{run}", run).replace("{rank}", shown).replace("{pid}", str(os.getpid())))


class LinesFile:
    """Appends lines to files.

    One that would become larger than `max_bytes` is rotated: `events.jsonl` becomes `events.jsonl.1`, and so on, of which
    so many `backups` are kept. Raises TypeError and ValueError: at least 1024 bytes, 0 to 1000 backups.
    """

    def __init__(self, *, max_bytes: int, backups: int) -> None:
        for name, value, least, most in (
            ("max_bytes", max_bytes, 1024, 1 << 62),
            ("backups", backups, 0, 1000),
        ):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be a whole number, not {value!r}")
            if not least <= value <= most:
                raise ValueError(f"{name} must be {least} to {most}, not {value}")
        self._max_bytes = max_bytes
        self._backups = backups

    def append(self, path: Path, lines: Sequence[bytes]) -> None:
        """Append lines, each of which ends in a newline; missing directories are made.

        Raises:
            EventsLostError: Some of them could not be written; the first ones were.
        """
        written = 0
        try:
            while written < len(lines):
                written += self._write_some(path, lines[written:])
        except OSError as error:
            raise EventsLostError(
                f"{path}: {error.strerror or error}", lost=len(lines) - written, reason="write"
            ) from error

    def rotate(self, path: Path) -> None:
        """Rotate a file, however small; one that is not there needs none. Raises OSError."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return
        try:
            self._rotate(path, descriptor)
        finally:
            os.close(descriptor)

    def _write_some(self, path: Path, lines: Sequence[bytes]) -> int:
        """Write as many lines as the file may take, none where it is rotated first; how many are there as a whole."""
        descriptor = _opened(path)
        try:
            size, cut = _end(descriptor)
            head = b"\n" if cut else b""
            count, total = 0, size + len(head)
            for line in lines:
                if total + len(line) > self._max_bytes and (count or size):
                    break
                count, total = count + 1, total + len(line)
            if not count:
                self._rotate(path, descriptor)
                return 0
            return _write(descriptor, head, lines[:count])
        finally:
            os.close(descriptor)

    def _rotate(self, path: Path, descriptor: int) -> None:
        # The lock is that of the file that is rotated: of several processes one does it, the others see that the
        # name stands for another file now.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not (path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor))):
            return
        if not self._backups:
            path.unlink()
        for number in range(self._backups, 0, -1):
            newer = path if number == 1 else path.with_name(f"{path.name}.{number - 1}")
            if newer.exists():
                newer.replace(path.with_name(f"{path.name}.{number}"))


def _finite(value: Datum) -> Datum:
    return value if not isinstance(value, float) or isfinite(value) else str(value)


def _opened(path: Path) -> int:
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(path, flags, 0o644)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o644)


def _end(descriptor: int) -> tuple[int, bool]:
    """Tell the size of a file, and whether its last line was cut short, by a full disk or by SIGKILL.

    One that grows is being written by another process: what of that is there already is no line that was cut short.
    """
    before = -1
    while True:
        size = os.fstat(descriptor).st_size
        if not size or os.pread(descriptor, 1, size - 1) == b"\n":
            return size, False
        if size == before:
            return size, True
        before = size
        sleep(SETTLE_SECONDS)


def _write(descriptor: int, head: bytes, lines: Sequence[bytes]) -> int:
    """Write with one call; where it was cut short, the lines that are there as a whole count."""
    done = os.write(descriptor, head + b"".join(lines)) - len(head)
    count = 0
    for line in lines:
        done -= len(line)
        if done < 0:
            break
        count += 1
    if not count:
        raise OSError(28, "no space for a whole line")
    return count
