"""A file of lines that rotates: how lines are appended to it, and read back.

Used in the training process, on the thread of whoever writes. What was written survives SIGKILL. A line that was cut
short, by a full disk or by a kill, is closed by the next one that can be written. The file is opened for each batch, so
that logrotate, a deleted file and a fork need no care; several processes may write to one file.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import sleep

from exporter.errors import EventsLostError

SETTLE_SECONDS = 0.01
"""A write that is under way has gone on after so long."""


class LinesFile:
    """Appends lines to files.

    Args:
        max_bytes: A file that would become larger is rotated: `events.jsonl` becomes `events.jsonl.1`, and so on.
        backups: Rotated files that are kept; 0 keeps none.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: `max_bytes` is below 1024, or `backups` is not from 0 to 1000.
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
        """Append lines, each of which ends in a newline. Missing directories are made.

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
        """Rotate a file, however small; one that is not there needs none.

        Raises:
            OSError: It could not be.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return
        try:
            self._rotate(path, descriptor)
        finally:
            os.close(descriptor)

    def _write_some(self, path: Path, lines: Sequence[bytes]) -> int:
        """Write as many lines as the file may take, at least one of them unless it is rotated.

        Returns:
            How many were written as a whole.
        """
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
        ours = os.fstat(descriptor)
        try:
            named = path.stat()
        except FileNotFoundError:
            return
        if (named.st_dev, named.st_ino) != (ours.st_dev, ours.st_ino):
            return
        if not self._backups:
            path.unlink()
            return
        for number in range(self._backups, 0, -1):
            older = path.with_name(f"{path.name}.{number}")
            newer = path if number == 1 else path.with_name(f"{path.name}.{number - 1}")
            if newer.exists():
                newer.replace(older)


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
